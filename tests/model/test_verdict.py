"""Serialization and immutability of verdicts."""

from __future__ import annotations

from dataclasses import asdict

import pytest
from pydantic import TypeAdapter, ValidationError

from seatrial.model import Basis, BasisKind, Outcome, Reason, Retry, Verdict

_VERDICT = Verdict(
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
    retry=Retry(5.0, 6.0, "n0/gpu1", 7.0),
)
_ADAPTER = TypeAdapter(Verdict)


def test_verdict_round_trip() -> None:
    read = _ADAPTER.validate_json(_ADAPTER.dump_json(_VERDICT))
    assert read == _VERDICT
    assert hash(read) == hash(_VERDICT)
    assert [*_ADAPTER.dump_python(read), "other_limits"] == list(asdict(_VERDICT)), "an empty list is not written"
    assert not hasattr(read, "__dict__"), "a verdict with a __dict__ takes four times the memory"


def _assign_field(verdict: Verdict) -> None:
    """Never called: mypy reports an unused ``ignore`` here unless verdicts are frozen for mypy."""
    verdict.detail = "changed"  # type: ignore[misc]


@pytest.mark.parametrize(
    "change",
    [{"outcome": "GOOD"}, {"detail": 1}, {"reasons": ["slow"]}, {"basis": {"kind": "hearsay"}}, {"colour": "green"}],
)
def test_invalid_field_is_rejected(change: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        _ADAPTER.validate_python({**asdict(_VERDICT), **change})
