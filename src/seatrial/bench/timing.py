"""Times work of one process on its own device: no peer, no process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median

import torch

from seatrial.model import Metric
from seatrial.util.quantiles import median_interval

WINDOW_S = 0.05  # long against what starting a kernel costs and against a clock's step
MIN_WINDOWS = 10
MAX_WINDOWS = 400  # 20 s of them
PRECISION = 0.01  # windows are added until the median is known to 1 %, or the time is up


@dataclass(frozen=True)
class DeviceTiming:
    """Seconds per operation, one figure a window of ``per_window`` operations back to back, in the order measured."""

    windows: tuple[float, ...]
    per_window: int
    warmup_s: float
    started: float  # time.perf_counter() when the first window did
    ended: float = 0.0  # and when the last one did
    load_ended: float = 0.0  # and when the work that went on after it did

    @property
    def median(self) -> float:
        return median(self.windows)

    def rate(self, work: float) -> float:
        """Work in a second, at the median window: ``work`` is that of one operation, in the unit that is wanted."""
        return work / self.median

    def rates(self, work: float) -> tuple[float, ...]:
        """The same of every window."""
        return tuple(work / seconds for seconds in self.windows)

    def metric(self, name: str, work: float, unit: str, subject: str) -> Metric:
        """The rate, with those of every window as samples."""
        return Metric(name=name, value=self.rate(work), unit=unit, subject=subject, samples=self.rates(work))

    @property
    def drift(self) -> float:
        return drift(self.windows)

    def describe(self) -> dict[str, object]:
        """How often and how sure, for a fact."""
        interval = median_interval(self.windows)
        return {
            "windows": len(self.windows),
            "per_window": self.per_window,
            "heat_up_s": round(self.warmup_s, 3),
            "median_s": self.median,
            "ci95_of_median_s": list(interval) if interval else None,
            "drift": self.drift,
        }


def drift(windows: Sequence[float]) -> float:
    """By how much the last third is slower than the first, as a share: heat and falling clocks show here."""
    third = max(1, len(windows) // 3)
    return median(windows[-third:]) / median(windows[:third]) - 1


def ran_concurrently(timed: Sequence[DeviceTiming]) -> bool:
    """Whether each of these, of processes with one clock, was at work in every window of every other."""
    came = max(one.started - one.warmup_s for one in timed)
    return came <= min(one.started for one in timed) and max(one.ended for one in timed) <= min(
        one.load_ended for one in timed
    )


def time_on_device(
    operation: Callable[[], object],
    device: str,
    seconds: float,
    *,
    min_seconds: float = 0.0,
    warmup_s: float = 0.5,
    trailing_s: float = 0.0,
    after_window: Callable[[], object] = lambda: None,
    window_context: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> DeviceTiming:
    """Time windows of back-to-back operations until their median is known to 1 %, or ``seconds`` are used up.

    ``least_s`` keeps on measuring so long however sure the median is: a burn. ``heat_up_s`` of the same work go ahead,
    ``run_on_s`` come after. ``between`` is called after every window, outside its time; the operations of a window run
    in what ``inside`` makes, and its time has that in it.
    """
    with _current(device):
        started = time.perf_counter()
        window = partial(_window, operation, device=device, inside=window_context)
        per_window = _heat_up(window, warmup_s)
        windows: list[float] = []
        began = time.perf_counter()
        while _goes_on(windows, time.perf_counter() - began, seconds, min_seconds):
            windows.append(window(per_window))
            after_window()
        ended = time.perf_counter()
        while time.perf_counter() - ended < trailing_s:
            window(per_window)
    return DeviceTiming(tuple(windows), per_window, began - started, began, ended, time.perf_counter())


def _current(device: str) -> AbstractContextManager[object]:
    """Events are recorded on the current stream of the current device: that must be the one that works."""
    return torch.cuda.device(device) if device.startswith("cuda") else nullcontext()


def _heat_up(window: Callable[[int], float], seconds: float) -> int:
    """Work for so long; how many operations fill a window.

    The first operation pays for libraries, buffers and peer access: no guess comes from it alone.
    """
    started = time.perf_counter()
    window(1)
    count, windows = 1, 0
    while windows < 2 or time.perf_counter() - started < seconds:
        count = max(1, ceil(WINDOW_S / window(count)))
        windows += 1
    return count


def _goes_on(windows: list[float], spent: float, seconds: float, least_s: float) -> bool:
    if not windows or spent < least_s:
        return True
    if spent >= seconds or len(windows) >= MAX_WINDOWS:
        return False
    return len(windows) % MIN_WINDOWS > 0 or not median_converged(windows)  # seldom asked: meanwhile the device cools


def median_converged(windows: list[float]) -> bool:
    """Whether the 95 % interval of the median lies within 1 % of it."""
    if len(windows) < MIN_WINDOWS:
        return False
    middle, interval = median(windows), median_interval(windows)
    return interval is not None and all(abs(bound - middle) <= PRECISION * middle for bound in interval)


def _window(
    operation: Callable[[], object], count: int, *, device: str, inside: Callable[[], AbstractContextManager[object]]
) -> float:
    """Seconds per operation: between two CUDA events, or by the host's clock on a CPU."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        _repeat(operation, count, inside)
        return (time.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    _repeat(operation, count, inside)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _repeat(operation: Callable[[], object], count: int, inside: Callable[[], AbstractContextManager[object]]) -> None:
    with inside():
        for _ in range(count):
            operation()
