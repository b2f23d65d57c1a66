"""The search for slow nodes by simulated rates: its steps and its conclusion."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain
from random import Random

import pytest

from seatrial.hardware.pair_rates import CPU_LIMITS, GPU_LIMITS, Conclusion, Limits, PairRate, PairStep
from seatrial.hardware.pair_search import PATH_REPEATS, conclude, pair_search

# (sender, receiver, rail) → rate as a share of the healthy rate
Factor = Callable[[str, str, int], float]
RAILS = 4


def names(count: int) -> list[str]:
    return [f"n{number:04}" for number in range(count)]


def search(
    count: int, factor: Factor, limits: Limits = GPU_LIMITS, noise: float = 0.01, rails: int = RAILS
) -> tuple[list[PairStep], list[PairRate], Conclusion]:
    """All steps and rates of a search, and its conclusion; a two-way transfer is as fast as its slower direction."""
    random, rates, steps = Random(count), list[PairRate](), list[PairStep]()
    generator = pair_search(names(count), limits)
    step = next(generator)
    while True:
        steps.append(step)
        measured = [rate(step, first, second, factor, random, noise, rails) for first, second in step.pairs]
        rates += measured
        try:
            step = generator.send(measured)
        except StopIteration as end:
            return steps, rates, end.value


def rate(step: PairStep, a: str, b: str, factor: Factor, random: Random, noise: float, rails: int) -> PairRate:
    def share(rail: int) -> float:
        return factor(a, b, rail) if step.unidirectional else min(factor(a, b, rail), factor(b, a, rail))

    gb_s = tuple(48 * share(rail) * random.gauss(1, noise) for rail in range(rails))
    return PairRate(stage=step.stage, first=a, second=b, gb_s=gb_s, unidirectional=step.unidirectional)


def slow(*nodes: str, share: float = 0.9) -> Factor:
    return lambda a, b, _rail: share if a in nodes or b in nodes else 1.0


def slow_nodes(conclusion: Conclusion) -> set[str]:
    return {rank.node for rank in conclusion.ranks}


@pytest.mark.parametrize("count", [3, 4, 5, 8, 33, 200])
def test_pairs_of_a_step_are_disjoint_and_the_record_gives_the_same_conclusion(count: int) -> None:
    steps, rates, conclusion = search(count, slow("n0001"))
    for step in steps:
        nodes = list(chain.from_iterable(step.pairs))
        assert len(nodes) == len(set(nodes))
    assert conclude(rates, GPU_LIMITS) == conclusion
    assert slow_nodes(conclusion) == {"n0001"}
    assert {rank.rail for rank in conclusion.ranks} == set(range(RAILS))
    assert {rank.direction for rank in conclusion.ranks} == {"both"}
    assert all(0.05 < deficit < 0.15 for rank in conclusion.ranks for deficit in rank.deficits)
    assert not conclusion.paths
    assert len(steps) < 25


@pytest.mark.parametrize("count", [3, 4, 8, 9, 200])
def test_healthy_nodes_have_no_fault(count: int) -> None:
    _, _, conclusion = search(count, slow())
    assert (conclusion.ranks, conclusion.paths, conclusion.slow_rails) == ((), (), {})
    assert conclusion.noise == pytest.approx(0.01, abs=0.007)


@pytest.mark.parametrize("count", [8, 64])
@pytest.mark.parametrize("bad", [("n0000", "n0001"), ("n0000", "n0007"), ("n0002", "n0005")])
def test_two_slow_nodes_are_named_whether_or_not_they_are_partners(count: int, bad: Sequence[str]) -> None:
    assert slow_nodes(search(count, slow(*bad))[2]) == set(bad)


@pytest.mark.parametrize("direction", ["sends", "receives"])
def test_direction_of_a_slow_node(direction: str) -> None:
    def factor(sender: str, receiver: str, _rail: int) -> float:
        return 0.9 if (sender if direction == "sends" else receiver) == "n0003" else 1.0

    conclusion = search(8, factor)[2]
    assert {(rank.node, rank.direction) for rank in conclusion.ranks} == {("n0003", direction)}


def test_one_gpu_of_a_node() -> None:
    def factor(sender: str, receiver: str, rail: int) -> float:
        return 0.8 if rail == 2 and "n0003" in (sender, receiver) else 1.0

    conclusion = search(16, factor)[2]
    assert [(rank.node, rank.rail) for rank in conclusion.ranks] == [("n0003", 2)]


def test_slow_path_and_its_direction_but_neither_end() -> None:
    measured = search(8, slow())[1][0]
    path = measured.pair

    def factor(sender: str, receiver: str, rail: int) -> float:
        return 0.8 if (sender, receiver) == path and rail == 1 else 1.0

    conclusion = search(8, factor)[2]
    assert not conclusion.ranks
    assert [(found.pair, found.rail, found.direction) for found in conclusion.paths] == [(path, 1, "sends")]
    assert len(conclusion.paths[0].deficits) == PATH_REPEATS


def test_rail_that_is_slow_on_all_nodes_is_no_fault_of_a_node() -> None:
    conclusion = search(8, lambda _a, _b, rail: 0.8 if rail == 3 else 1.0)[2]
    assert list(conclusion.slow_rails) == [3]
    assert conclusion.slow_rails[3] == pytest.approx(0.2, abs=0.02)
    assert not conclusion.ranks


def test_a_rate_of_zero_is_slow() -> None:
    assert slow_nodes(search(4, slow("n0002", share=0.0))[2]) == {"n0002"}


def test_less_than_half_of_the_nodes_can_be_named() -> None:
    assert slow_nodes(search(9, slow("n0000", "n0002", "n0004", share=0.5))[2]) == {"n0000", "n0002", "n0004"}
    assert len(search(9, slow(*names(9)[:6], share=0.5))[2].suspects) <= 4


def test_on_cpus_only_a_large_difference_counts() -> None:
    assert not search(4, slow("n0002", share=0.6), CPU_LIMITS, rails=1)[2].ranks
    conclusion = search(4, slow("n0002", share=0.05), CPU_LIMITS, noise=0.3, rails=1)[2]
    assert slow_nodes(conclusion) == {"n0002"}
