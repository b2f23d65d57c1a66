"""Readings of the CPU's clock, as a process without a GPU takes them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from seatrial.train import step_timer

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The readings to come, in order."""
    readings: list[float] = []

    def reading() -> Iterator[float]:
        while readings:
            yield readings.pop(0)

    monkeypatch.setattr(step_timer, "perf_counter", lambda: next(reading()))
    return readings


def test_a_step_lasts_from_the_end_of_the_one_before_and_forward_from_begin(seconds: list[float]) -> None:
    seconds += [10, 12, 15, 20, 21, 22, 30]
    watch = step_timer.StepTimer(CPU)
    for _ in range(2):
        watch.begin()
        watch.end_forward()
        watch.end()
    assert watch.read() == (10, 3)
    assert watch.read() == (10, 1)
    with pytest.raises(IndexError):
        watch.read()


def test_only_the_first_micro_batch_counts_as_forward(seconds: list[float]) -> None:
    seconds += [10, 11, 13, 20]
    watch = step_timer.StepTimer(CPU)
    watch.begin()
    watch.end_forward()
    watch.end_forward()  # of the second: takes no reading
    watch.end()
    assert watch.read() == (10, 2)


def test_a_restart_leaves_out_the_time_between_two_steps(seconds: list[float]) -> None:
    seconds += [10, 50, 51, 52, 54]
    watch = step_timer.StepTimer(CPU)
    watch.reset()  # at 50: a checkpoint was saved
    watch.begin()
    watch.end_forward()
    watch.end()
    assert watch.read() == (4, 1)


def test_matrix_products_are_timed_on_gpus_only() -> None:
    assert step_timer.gemm_tflops(CPU) is None
