"""benchmarks/decision_power.py with few draws: healthy records are accepted, each fault is rejected."""

from __future__ import annotations

import pytest

from benchmarks import decision_power


@pytest.fixture(scope="module")
def decisions() -> dict[str, dict[str, object]]:
    rows = decision_power.count_decisions([1], 3, 3, 2)
    return {str(row["case"]): row for row in rows}


def test_healthy_node_is_accepted(decisions: dict[str, dict[str, object]]) -> None:
    assert decisions["healthy"]["ACCEPTED"] == 3


@pytest.mark.parametrize("fault", decision_power.FAULTS)
def test_fault_is_rejected(decisions: dict[str, dict[str, object]], fault: str) -> None:
    assert decisions[fault]["REJECTED"] == 3


def test_a_missed_fault_does_not_meet_the_requirement() -> None:
    meets = decision_power.meets_requirements
    rows = [{"case": "healthy", "draws": 300, "ACCEPTED": 297}, {"case": "slow", "draws": 300, "REJECTED": 297}]
    assert meets(rows)
    assert not meets([*rows, {"case": "slow", "draws": 300, "REJECTED": 296, "INCOMPLETE": 4}])


def test_bound_that_300_draws_prove() -> None:
    bound = decision_power.lower_bound
    assert bound(300, 300) == pytest.approx(0.05 ** (1 / 300), abs=1e-4)
    assert bound(297, 300) == pytest.approx(0.974, abs=2e-3)


def test_curve_and_coverage_have_a_row_for_each_case() -> None:
    curve = decision_power.power_curve(draws=1)
    assert len(curve) == 4 * 3 * 7
    assert "<polyline" in decision_power.figure(curve)
    assert [row["windows"] for row in decision_power.coverage(draws=1)][::4] == [10, 30, 100, 300, 1000]
