"""Every reason has its text, and every verdict reads as a sentence."""

from __future__ import annotations

from dataclasses import replace

import pytest

from seatrial.model import Basis, BasisKind, Outcome, Reason, Retry, Verdict
from seatrial.model.verdict_text import basis_text

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


def test_the_meaning_stands_after_the_statement() -> None:
    assert BAD.summary == "speed is 5 GB/s, expected >= 10 GB/s"
    assert BAD.message == "speed is 5 GB/s, expected >= 10 GB/s: slow is bad"


@pytest.mark.parametrize(
    ("retry", "reason", "text"),
    [
        (Retry(5, 4), Reason.REPRODUCED, "reproduced (5 GB/s, then 4 GB/s)"),
        (Retry(5, 12), Reason.NOT_REPRODUCED, "not reproduced (5 GB/s, then 12 GB/s), worth looking at"),
        (
            Retry(5, 12, failed_only_in_retry=("n/gpu2",)),
            Reason.NOT_REPRODUCED,
            "not reproduced (5 GB/s, then 12 GB/s; instead n/gpu2 fell short), worth looking at",
        ),
        (
            Retry(5, 4, "n/gpu3"),
            Reason.REPRODUCED_ON_OTHER_DEVICE,
            "reproduced by the same rank (5 GB/s here, then 4 GB/s at n/gpu3): it goes with the rank, "
            "not with the device",
        ),
        (Retry(12, 5), Reason.FAILED_IN_RETRY_ONLY, "the second time only (12 GB/s, then 5 GB/s), worth looking at"),
        (None, Reason.FAILED_IN_RETRY_ONLY, "seen when it was measured a second time"),
        (None, Reason.RETRY_FAILED, "not repeated, though it was tried"),
    ],
)
def test_the_second_measurement_stands_before_the_meaning(retry: Retry | None, reason: Reason, text: str) -> None:
    verdict = replace(BAD, reasons=(*BAD.reasons, reason), retry=retry)
    assert verdict.message == f"{BAD.summary}; {text}: slow is bad"


@pytest.mark.parametrize(
    ("basis", "text"),
    [
        (SKU, "SKU H200: 10 GB/s (a paper); fails under 90%, warns under 95%"),
        (Basis(BasisKind.RULE, "", 1.0, "bool", "=="), "rule: must be yes"),
        (Basis(BasisKind.TRIAL, "site", 0.0, "bool", "=="), "trial site: must be no"),
        (Basis(BasisKind.RULE, "", 0.0, "count", "=="), "rule: == 0 count"),
        (Basis(BasisKind.RULE, "error counters", 0.0, source="Xid catalog"), "error counters: Xid catalog"),
        (
            Basis(BasisKind.PEERS, "4 subjects on X", 10.0, "GB/s", warn_below=0.75),
            "median of 4 subjects on X; warns under 75%",
        ),
        (replace(SKU, lax_reason="it passes all"), f"{basis_text(SKU)}; LAX THRESHOLD: it passes all"),
    ],
)
def test_who_judges(basis: Basis, text: str) -> None:
    assert str(basis) == text
