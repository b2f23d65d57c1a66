"""Times operations of one process on its device, without peers or a process group."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from math import ceil
from statistics import median

import torch

from seatrial.util.quantiles import median_interval

WINDOW_S = 0.05  # much longer than a kernel launch and than the clock's resolution
MIN_WINDOWS = 10  # with fewer windows a median is not known; convergence is tested after every MIN_WINDOWS windows
RETRY_MIN_WINDOWS = 30  # a retry takes more windows, since the first measurement was bad or inconclusive
min_windows = MIN_WINDOWS  # value of this process; the worker sets it to RETRY_MIN_WINDOWS before a retry
MAX_WINDOWS = 400  # 20 s of windows; more only until ``min_seconds`` have passed
PRECISION = 0.01  # timing stops when the median is known to this fraction of its value
# A GPU's timing is extended while its median is less precise than this: otherwise a threshold 10 % below the
# reference would not detect a slowdown of 15 % (judge/insights/power.py)
MIN_PRECISION = 0.03
MAX_EXTENSION = 2  # on a GPU, an imprecise median extends timing to at most this multiple of ``seconds``


@dataclass(frozen=True)
class DeviceTiming:
    """``windows``: seconds per operation of each window of ``per_window`` back-to-back operations, in order of time.

    ``started`` and ``ended`` (perf_counter) delimit the windows. The load begins ``warmup_s`` before ``started`` and
    ends at ``load_ended``.
    """

    windows: tuple[float, ...]
    per_window: int
    warmup_s: float
    started: float
    ended: float = 0.0
    load_ended: float = 0.0

    @property
    def median(self) -> float:
        return median(self.windows)

    def rate(self, work: float) -> float:
        """Rate at the median time per operation; ``work``: amount per operation, in any unit."""
        return work / self.median

    def rates(self, work: float) -> tuple[float, ...]:
        """Rate of every window."""
        return tuple(work / seconds for seconds in self.windows)

    @property
    def drift(self) -> float:
        return drift(self.windows)

    def describe(self) -> dict[str, object]:
        """Number of windows, median, its confidence interval, and drift, for a fact."""
        interval = median_interval(self.windows)
        return {
            "windows": len(self.windows),
            "per_window": self.per_window,
            "warmup_s": round(self.warmup_s, 3),
            "median_s": self.median,
            "ci95_of_median_s": list(interval) if interval else None,
            "drift": self.drift,
        }


def drift(windows: Sequence[float]) -> float:
    """Relative increase of the median time from the first to the last third; positive if clocks drop from heat."""
    third = max(1, len(windows) // 3)
    return median(windows[-third:]) / median(windows[:third]) - 1


def ran_concurrently(timings: Sequence[DeviceTiming]) -> bool:
    """Whether the load of each process covered the windows of all processes, which share one clock (one node)."""
    load_started = max(timing.started - timing.warmup_s for timing in timings)
    load_ended = min(timing.load_ended for timing in timings)
    first_window = min(timing.started for timing in timings)
    last_window = max(timing.ended for timing in timings)
    return load_started <= first_window and last_window <= load_ended


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
    """Time windows of back-to-back operations until the 95 % confidence interval of their median is within 1 %.

    With a wider interval, timing ends after MAX_WINDOWS windows or after ``seconds``. On a GPU whose interval exceeds
    3 %, it continues for up to twice ``seconds``. In any case it lasts at least ``min_seconds`` (for a burn). The same
    load runs for ``warmup_s`` before the timing and for ``trailing_s`` after it. ``after_window`` is called after each
    window and not timed; ``window_context`` is entered for each window and included in its time.
    """
    # CUDA events are recorded on the current stream of the current device
    with torch.cuda.device(device) if device.startswith("cuda") else nullcontext():
        load_started = time.perf_counter()
        time_window = partial(_time_window, operation, device=device, context=window_context)
        per_window = _warm_up(time_window, warmup_s)
        windows: list[float] = []
        started = time.perf_counter()
        while _needs_window(windows, time.perf_counter() - started, seconds, min_seconds, device):
            windows.append(time_window(per_window))
            after_window()
        ended = time.perf_counter()
        while time.perf_counter() - ended < trailing_s:
            time_window(per_window)
    return DeviceTiming(tuple(windows), per_window, started - load_started, started, ended, time.perf_counter())


def _warm_up(time_window: Callable[[int], float], seconds: float) -> int:
    """Run the operation for ``seconds``, and return the number of operations that take WINDOW_S.

    The first operation does not count: it loads libraries, allocates buffers and enables peer access.
    """
    started = time.perf_counter()
    time_window(1)
    count, windows = 1, 0
    while windows < 2 or time.perf_counter() - started < seconds:
        count = max(1, ceil(WINDOW_S / time_window(count)))
        windows += 1
    return count


def _needs_window(windows: list[float], spent: float, seconds: float, min_seconds: float, device: str) -> bool:
    if not windows or spent < min_seconds:
        return True
    if len(windows) >= MAX_WINDOWS or time_is_up(windows, spent, seconds, device):
        return False
    # Convergence is computed after every MIN_WINDOWS windows only, since the device is idle meanwhile
    return len(windows) % MIN_WINDOWS > 0 or not median_converged(windows)


def time_is_up(windows: Sequence[float], spent: float, seconds: float, device: str) -> bool:
    """Whether timing must end after ``spent`` seconds.

    It ends after ``seconds``; on a GPU whose median is not known to MIN_PRECISION, after MAX_EXTENSION × ``seconds``.
    """
    if spent < seconds:
        return False
    is_gpu = device.startswith("cuda")
    return not is_gpu or spent >= MAX_EXTENSION * seconds or median_converged(windows, MIN_PRECISION)


def median_converged(windows: Sequence[float], precision: float = PRECISION) -> bool:
    """Whether the 95 % confidence interval of the median is within ``precision`` of the median.

    False with fewer than ``min_windows`` windows. If the windows are too few or too correlated for an interval: whether
    all windows are within ``precision`` of the median.
    """
    if len(windows) < min_windows:
        return False
    middle = median(windows)
    interval = median_interval(windows) or (min(windows), max(windows))
    return all(abs(bound - middle) <= precision * middle for bound in interval)


def _time_window(
    operation: Callable[[], object], count: int, *, device: str, context: Callable[[], AbstractContextManager[object]]
) -> float:
    """Seconds per operation, between two CUDA events, or by the host clock on a CPU."""
    if not device.startswith("cuda"):
        start = time.perf_counter()
        _repeat(operation, count, context)
        return (time.perf_counter() - start) / count
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    begin.record()
    _repeat(operation, count, context)
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1e3 / count


def _repeat(operation: Callable[[], object], count: int, context: Callable[[], AbstractContextManager[object]]) -> None:
    with context():
        for _ in range(count):
            operation()
