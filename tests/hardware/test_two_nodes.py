"""The search on two nodes by simulated rates: rails and directions of their only pair."""

from __future__ import annotations

import pytest

from seatrial.hardware.pair_rates import CPU_LIMITS, GPU_LIMITS
from seatrial.hardware.pair_search import conclude
from tests.hardware.test_pair_search import search, slow


def test_two_nodes_name_the_rail_and_the_direction_of_the_pair() -> None:
    def factor(sender: str, _receiver: str, rail: int) -> float:
        return 0.8 if sender == "n0001" and rail == 2 else 1.0

    steps, rates, conclusion = search(2, factor)
    assert conclude(rates, GPU_LIMITS) == conclusion
    assert [(path.pair, path.rail, path.direction) for path in conclusion.paths] == [
        (("n0000", "n0001"), 2, "receives")
    ]
    assert all(0.15 < deficit < 0.25 for deficit in conclusion.paths[0].deficits)
    assert not conclusion.ranks
    assert len(steps) == 9
    assert {step.stage for step in steps} == {"rounds", "directions"}


@pytest.mark.parametrize("rails", [1, 2, 8])
def test_a_fault_of_all_rails_and_directions_of_two_nodes_is_not_visible(rails: int) -> None:
    assert search(2, slow("n0001", share=0.5), rails=rails)[2].paths == ()
    assert search(2, slow(), rails=rails)[2].paths == ()


def test_a_slow_direction_between_two_nodes_without_gpus() -> None:
    def factor(sender: str, _receiver: str, _rail: int) -> float:
        return 0.05 if sender == "n0000" else 1.0

    conclusion = search(2, factor, CPU_LIMITS, noise=0.3, rails=1)[2]
    assert [(path.rail, path.direction) for path in conclusion.paths] == [(0, "sends")]
    assert search(2, slow(), CPU_LIMITS, noise=0.3, rails=1)[2].paths == ()


def test_an_incomplete_search_names_nothing() -> None:
    _, rates, _ = search(2, lambda a, _b, _rail: 0.5 if a == "n0000" else 1.0)
    assert conclude(rates, GPU_LIMITS).paths
    assert conclude(rates[:4], GPU_LIMITS).paths == ()
