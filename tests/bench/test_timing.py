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


def clocked(monkeypatch: pytest.MonkeyPatch, clock: Iterator[float]) -> list[int]:
    """Windows take what ``clock`` says, an operation; the sizes of the windows in the order asked for."""
    sizes: list[int] = []

    def window(operation: Callable[[], object], size: int, *, device: str, inside: object) -> float:
        sizes.append(size)
        return next(clock)

    monkeypatch.setattr(timing, "_window", window)
    return sizes


class Clock:
    """Stands in for the host's: time passes only where a test lets it."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(perf_counter=lambda: self.now))

    def spend(self, seconds: float) -> None:
        self.now += seconds


def test_a_real_sleep_is_timed_as_long_as_it_takes() -> None:
    naps: list[float] = []

    def nap() -> None:  # which is longer than asked for, where others have the processors
        began = time.perf_counter()
        time.sleep(0.004)
        naps.append(time.perf_counter() - began)

    timed = time_on_device(nap, "cpu", 0.3, warmup_s=0.05)
    measured = naps[-len(timed.windows) * timed.per_window :]
    means = [fmean(measured[at : at + timed.per_window]) for at in range(0, len(measured), timed.per_window)]
    assert 0.004 <= median(means) <= timed.median < 1.5 * median(means)


def test_windows_are_long_against_what_starting_costs(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timed = time_on_device(lambda: clock.spend(0.004), "cpu", 0.3, warmup_s=0.05)
    assert timed.median == pytest.approx(0.004)
    assert timed.per_window == 13  # of 0.05 s


def test_the_first_operation_does_not_size_the_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries, buffers and peer access are set up in it, even where no time is left for heating up."""
    sizes = clocked(monkeypatch, chain((COLD_S,), repeat(0.001)))
    timed = time_on_device(lambda: None, "cpu", 1.0, warmup_s=0.0)
    assert sizes[:4] == [1, 1, 50, 50]
    assert timed.per_window == 50
    assert COLD_S not in timed.windows


def test_steady_windows_end_early_and_unsteady_ones_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    clocked(monkeypatch, repeat(0.001))
    assert len(time_on_device(lambda: None, "cpu", 60.0, warmup_s=0.0).windows) == MIN_WINDOWS
    clocked(monkeypatch, (0.001 * (1 + number % 2) for number in count()))
    assert len(time_on_device(lambda: None, "cpu", 60.0, warmup_s=0.0).windows) == MAX_WINDOWS


def test_a_burn_goes_on_however_steady_it_is_and_looks_in_between(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, looks = Clock(monkeypatch), list[int]()
    timed = time_on_device(
        lambda: clock.spend(0.01), "cpu", 0.1, min_seconds=0.9, warmup_s=0.0, after_window=lambda: looks.append(1)
    )
    assert 0.9 <= sum(timed.windows) * timed.per_window < 1
    assert len(looks) == len(timed.windows)


def test_what_happens_in_between_is_not_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock(monkeypatch)
    timed = time_on_device(lambda: clock.spend(0.01), "cpu", 0.5, warmup_s=0.0, after_window=lambda: clock.spend(0.1))
    assert timed.median == pytest.approx(0.01)


def test_drift_compares_the_last_third_with_the_first() -> None:
    assert DeviceTiming((1.0, 1.0, 5.0, 1.0, 1.1, 1.1), 1, 0.0, 0.0).drift == pytest.approx(0.1, abs=1e-9)
    assert DeviceTiming((1.0,), 1, 0.0, 0.0).drift == 0


def test_the_work_goes_on_after_the_last_window() -> None:
    timed = time_on_device(lambda: time.sleep(0.01), "cpu", 0.1, warmup_s=0.1, trailing_s=0.2)
    assert timed.started < timed.ended <= timed.load_ended - 0.2


def test_every_window_is_inside_what_belongs_around_it() -> None:
    entered: list[int] = []

    @contextmanager
    def inside() -> Iterator[None]:
        entered.append(0)
        yield

    def operation() -> None:
        entered[-1] += 1
        time.sleep(0.01)

    timed = time_on_device(operation, "cpu", 0.2, warmup_s=0.0, window_context=inside)
    assert entered[-len(timed.windows) :] == [timed.per_window] * len(timed.windows)


def test_all_are_at_work_in_every_window_of_every_other() -> None:
    first = DeviceTiming((1.0,), 1, warmup_s=2.0, started=10.0, ended=20.0, load_ended=22.0)
    assert ran_concurrently([first, DeviceTiming((1.0,), 1, warmup_s=2.0, started=11.0, ended=21.0, load_ended=23.0)])
    assert not ran_concurrently(
        [first, DeviceTiming((1.0,), 1, warmup_s=2.0, started=12.5, ended=20.0, load_ended=23.0)]
    )  # came late
    assert not ran_concurrently(
        [first, DeviceTiming((1.0,), 1, warmup_s=5.0, started=10.0, ended=19.0, load_ended=19.5)]
    )  # left early


def test_few_windows_settle_nothing() -> None:
    assert not median_converged([1.0] * (MIN_WINDOWS - 1))
    assert median_converged([1.0] * MIN_WINDOWS)
    assert not median_converged([1.0, 1.03] * 20)
    assert DeviceTiming((1.0,) * 5, 1, 0.0, 0.0).describe()["ci95_of_median_s"] is None


def test_events_are_recorded_on_the_device_that_works(monkeypatch: pytest.MonkeyPatch) -> None:
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
    timed = time_on_device(lambda: None, "cuda:3", 1.0, warmup_s=0.0)
    assert set(recorded) == {"cuda:3"}
    assert (timed.per_window, set(timed.windows)) == (1, {0.1})
    assert current == ["cuda:0"]
