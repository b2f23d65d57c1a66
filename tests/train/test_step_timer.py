"""StepTimer with the CPU clock, as in a process without a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
import torch

from seatrial.train import step_timer

CPU = torch.device("cpu")


@pytest.fixture
def seconds(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """The next clock readings, in order; the thread never waits for a core, unless a test says so."""
    readings: list[float] = []

    def reading() -> Iterator[float]:
        while readings:
            yield readings.pop(0)

    monkeypatch.setattr(step_timer, "perf_counter", lambda: next(reading()))
    monkeypatch.setattr(step_timer, "_scheduler_wait", lambda: lambda: 0.0)
    return readings


def step(timer: step_timer.StepTimer) -> None:
    with timer.data_wait():
        pass
    timer.begin()
    timer.end_compute()
    timer.end()


def test_times_of_two_steps(seconds: list[float]) -> None:
    seconds += [10]
    for base in (10, 20):  # data wait 0 to 2, begin, last gradient, end
        seconds += [base, base + 2, base + 2, base + 3, base + 7, base + 10]
    timer = step_timer.StepTimer(CPU)
    for _ in range(2):
        step(timer)
    times = step_timer.StepTimes(seconds=10, compute=4, data_wait=2)
    assert [timer.read(), timer.read()] == [times, times]
    with pytest.raises(IndexError):
        timer.read()


def test_waiting_for_a_core_is_neither_compute_nor_wait_for_data(
    seconds: list[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    # first mark, before and after the batch, at its end, begin, last gradient, end: each is read twice
    waited = iter([wait for wait in (0.0, 0.0, 1.5, 1.5, 1.5, 3.0, 3.0) for _ in range(2)])
    monkeypatch.setattr(step_timer, "_scheduler_wait", lambda: lambda: next(waited))
    seconds += [10, 10, 12, 12, 13, 17, 20]
    timer = step_timer.StepTimer(CPU)
    step(timer)
    assert timer.read() == step_timer.StepTimes(seconds=10, compute=2.5, data_wait=0.5)


def test_time_is_read_again_after_a_loss_of_the_core(seconds: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a short pass would have a negative duration: the wait after its end would be subtracted."""
    waited = iter([0.0, 0.0, 0.0, 7.0, 7.0])
    monkeypatch.setattr(step_timer, "_scheduler_wait", lambda: lambda: next(waited))
    seconds += [10, 11, 18]
    clock = step_timer.Clock(CPU)
    start, end = clock.now(), clock.now()
    assert clock.seconds(start, end) == 1


def test_time_in_which_this_thread_waits_for_a_core_only_rises() -> None:
    wait = step_timer._scheduler_wait()
    assert wait is not None
    first = wait()
    assert 0 <= first <= wait()


def test_compute_time_is_unknown_without_its_end_or_without_scheduler_statistics(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    timer = step_timer.StepTimer(CPU)
    with timer.data_wait():
        pass
    timer.begin()
    timer.end()
    assert timer.read().compute is None
    monkeypatch.setattr(step_timer, "_scheduler_wait", lambda: None)
    timer = step_timer.StepTimer(CPU)
    step(timer)
    assert timer.read().compute is None


def test_reset_excludes_the_time_between_two_steps(seconds: list[float]) -> None:
    seconds += [10, 50, 50, 50, 50, 51, 53, 54]
    timer = step_timer.StepTimer(CPU)
    timer.reset()  # at 50: a checkpoint was saved
    step(timer)
    times = timer.read()
    assert (times.seconds, times.compute) == (4, 2)


def test_matrix_products_are_timed_on_gpus_only() -> None:
    assert step_timer.gemm_tflops(CPU) is None


def test_a_step_costs_less_than_half_a_percent_of_a_step_of_20_ms() -> None:
    timer = step_timer.StepTimer(CPU)
    started, steps = time.process_time(), 2000
    for _ in range(steps):
        step(timer)
        timer.read()
    assert (time.process_time() - started) / steps < 0.005 * 0.020  # 14 us on a loaded machine
