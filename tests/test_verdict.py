"""A verdict: a record like all others for who reads, writes or would change it."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, asdict

import pytest
from pydantic import TypeAdapter, ValidationError

from seatrial.model import Outcome, Verdict

_ONE = Verdict(check="c", subject="n0", metric="m", outcome=Outcome.PASS, reason="r", evidence="e", judged_by="j")
_RECORD = TypeAdapter(Verdict)


def test_one_made_past_the_guard_is_the_one_that_is_written_and_read() -> None:
    made = Verdict.made("c", "n0", "m", Outcome.PASS, "r", "e", "", "j")
    assert made == _ONE
    assert hash(made) == hash(_ONE)
    assert _RECORD.validate_json(_RECORD.dump_json(made)) == made
    assert list(_RECORD.dump_python(made)) == list(asdict(_ONE))
    assert not hasattr(made, "__dict__"), "it would be four times as large"


def test_it_is_frozen() -> None:
    with pytest.raises(FrozenInstanceError):
        _ONE.reason = "changed"  # type: ignore[misc]


@pytest.mark.parametrize("change", [{"outcome": "GOOD"}, {"reason": 1}, {"colour": "green"}])
def test_a_record_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _RECORD.validate_python({**asdict(_ONE), **change})
