"""The checks of this folder that only declare an operation: each has the rules that all collectives share."""

from __future__ import annotations

from fnmatch import fnmatchcase

import pytest

from seatrial.bench.operations import OPERATIONS
from seatrial.checks import catalog
from seatrial.checks.fabric import all_gather, all_to_all, broadcast, reduce, reduce_scatter, send_receive
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

# operation → its module, and whether figures of it are published, so that a GPU without one leaves it unjudged
DECLARED = {
    "all_gather": (all_gather, True),
    "all_to_all": (all_to_all, True),
    "reduce_scatter": (reduce_scatter, True),
    "broadcast": (broadcast, False),
    "reduce": (reduce, False),
    "send_receive": (send_receive, False),
}
GOOD = {"busbw.1GiB": 400.0, "wrong_elements": 0, "sizes_not_allocated": 0}
ON_NVLINK = {"backend": "nccl", "gpu": "a GPU that nobody knows", "world_size": 8, "nodes": 1}


@pytest.mark.parametrize("name", DECLARED)
def test_the_check_is_in_the_catalog_by_the_name_of_its_operation(name: str) -> None:
    module, _ = DECLARED[name]
    assert catalog()[f"collectives.{name}"] is module.CHECK
    assert name in OPERATIONS


@pytest.mark.parametrize("name", DECLARED)
def test_corrupt_data_fails_and_a_size_without_memory_is_an_error(name: str) -> None:
    check = DECLARED[name][0].CHECK
    judged = outcomes(check, {**GOOD, "wrong_elements": 1, "sizes_not_allocated": 1}, **ON_NVLINK)
    assert judged["wrong_elements"] is Outcome.FAIL
    assert judged["sizes_not_allocated"] is Outcome.ERROR


@pytest.mark.parametrize("name", DECLARED)
def test_bandwidth_without_a_reference_is_never_a_pass(name: str) -> None:
    module, published = DECLARED[name]
    judged = outcomes(module.CHECK, GOOD, **ON_NVLINK)
    assert judged["wrong_elements"] is judged["sizes_not_allocated"] is Outcome.PASS
    assert judged["busbw.1GiB"] is (Outcome.UNJUDGED if published else Outcome.SKIP)


@pytest.mark.parametrize("name", DECLARED)
def test_a_slow_bandwidth_is_measured_again_before_it_fails(name: str) -> None:
    check = DECLARED[name][0].CHECK
    for metric, again in (
        ("busbw.1GiB", True),
        ("rank_time.1GiB", True),
        ("p99.1GiB", True),
        ("wrong_elements", False),
    ):
        assert any(fnmatchcase(metric, family) for family in check.performance) is again, metric
