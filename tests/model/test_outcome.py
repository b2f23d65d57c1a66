from __future__ import annotations

from seatrial.model.outcome import WORST_FIRST, Outcome, worst


def test_worst_outcome() -> None:
    assert worst([]) is Outcome.UNJUDGED
    assert worst([Outcome.PASS, Outcome.ERROR, Outcome.FAIL, Outcome.SKIP]) is Outcome.FAIL
    assert worst([Outcome.PASS, Outcome.SKIP]) is Outcome.PASS
    assert worst([Outcome.PASS, Outcome.UNJUDGED, Outcome.WARN]) is Outcome.UNJUDGED


def test_worst_first_lists_every_outcome() -> None:
    assert sorted(WORST_FIRST) == sorted(Outcome)
