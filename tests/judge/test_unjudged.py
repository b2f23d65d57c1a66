"""Who accepts is told which figures nobody judged."""

from __future__ import annotations

from dataclasses import replace

from seatrial.checks import catalog
from seatrial.judge.decision import decide
from seatrial.judge.unjudged import unjudged
from seatrial.model import Measurement, Metric, Outcome, Verb, Verdict

JUDGED = Verdict(
    check="collectives.all_gather", subject="cluster", metric="busbw.1GiB", outcome=Outcome.PASS, reason=""
)


def measured(check: str, *names: str) -> Measurement:
    metrics = tuple(Metric(name=name, value=1, unit="GB/s", subject="cluster") for name in names)
    return Measurement(check=check, subject="cluster", metrics=metrics)


def test_figures_of_performance_that_no_verdict_is_on_are_told_together() -> None:
    sizes = ("busbw.1GiB", "busbw.1MiB", "busbw.1KiB", "latency.1KiB", "wrong_elements")
    every = [measured(f"collectives.{name}", *sizes) for name in ("all_gather", "broadcast", "reduce")]
    assert unjudged(catalog(), every, [JUDGED]) == (
        "collectives.all_gather: busbw.* other than 1GiB, latency.1KiB",
        "collectives.broadcast, collectives.reduce: busbw.*, latency.1KiB",
    )


def test_what_did_not_apply_judged_nothing() -> None:
    skipped = replace(JUDGED, outcome=Outcome.SKIP)
    one = measured("collectives.all_gather", "busbw.1GiB")
    assert unjudged(catalog(), [one], [skipped]) == ("collectives.all_gather: busbw.1GiB",)
    assert unjudged(catalog(), [one], [JUDGED]) == ()


def test_acceptance_says_of_what_it_does_not_speak() -> None:
    lines = ("a, b: busbw.*, latency.*", "c: triad")
    decision = decide({JUDGED.check: True}, [JUDGED], {}, "", unjudged=lines)
    assert decision.value is Verb.ACCEPTED
    assert (
        decision.reason
        == "1 check passed; of 3 checks the report lists figures that were recorded and judged by nothing"
    )
    assert decision.unjudged == lines
    failed = replace(JUDGED, outcome=Outcome.FAIL)
    assert decide({JUDGED.check: True}, [failed], {}, "", unjudged=lines).unjudged == lines
