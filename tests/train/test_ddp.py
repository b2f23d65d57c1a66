"""Computations of train/ddp.py without ranks; tests/checks/training/test_ddp.py runs three ranks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from statistics import median
from types import SimpleNamespace
from typing import Any, TypeVar

import pytest
import torch
from torch import nn

from seatrial.train import ddp, train_config
from seatrial.train.ddp import WINDOW_PAIRS, DdpComparison, Speed, measure_speed, window_lengths
from seatrial.train.invariants import SampleCounts
from seatrial.train.parallel import World
from seatrial.train.progress import Step
from seatrial.train.train_config import TrainConfig

T = TypeVar("T")
CONFIG = train_config.load(ddp.SMALL_CONFIG, ["bsz=2", "seq_len=10", "max_steps=3"])


def step(loss: float = 1.0, norm: float = 1.0, seconds: float = 1.0) -> Step:
    return Step(1, loss, norm, 1.0, 1.0, 20, 20, seconds)


def speed_of(independent: list[list[list[float]]], ddp_windows: list[list[list[float]]]) -> Speed:
    """A Speed from step times by rank, window and step."""
    return Speed(CONFIG, independent, ddp_windows, 0, nn.Identity(), rank_times=[])


def test_tokens_per_second_are_summed_over_ranks_by_window() -> None:
    assert speed_of([], [[[0.1], [0.1, 0.3]], [[0.1], [0.3, 0.5]]]).tokens_per_second() == pytest.approx([400, 150])


def test_scaling_is_relative_to_independent_ranks() -> None:
    slower = speed_of([[[0.1], [0.2]], [[0.1], [0.2]]], [[[0.2], [0.2]], [[0.2], [0.2]]])
    assert slower.scaling_efficiency() == pytest.approx([50, 100])
    one_slow_gpu = speed_of([[[0.1]], [[0.3]]], [[[0.3]], [[0.3]]])  # all ranks wait for it
    assert one_slow_gpu.scaling_efficiency() == pytest.approx([50])


@pytest.mark.parametrize("steps", [1, 3, 6, 20, 2000])
def test_window_lengths_add_up_and_are_not_empty(steps: int) -> None:
    lengths = window_lengths(steps)
    assert sum(lengths) == steps
    assert len(lengths) == min(WINDOW_PAIRS, steps)
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


@pytest.mark.parametrize(
    ("ddp_steps", "single_process_steps", "difference"),
    [
        ([step(4.0), step(2.2)], [step(4.0), step(2.0)], 0.1),
        ([step(4.0, norm=3.0)], [step(4.0, norm=1.5)], 1.0),
        ([step(4.0), step(float("nan"))], [step(4.0), step(3.0), step(2.0)], 0),
        ([step(4.0, norm=float("inf"))], [step(4.0)], None),
        ([step()], None, None),
    ],
)
def test_the_largest_difference_of_losses_and_gradient_norms(
    ddp_steps: list[Step], single_process_steps: list[Step] | None, difference: float | None
) -> None:
    compared = DdpComparison(1, SampleCounts(0, 0, 0), 0, ddp_steps, single_process_steps, nn.Identity())
    assert compared.max_relative_difference == (None if difference is None else pytest.approx(difference))


def test_steps_after_a_nonfinite_step_are_dropped() -> None:
    steps = [step(4.0), step(3.0, norm=float("nan")), step(2.0)]
    assert ddp.until_nonfinite(steps) == steps[:2]
    assert ddp.until_nonfinite(steps[2:]) == steps[2:]


@pytest.mark.parametrize(("config", "millions"), [("tiny/ddp", 0.82), ("ddp", 85.1)])
def test_model_sizes_in_the_configs(config: str, millions: float) -> None:
    assert train_config.load(config).architecture().parameters == pytest.approx(millions * 1e6, rel=0.01)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class DriftingTrainer:
    """Replaces Trainer: steps get faster over time, and DDP steps take 25 % longer."""

    clock: Clock
    cost: float
    built: Any = field(default_factory=lambda: SimpleNamespace(model=nn.Identity()))

    def run_steps(self, steps: int) -> list[Step]:
        taken = [step(seconds=self.cost / (1 + 0.01 * (self.clock.now + number))) for number in range(steps)]
        self.clock.now += steps
        return taken


@dataclass(frozen=True)
class FirstOfTwo(World):
    """Rank 0 of two: gathers its own value, and those of ``answer`` for the decision to continue."""

    answer: Callable[[], list[bool]] = list

    def gather(self, value: T) -> list[T]:
        return [value, *self.answer()] if value is False else [value]  # type: ignore[list-item]


WORLD = FirstOfTwo(0, 2, torch.device("cpu"), "node0")


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """Makes ``measure_speed`` run on one rank, with a clock that counts steps."""
    clock = Clock()

    def create_trainer(settings: TrainConfig, world: World) -> DriftingTrainer:
        return DriftingTrainer(clock, 1.25 if world.size > 1 else 1.0)

    monkeypatch.setattr(ddp, "monotonic", clock)
    monkeypatch.setattr(ddp, "create_trainer", create_trainer)
    return clock


def no_progress(_text: str) -> None:
    pass


def test_warm_up_of_the_machine_does_not_change_the_scaling_efficiency(drifting: Clock) -> None:
    """The speed more than doubles during the measurement."""
    speed = measure_speed(WORLD, CONFIG.model_copy(update={"max_steps": 60}), 0, no_progress).scaling_efficiency()
    assert len(speed) == WINDOW_PAIRS
    assert median(speed) == pytest.approx(80, abs=2)


def test_windows_repeat_until_min_seconds(drifting: Clock) -> None:
    speed = measure_speed(WORLD, CONFIG.model_copy(update={"max_steps": 12}), 100, no_progress)
    round_steps = 12 + 2 * WINDOW_PAIRS * ddp.UNTIMED_STEPS_PER_WINDOW + 12
    assert drifting.now >= 100
    assert drifting.now - 2 * ddp.UNTIMED_STEPS <= 100 + round_steps
    assert len(speed.independent_windows[0]) == len(speed.ddp_windows[0])
    assert len(speed.independent_windows[0]) % WINDOW_PAIRS == 0


def test_all_ranks_end_the_measurement_together(drifting: Clock) -> None:
    """The other rank continues for three more rounds."""
    answers = iter([True, True, True, False])
    world = replace(WORLD, answer=lambda: [next(answers)])
    speed = measure_speed(world, CONFIG.model_copy(update={"max_steps": 6}), 0, no_progress)
    assert len(speed.independent_windows[0]) == 4 * WINDOW_PAIRS
