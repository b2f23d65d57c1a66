"""benchmarks/decision_power.py with few draws: healthy records are accepted, each fault is rejected."""

from __future__ import annotations

import pytest

from benchmarks import decision_power
from seatrial.model import Outcome

TESTED_FAULTS = (
    "one GPU 12 % slow, all at 103 % of the references",
    "one NVLink pair without 3 links",
    "4 of 10 windows at a twentieth",
)


@pytest.fixture(scope="module")
def decisions() -> dict[str, dict[str, object]]:
    cases = {**decision_power.HEALTHY, **{name: decision_power.FAULTS[name] for name in TESTED_FAULTS}}
    rows = decision_power.count_decisions([(1, 2)], 3, 3, 2, cases)
    return {str(row["case"]): row for row in rows}


@pytest.mark.parametrize("case", decision_power.HEALTHY)
def test_healthy_node_is_accepted(decisions: dict[str, dict[str, object]], case: str) -> None:
    assert decisions[case]["ACCEPTED"] == 3


@pytest.mark.parametrize("fault", TESTED_FAULTS)
def test_fault_is_rejected(decisions: dict[str, dict[str, object]], fault: str) -> None:
    assert decisions[fault]["REJECTED"] == 3


def test_a_missed_fault_does_not_meet_the_requirement() -> None:
    meets = decision_power.meets_requirements
    healthy, slow = {"draws": 300, "wanted": "ACCEPTED"}, {"draws": 300, "wanted": "REJECTED"}
    rows = [{**healthy, "ACCEPTED": 297}, {**slow, "REJECTED": 297}]
    assert meets(rows)
    assert not meets([*rows, {**slow, "REJECTED": 296, "INCOMPLETE": 4}])


def test_bound_that_300_draws_prove() -> None:
    bound = decision_power.lower_bound
    assert bound(300, 300) == pytest.approx(0.05 ** (1 / 300), abs=1e-4)
    assert bound(297, 300) == pytest.approx(0.974, abs=2e-3)


def test_curve_and_coverage_have_a_row_for_each_case() -> None:
    curve = decision_power.power_curve(draws=1)
    assert len(curve) == 4 * 3 * 7
    assert "<polyline" in decision_power.figure(curve)
    assert [row["windows"] for row in decision_power.coverage(draws=1)][::4] == [10, 30, 100, 300, 1000]


def test_smallest_slowdown_of_the_memory_follows_from_the_reference() -> None:
    generator = decision_power.Generator.for_shape(1, 1, ("device.memory",))
    rejected, base = decision_power.smallest_slowdown(generator, "device.memory", "copy", (Outcome.FAIL,), 2)
    assert rejected in (10, 11, 12)
    assert base == "NVIDIA H200 SXM"
