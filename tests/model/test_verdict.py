"""A verdict: a record like all others for who reads, writes or would change it."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from pydantic import TypeAdapter, ValidationError

from seatrial.model import Basis, BasisKind, Outcome, Reason, Retry, Verdict

_ONE = Verdict(
    check="c",
    subject="n0",
    metric="m",
    outcome=Outcome.FAIL,
    reasons=(Reason.THRESHOLD_VIOLATED, Reason.REPRODUCED),
    value=5.0,
    unit="GB/s",
    basis=Basis(BasisKind.TRIAL, "mine", 10.0, "GB/s", ">="),
    evidence="e",
    interval=(4.0, 6.0),
    retry=Retry(5.0, 6.0, "n0/gpu1", ("n1",)),
)
_RECORD = TypeAdapter(Verdict)


def test_what_is_written_is_what_is_read() -> None:
    read = _RECORD.validate_json(_RECORD.dump_json(_ONE))
    assert read == _ONE
    assert hash(read) == hash(_ONE)
    assert list(_RECORD.dump_python(read)) == list(asdict(_ONE))
    assert not hasattr(read, "__dict__"), "it would be four times as large"


def _changed(one: Verdict) -> None:
    """Never called. To mypy alone a verdict is frozen: were it not, this ``ignore`` would be one too many."""
    one.detail = "changed"  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [{"outcome": "GOOD"}, {"detail": 1}, {"reasons": ["slow"]}, {"basis": {"kind": "hearsay"}}, {"colour": "green"}],
)
def test_a_record_that_is_none_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _RECORD.validate_python({**asdict(_ONE), **change})
