from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import nn

from seatrial.train import throughput
from seatrial.train.throughput import CPU_LOAD, GPU_LOAD, WARMUP, Load, Speed, Stopwatch, load_for, pace

LOAD = Load(seq_len=10, dim=64, layers=1, batch=2, steps=3)


def speed(alone: list[list[float]], together: list[list[float]]) -> Speed:
    return Speed(LOAD, alone, together, (1.0, 1.0), nn.Identity(), 0, "fp32")


def test_tokens_are_added_up_over_ranks_step_by_step() -> None:
    assert speed([], [[0.1, 0.2], [0.1, 0.4]]).tokens_per_second() == pytest.approx([400, 150])


def test_scaling_is_measured_against_what_each_rank_does_alone() -> None:
    slower = speed([[0.1, 0.1, 9.0], [0.1, 0.1, 0.1]], [[0.2, 0.2, 0.2], [0.2, 0.2, 0.2]])
    assert slower.scaling_efficiency() == pytest.approx(50)
    one_slow_gpu = speed([[0.1], [0.3]], [[0.3], [0.3]])  # all wait for it
    assert one_slow_gpu.scaling_efficiency() == pytest.approx(50)


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


def test_the_steps_before_the_timed_ones_are_not_counted(clock: Clock) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight, self.calls = nn.Parameter(torch.ones(1)), 0

        def forward(self, walks: torch.Tensor) -> torch.Tensor:
            self.calls += 1
            clock.now += 100 if self.calls <= WARMUP else self.calls - WARMUP
            return self.weight * walks.sum()

    seconds, loss = pace(Model(), torch.ones(1), 4)
    assert seconds == [1, 2, 3, 4]
    assert loss < 1  # it was trained: the weight, and with it the loss, began at 1
