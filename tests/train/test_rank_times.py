"""Slowdowns of ranks relative to their peers: a slow rank is recognized, noise is not."""

from __future__ import annotations

import json
import random
from dataclasses import asdict

import pytest

from seatrial.train.progress import Step
from seatrial.train.rank_times import MAX_STEPS, RankTimes, slowdowns


def ranks_with_noise(factors: list[float], noise: float, steps: int = 40, seed: int = 1) -> list[RankTimes]:
    source = random.Random(seed)
    times = [tuple(factor * source.lognormvariate(0, noise) for _ in range(steps)) for factor in factors]
    return [RankTimes("NVIDIA H200", compute, (), ()) for compute in times]


def test_slow_rank_and_its_interval() -> None:
    by_rank = slowdowns(ranks_with_noise([1, 1, 1.38, 1], noise=0.02))
    slow = by_rank[2]
    assert slow.ratio == pytest.approx(1.38, abs=0.02)
    assert 1.35 < slow.low < slow.ratio < slow.high < 1.41
    assert slow.steps == 40
    assert all(by_rank[index].high < 1.02 for index in (0, 1, 3))


def test_equal_ranks_on_a_noisy_machine_have_no_lower_bound_above_10_percent() -> None:
    for seed in range(100):
        by_rank = slowdowns(ranks_with_noise([1.0] * 4, noise=0.3, steps=20, seed=seed))
        assert all(slowdown.low < 1.10 for slowdown in by_rank.values())


def test_slow_phase_of_a_rank_is_no_slow_rank() -> None:
    """One disturbance over a third of the steps is correlated: the interval covers the normal steps."""
    steady = RankTimes("CPU", (1.0,) * 30, (), ())
    disturbed = RankTimes("CPU", (1.0,) * 20 + (3.0,) * 10, (), ())
    assert slowdowns([steady, disturbed])[1].low == 1


def test_two_ranks_are_compared_with_each_other() -> None:
    by_rank = slowdowns([RankTimes("CPU", (2.0,) * 8, (), ()), RankTimes("CPU", (1.0,) * 8, (), ())])
    assert (by_rank[0].ratio, by_rank[1].ratio) == (2, 0.5)


def test_other_device_models_are_no_peers() -> None:
    by_rank = slowdowns([RankTimes(model, (2.0,) * 8, (), ()) for model in ("NVIDIA H200", "NVIDIA L40S")])
    assert by_rank == {}


@pytest.mark.parametrize("compute", [(), (1.0,) * 5])
def test_ranks_without_compute_times_or_with_few_steps_are_not_compared(compute: tuple[float, ...]) -> None:
    assert slowdowns([RankTimes("CPU", compute, (), ())] * 3) == {}


def test_steps_without_a_compute_time_on_each_rank_do_not_count() -> None:
    slow, other = RankTimes("CPU", (3.0,) * 9, (), ()), RankTimes("CPU", (1.0,) * 8 + (0.0,), (), ())
    assert (slowdowns([slow, other])[0].low, slowdowns([slow, other])[0].steps) == (3, 8)
    assert slowdowns([slow, RankTimes("CPU", (1.0,) * 5 + (0.0,) * 4, (), ())]) == {}


def test_only_the_last_steps_count_where_ranks_have_different_numbers() -> None:
    long = RankTimes("CPU", (9.0,) * 10 + (1.0,) * 8, (), ())
    assert slowdowns([long, RankTimes("CPU", (1.0,) * 8, (), ())])[0].ratio == 1


def test_data_wait_share_and_recorded_times() -> None:
    entry = {"device": "CPU", "compute_s": [1.0], "data_wait_s": [0.5, 0.5], "seconds": [2, 2]}
    assert RankTimes.from_metrics(entry).data_wait_share == 0.25
    assert RankTimes.from_metrics({"rank": 0}) == RankTimes("None", [], [], [])
    assert RankTimes.from_metrics({"rank": 0}).data_wait_share is None


def test_times_of_steps_survive_metrics_json() -> None:
    step = Step(1, 2.0, None, None, None, 8, None, seconds=2.0, compute_s=0.12345678, data_wait_s=None)
    times = RankTimes.of_steps("CPU", [step] * (MAX_STEPS + 5))
    assert times == RankTimes("CPU", [0.123457] * MAX_STEPS, [], [2.0] * MAX_STEPS)
    assert RankTimes.from_metrics(json.loads(json.dumps(asdict(times)))) == times


def test_one_slow_rank_of_a_thousand_is_found() -> None:
    by_rank = slowdowns(ranks_with_noise([1.0] * 1023 + [1.5], noise=0.02, steps=12))
    assert [index for index, slowdown in by_rank.items() if slowdown.low > 1.1] == [1023]
