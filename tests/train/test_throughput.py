from __future__ import annotations

from dataclasses import replace
from functools import partial
from statistics import median

import pytest
import torch
import torch.distributed as dist
from torch import nn

from seatrial.train import throughput
from seatrial.train.throughput import CPU_LOAD, GPU_LOAD, PAIRS, Load, Runner, Speed, Stopwatch, load_for, windows

LOAD = Load(seq_len=10, dim=64, layers=1, batch=2, steps=3)


def speed(alone: list[list[list[float]]], together: list[list[list[float]]]) -> Speed:
    """By rank, window and step."""
    return Speed(LOAD, alone, together, (1.0, 1.0), nn.Identity(), 0, "fp32")


def test_tokens_are_added_up_over_ranks_window_by_window() -> None:
    assert speed([], [[[0.1], [0.1, 0.3]], [[0.1], [0.3, 0.5]]]).tokens_per_second() == pytest.approx([400, 150])


def test_scaling_is_measured_against_what_each_rank_does_alone() -> None:
    slower = speed([[[0.1], [0.2]], [[0.1], [0.2]]], [[[0.2], [0.2]], [[0.2], [0.2]]])
    assert slower.scaling_efficiency() == pytest.approx([50, 100])
    one_slow_gpu = speed([[[0.1]], [[0.3]]], [[[0.3]], [[0.3]]])  # all wait for it
    assert one_slow_gpu.scaling_efficiency() == pytest.approx([50])


@pytest.mark.parametrize("steps", [1, 3, 6, 20, 2000])
def test_windows_hold_all_steps_and_none_is_empty(steps: int) -> None:
    lengths = windows(steps)
    assert sum(lengths) == steps
    assert len(lengths) == min(PAIRS, steps)
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


def test_sizes_suit_the_device_unless_asked_for() -> None:
    assert load_for("cuda:3") == GPU_LOAD
    assert load_for("cpu") == CPU_LOAD
    assert load_for("cpu", batch=3, layers=2) == replace(CPU_LOAD, batch=3, layers=2)


class Clock:
    """Stands in for perf_counter: time passes only where a test lets it."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(throughput, "perf_counter", clock)
    return clock


def test_a_stopwatch_times_laps(clock: Clock) -> None:
    watch = Stopwatch(torch.device("cpu"))
    for seconds in (2.0, 5.0):
        clock.now += seconds
        watch.lap()
    assert watch.seconds() == [2, 5]


def test_a_window_times_each_of_its_steps_and_trains(clock: Clock) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(1)), 0

        def forward(self, walks: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            clock.now += self.calls
            return self.weight * walks.sum()

    runner = Runner(Model(), torch.ones(1))
    assert runner.window(2) == [1, 2]
    assert runner.window(2) == [3, 4]
    assert runner.loss < 1  # it was trained: the weight, and with it the loss, began at 1


class Drifting:
    """Stands in for Runner: the machine gets faster with every step, and communication costs a quarter more."""

    def __init__(self, clock: Clock, model: object, _walks: object) -> None:
        self.clock, self.cost, self.loss = clock, 1.25 if model == "replica" else 1.0, 1.0
        self.calls: list[int] = []

    def window(self, steps: int) -> list[float]:
        self.calls.append(steps)
        seconds = [self.cost / (1 + 0.01 * (self.clock.now + step)) for step in range(steps)]
        self.clock.now += steps
        return seconds


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch, clock: Clock) -> Clock:
    """``measure`` on one rank, with a clock that counts steps."""
    monkeypatch.setattr(throughput, "monotonic", clock)
    monkeypatch.setattr(throughput, "Runner", partial(Drifting, clock))
    monkeypatch.setattr(throughput, "build", lambda *_: nn.Identity())
    monkeypatch.setattr(throughput, "wrap", lambda *_: "replica")
    monkeypatch.setattr(throughput, "gather", lambda value: [value])
    monkeypatch.setattr(throughput, "wait_for_all", lambda _device: None)
    monkeypatch.setattr(dist, "get_rank", lambda: 0)
    return clock


def test_a_machine_that_warms_up_meanwhile_does_not_scale_better_than_it_does(drifting: Clock) -> None:
    """Its speed more than doubles over the measurement."""
    found = throughput.measure("cpu", replace(LOAD, steps=60), 0, lambda _text: None).scaling_efficiency()
    assert len(found) == PAIRS
    assert median(found) == pytest.approx(80, abs=2)


def test_a_burn_in_goes_on_until_its_time_is_up(drifting: Clock) -> None:
    found = throughput.measure("cpu", replace(LOAD, steps=12), 100, lambda _text: None)
    each_round = 12 + 2 * PAIRS * throughput.SETTLE + 12
    assert drifting.now >= 100
    assert drifting.now - 2 * throughput.WARMUP <= 100 + each_round
    assert len(found.alone[0]) == len(found.together[0])
    assert len(found.alone[0]) % PAIRS == 0


def test_no_rank_leaves_a_burn_in_by_its_own_clock(drifting: Clock, monkeypatch: pytest.MonkeyPatch) -> None:
    """Another rank's clock is late by three rounds: this one goes on with it."""
    answers = iter([True, True, True, False])
    monkeypatch.setattr(throughput, "gather", lambda value: [value, next(answers)] if value is False else [value])
    found = throughput.measure("cpu", replace(LOAD, steps=6), 0, lambda _text: None)
    assert len(found.alone[0]) == 4 * PAIRS
