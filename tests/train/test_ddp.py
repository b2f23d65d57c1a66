"""What train.ddp does with figures, without ranks; with three of them: tests/checks/training/test_ddp.py."""

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
from seatrial.train.invariants import Coverage
from seatrial.train.parallel import World
from seatrial.train.progress import Step
from seatrial.train.train_config import TrainConfig

T = TypeVar("T")
WANTED = train_config.load(ddp.SMALL_CONFIG, ["bsz=2", "seq_len=10", "max_steps=3"])


def step(loss: float = 1.0, norm: float = 1.0, seconds: float = 1.0) -> Step:
    return Step(1, loss, norm, 1.0, 1.0, 20, 20, seconds)


def timed(alone: list[list[list[float]]], together: list[list[list[float]]]) -> Speed:
    """By rank, window and step."""
    return Speed(WANTED, alone, together, 0, nn.Identity())


def test_tokens_are_added_up_over_ranks_window_by_window() -> None:
    assert timed([], [[[0.1], [0.1, 0.3]], [[0.1], [0.3, 0.5]]]).tokens_per_second() == pytest.approx([400, 150])


def test_scaling_is_measured_against_what_each_rank_does_alone() -> None:
    slower = timed([[[0.1], [0.2]], [[0.1], [0.2]]], [[[0.2], [0.2]], [[0.2], [0.2]]])
    assert slower.scaling_efficiency() == pytest.approx([50, 100])
    one_slow_gpu = timed([[[0.1]], [[0.3]]], [[[0.3]], [[0.3]]])  # all wait for it
    assert one_slow_gpu.scaling_efficiency() == pytest.approx([50])


@pytest.mark.parametrize("steps", [1, 3, 6, 20, 2000])
def test_windows_hold_all_steps_and_none_is_empty(steps: int) -> None:
    lengths = window_lengths(steps)
    assert sum(lengths) == steps
    assert len(lengths) == min(WINDOW_PAIRS, steps)
    assert max(lengths) - min(lengths) <= 1
    assert min(lengths) >= 1


@pytest.mark.parametrize(
    ("together", "alone", "difference"),
    [
        ([step(4.0), step(2.2)], [step(4.0), step(2.0)], 0.1),
        ([step(4.0, norm=3.0)], [step(4.0, norm=1.5)], 1.0),
        ([step(4.0), step(float("nan"))], [step(4.0), step(3.0), step(2.0)], 0),
        ([step(4.0, norm=float("inf"))], [step(4.0)], None),
        ([step()], None, None),
    ],
)
def test_the_largest_difference_is_of_losses_and_of_gradients(
    together: list[Step], alone: list[Step] | None, difference: float | None
) -> None:
    compared = DdpComparison(1, Coverage(0, 0, 0), 0, together, alone, nn.Identity())
    assert compared.max_relative_difference == (None if difference is None else pytest.approx(difference))


def test_nothing_is_kept_after_a_step_that_is_not_finite() -> None:
    steps = [step(4.0), step(3.0, norm=float("nan")), step(2.0)]
    assert ddp.until_nonfinite(steps) == steps[:2]
    assert ddp.until_nonfinite(steps[2:]) == steps[2:]


@pytest.mark.parametrize(("config", "millions"), [("tiny/ddp", 0.82), ("ddp", 85.1)])
def test_sizes_are_those_that_the_comments_state(config: str, millions: float) -> None:
    assert train_config.load(config).architecture().parameters == pytest.approx(millions * 1e6, rel=0.01)


@dataclass
class Clock:
    now: float = 0.0

    def __call__(self) -> float:
        return self.now


@dataclass(eq=False)
class Drifting:
    """Stands in for Trainer: the machine gets faster with every step, and communication costs a quarter more."""

    clock: Clock
    cost: float
    built: Any = field(default_factory=lambda: SimpleNamespace(model=nn.Identity()))

    def take(self, steps: int) -> list[Step]:
        taken = [step(seconds=self.cost / (1 + 0.01 * (self.clock.now + number))) for number in range(steps)]
        self.clock.now += steps
        return taken


@dataclass(frozen=True)
class Only(World):
    """The first of two ranks: it gathers what it is given, and ``answer``, when it asks who goes on."""

    answer: Callable[[], list[bool]] = list

    def gather(self, value: T) -> list[T]:
        return [value, *self.answer()] if value is False else [value]  # type: ignore[list-item]


WORLD = Only(0, 2, torch.device("cpu"), "node0")


@pytest.fixture
def drifting(monkeypatch: pytest.MonkeyPatch) -> Clock:
    """``speed`` on one rank, with a clock that counts steps."""
    clock = Clock()

    def trainer(settings: TrainConfig, world: World) -> Drifting:
        return Drifting(clock, 1.25 if world.size > 1 else 1.0)

    monkeypatch.setattr(ddp, "monotonic", clock)
    monkeypatch.setattr(ddp, "create_trainer", trainer)
    return clock


def silent(_text: str) -> None:
    pass


def test_a_machine_that_warms_up_meanwhile_does_not_scale_better_than_it_does(drifting: Clock) -> None:
    """Its speed more than doubles over the measurement."""
    found = measure_speed(WORLD, WANTED.model_copy(update={"max_steps": 60}), 0, silent).scaling_efficiency()
    assert len(found) == WINDOW_PAIRS
    assert median(found) == pytest.approx(80, abs=2)


def test_a_burn_in_goes_on_until_its_time_is_up(drifting: Clock) -> None:
    found = measure_speed(WORLD, WANTED.model_copy(update={"max_steps": 12}), 100, silent)
    each_round = 12 + 2 * WINDOW_PAIRS * ddp.UNTIMED_STEPS_PER_WINDOW + 12
    assert drifting.now >= 100
    assert drifting.now - 2 * ddp.UNTIMED_STEPS <= 100 + each_round
    assert len(found.independent_windows[0]) == len(found.ddp_windows[0])
    assert len(found.independent_windows[0]) % WINDOW_PAIRS == 0


def test_no_rank_leaves_a_burn_in_by_its_own_clock(drifting: Clock) -> None:
    """Another rank's clock is late by three rounds: this one goes on with it."""
    answers = iter([True, True, True, False])
    late = replace(WORLD, answer=lambda: [next(answers)])
    found = measure_speed(late, WANTED.model_copy(update={"max_steps": 6}), 0, silent)
    assert len(found.independent_windows[0]) == 4 * WINDOW_PAIRS
