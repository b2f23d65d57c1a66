"""StepTimer with the CPU clock, as in a process without a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from seatrial.train import step_timer

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The next clock readings, in order."""
    readings: list[float] = []

    def reading() -> Iterator[float]:
        while readings:
            yield readings.pop(0)

    monkeypatch.setattr(step_timer, "perf_counter", lambda: next(reading()))
    return readings


def test_a_step_starts_at_the_end_of_the_previous_one_and_forward_at_begin(seconds: list[float]) -> None:
    seconds += [10, 12, 15, 20, 21, 22, 30]
    timer = step_timer.StepTimer(CPU)
    for _ in range(2):
        timer.begin()
        timer.end_forward()
        timer.end()
    assert timer.read() == (10, 3)
    assert timer.read() == (10, 1)
    with pytest.raises(IndexError):
        timer.read()


def test_only_the_first_micro_batch_counts_as_forward(seconds: list[float]) -> None:
    seconds += [10, 11, 13, 20]
    timer = step_timer.StepTimer(CPU)
    timer.begin()
    timer.end_forward()
    timer.end_forward()  # of the second: takes no reading
    timer.end()
    assert timer.read() == (10, 2)


def test_reset_excludes_the_time_between_two_steps(seconds: list[float]) -> None:
    seconds += [10, 50, 51, 52, 54]
    timer = step_timer.StepTimer(CPU)
    timer.reset()  # at 50: a checkpoint was saved
    timer.begin()
    timer.end_forward()
    timer.end()
    assert timer.read() == (4, 1)


def test_matrix_products_are_timed_on_gpus_only() -> None:
    assert step_timer.gemm_tflops(CPU) is None
