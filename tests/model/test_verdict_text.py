"""The text of verdicts: each reason has one, and the basis is complete."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.model import Basis, BasisKind, Outcome, Reason, Retry, Verdict
from seatrial.model.verdict_text import LAX_THRESHOLD, STRICT_THRESHOLD

BAD = Verdict(
    check="c",
    subject="n/gpu0->gpu1",
    outcome=Outcome.FAIL,
    metric="speed",
    reasons=(Reason.THRESHOLD_VIOLATED,),
    value=5.0,
    unit="GB/s",
    basis=Basis(BasisKind.TRIAL, "mine", 10.0, "GB/s", ">="),
    meaning="slow is bad",
)
SKU = Basis(BasisKind.SKU, "H200", 10.0, "GB/s", source="a paper", fail_below=0.9, warn_below=0.95)


@pytest.mark.parametrize("reason", Reason)
def test_each_reason_has_a_text(reason: Reason) -> None:
    verdict = replace(
        BAD, reasons=(reason,), interval=(4.0, 6.0), opposite_value=9.0, retry=Retry(5.0, 6.0), detail="because"
    )
    assert verdict.message
    assert "{" not in verdict.message


def test_message_is_summary_and_meaning() -> None:
    assert "speed is 5 GB/s" in BAD.summary
    assert ">= 10 GB/s" in BAD.summary
    assert BAD.message == f"{BAD.summary}: {BAD.meaning}"


@pytest.mark.parametrize(
    ("retry", "reason", "values"),
    [
        (Retry(5, 4), Reason.REPRODUCED, ("5 GB/s", "4 GB/s")),
        (Retry(5, 12), Reason.NOT_REPRODUCED, ("5 GB/s", "12 GB/s")),
        (Retry(5, 12, third_value=4), Reason.REPRODUCED, ("5 GB/s", "12 GB/s", "4 GB/s")),
        (Retry(5, 4, "n/gpu3"), Reason.REPRODUCED, ("5 GB/s", "4 GB/s on n/gpu3")),
        (None, Reason.NOT_RETRIED, ("not retried",)),
    ],
)
def test_summary_names_both_values_of_a_retry(retry: Retry | None, reason: Reason, values: tuple[str, ...]) -> None:
    verdict = replace(BAD, reasons=(*BAD.reasons, reason), retry=retry)
    retry_text = verdict.summary.removeprefix(f"{BAD.summary}; ")
    assert all(value in retry_text for value in values)
    assert "()" not in retry_text


@pytest.mark.parametrize(
    ("basis", "values"),
    [
        (SKU, ("SKU H200", "10 GB/s", "a paper", "90%", "95%")),
        (Basis(BasisKind.RULE, "", 1.0, "bool", "=="), ("rule", "yes")),
        (Basis(BasisKind.TRIAL, "site", 0.0, "bool", "=="), ("trial site", "no")),
        (Basis(BasisKind.RULE, "", 0.0, "count", "=="), ("rule", "== 0 count")),
        (Basis(BasisKind.RULE, "error counters", 0.0, source="Xid catalog"), ("error counters", "Xid catalog")),
        (Basis(BasisKind.PEERS, "4 subjects on X", 10.0, "GB/s", warn_below=0.75), ("4 subjects on X", "75%")),
        (replace(SKU, asymmetry_limit=0.85), ("SKU H200", "95%", "85%", "opposite")),
        (replace(SKU, lax_reason="it passes all"), (LAX_THRESHOLD, "it passes all")),
        (replace(SKU, exceeds="the 9 GB/s"), (STRICT_THRESHOLD, "the 9 GB/s")),
    ],
)
def test_basis_text_names_source_and_limits(basis: Basis, values: tuple[str, ...]) -> None:
    assert all(value in str(basis) for value in values)


@pytest.mark.parametrize(
    ("op", "unit", "text"),
    [("==", "GPUs", ", must be 0 GPUs"), (">=", "GPUs", ", expected >= 0 GPUs"), ("==", "bool", ", expected no")],
)
def test_an_expected_number_is_not_read_as_the_expected_change(op: str, unit: str, text: str) -> None:
    basis = Basis(BasisKind.RULE, expected=0, unit=unit, op=op)
    verdict = replace(BAD, metric="gpus_missing", value=8, unit=unit, basis=basis)
    assert verdict.summary.endswith(text)
