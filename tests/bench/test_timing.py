from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import chain, count, repeat
from statistics import fmean, median
from types import SimpleNamespace

import pytest
import torch

from seatrial.bench import timing
from seatrial.bench.timing import (
    MAX_WINDOWS,
    MIN_WINDOWS,
    DeviceTiming,
    median_converged,
    ran_concurrently,
    time_on_device,
)

COLD_S = 0.4


def fake_windows(monkeypatch: pytest.MonkeyPatch, clock: Iterator[float]) -> list[int]:
    """Take the times of windows from ``clock``; return a list that gets the requested window sizes in order."""
    sizes: list[int] = []

    def window(operation: Callable[[], object], size: int, *, device: str, context: object) -> float:
        sizes.append(size)
        return next(clock)

    monkeypatch.setattr(timing, "_time_window", window)
    return sizes


class Clock:
    """A fake host clock that advances only when a test calls ``spend``."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_time_of_a_real_sleep() -> None:
    sleeps: list[float] = []

    def sleep() -> None:  # takes longer than requested on a busy machine
        started = time.perf_counter()
        time.sleep(0.004)
        sleeps.append(time.perf_counter() - started)

    result = time_on_device(sleep, "cpu", 0.3, warmup_s=0.05)
    measured = sleeps[-len(result.windows) * result.per_window :]
    means = [fmean(measured[start : start + result.per_window]) for start in range(0, len(measured), result.per_window)]
    assert 0.004 <= median(means) <= result.median
    assert sum(result.windows) * result.per_window <= result.ended - result.started


def test_number_of_operations_per_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    result = time_on_device(lambda: clock.spend(0.004), "cpu", 0.3, warmup_s=0.05)
    assert result.median == pytest.approx(0.004)
    assert result.per_window == 13  # of 0.05 s


def test_first_operation_does_not_determine_the_window_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first operation loads libraries and sets up buffers and peer access, also without warm-up time."""
    sizes = fake_windows(monkeypatch, chain((COLD_S,), repeat(0.001)))
    result = time_on_device(lambda: None, "cpu", 1.0, warmup_s=0.0)
    assert sizes[:4] == [1, 1, 50, 50]
    assert result.per_window == 50
    assert COLD_S not in result.windows


def test_constant_times_end_early_and_the_number_of_windows_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    fake_windows(monkeypatch, repeat(0.001))
    assert len(time_on_device(lambda: None, "cpu", 60.0, warmup_s=0.0).windows) == MIN_WINDOWS
    fake_windows(monkeypatch, (0.001 * (1 + number % 2) for number in count()))
    assert len(time_on_device(lambda: None, "cpu", 60.0, warmup_s=0.0).windows) == MAX_WINDOWS


def test_burn_lasts_min_seconds_and_calls_after_window(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, calls = Clock(monkeypatch), list[int]()
    result = time_on_device(
        lambda: clock.spend(0.01), "cpu", 0.1, min_seconds=0.9, warmup_s=0.0, after_window=lambda: calls.append(1)
    )
    assert 0.9 <= sum(result.windows) * result.per_window < 1
    assert len(calls) == len(result.windows)


def test_after_window_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    result = time_on_device(lambda: clock.spend(0.01), "cpu", 0.5, warmup_s=0.0, after_window=lambda: clock.spend(0.1))
    assert result.median == pytest.approx(0.01)


def test_drift_compares_the_last_third_with_the_first() -> None:
    assert DeviceTiming((1.0, 1.0, 5.0, 1.0, 1.1, 1.1), 1, 0.0, 0.0).drift == pytest.approx(0.1, abs=1e-9)
    assert DeviceTiming((1.0,), 1, 0.0, 0.0).drift == 0


def test_load_continues_after_the_last_window() -> None:
    result = time_on_device(lambda: time.sleep(0.01), "cpu", 0.1, warmup_s=0.1, trailing_s=0.2)
    assert result.started < result.ended <= result.load_ended - 0.2


def test_window_context_is_entered_for_every_window() -> None:
    entered: list[int] = []

    @contextmanager
    def context() -> Iterator[None]:
        entered.append(0)
        yield

    def operation() -> None:
        entered[-1] += 1
        time.sleep(0.01)

    result = time_on_device(operation, "cpu", 0.2, warmup_s=0.0, window_context=context)
    assert entered[-len(result.windows) :] == [result.per_window] * len(result.windows)


def test_loads_cover_the_windows_of_all_processes() -> None:
    first = DeviceTiming((1.0,), 1, warmup_s=2.0, started=10.0, ended=20.0, load_ended=22.0)
    assert ran_concurrently([first, DeviceTiming((1.0,), 1, warmup_s=2.0, started=11.0, ended=21.0, load_ended=23.0)])
    assert not ran_concurrently(
        [first, DeviceTiming((1.0,), 1, warmup_s=2.0, started=12.5, ended=20.0, load_ended=23.0)]
    )  # load started late
    assert not ran_concurrently(
        [first, DeviceTiming((1.0,), 1, warmup_s=5.0, started=10.0, ended=19.0, load_ended=19.5)]
    )  # load ended early


def test_few_windows_do_not_converge() -> None:
    assert not median_converged([1.0] * (MIN_WINDOWS - 1))
    assert median_converged([1.0] * MIN_WINDOWS)
    assert not median_converged([1.0, 1.03] * 20)
    assert DeviceTiming((1.0,) * 5, 1, 0.0, 0.0).describe()["ci95_of_median_s"] is None


def test_events_are_recorded_on_the_timed_device(monkeypatch: pytest.MonkeyPatch) -> None:
    current, recorded = ["cuda:0"], []

    @contextmanager
    def device(name: str) -> Iterator[None]:
        before, current[0] = current[0], name
        yield
        current[0] = before

    class Event:
        def __init__(self, enable_timing: bool) -> None:
            assert enable_timing

        def record(self) -> None:
            recorded.append(current[0])

        def synchronize(self) -> None: ...

        def elapsed_time(self, end: Event) -> float:
            return 100.0  # ms

    monkeypatch.setattr(torch.cuda, "device", device)
    monkeypatch.setattr(torch.cuda, "Event", Event)
    result = time_on_device(lambda: None, "cuda:3", 1.0, warmup_s=0.0)
    assert set(recorded) == {"cuda:3"}
    assert (result.per_window, set(result.windows)) == (1, {0.1})
    assert current == ["cuda:0"]
