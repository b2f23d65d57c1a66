"""Checks that only declare an operation: each has the rules that all collectives share."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from seatrial.bench.operations import OPERATIONS
from seatrial.checks import catalog
from seatrial.checks.fabric.collectives import CHECKS
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

# operation → whether a missing reference value leaves it UNJUDGED (else SKIP)
DECLARED = {
    **dict.fromkeys(("all_gather", "all_to_all", "reduce_scatter"), True),
    **dict.fromkeys(("broadcast", "reduce", "send_receive"), False),
}
CHECK_BY_OPERATION = {check.operation: check for check in CHECKS}
GOOD = {"busbw.1GiB": 400.0, "wrong_elements": 0, "sizes_not_allocated": 0}
ON_NVLINK = {"backend": "nccl", "gpu": "unknown GPU", "world_size": 8, "nodes": 1}


@pytest.mark.parametrize("name", DECLARED)
def test_check_is_in_the_catalog_under_its_operation(name: str) -> None:
    assert catalog()[f"collectives.{name}"] is CHECK_BY_OPERATION[name]
    assert name in OPERATIONS


@pytest.mark.parametrize("name", DECLARED)
def test_wrong_data_fails_and_size_not_allocated_is_an_error(name: str) -> None:
    check = CHECK_BY_OPERATION[name]
    judged = outcomes(check, {**GOOD, "wrong_elements": 1, "sizes_not_allocated": 1}, **ON_NVLINK)
    assert judged["wrong_elements"] is Outcome.FAIL
    assert judged["sizes_not_allocated"] is Outcome.ERROR


@pytest.mark.parametrize("name", DECLARED)
def test_bandwidth_without_reference_never_passes(name: str) -> None:
    check, required = CHECK_BY_OPERATION[name], DECLARED[name]
    judged = outcomes(check, GOOD, **ON_NVLINK)
    assert judged["wrong_elements"] is judged["sizes_not_allocated"] is Outcome.PASS
    assert judged["busbw.1GiB"] is Outcome.UNJUDGED, "without SKU data"
    declared = check.declaration("busbw.1GiB")
    assert declared
    assert declared.reference_optional is not required


@pytest.mark.parametrize("name", DECLARED)
def test_performance_metrics_are_retried_before_they_fail(name: str) -> None:
    check = CHECK_BY_OPERATION[name]
    for metric, is_retried in (
        ("busbw.1GiB", True),
        ("rank_time.1GiB", True),
        ("p99.1GiB", True),
        ("wrong_elements", False),
    ):
        assert any(fnmatchcase(metric, pattern) for pattern in check.speeds) is is_retried, metric
