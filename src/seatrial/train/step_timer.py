"""Durations of training steps, measured on the device, and the device's GEMM rate."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import torch

MATRIX_SIZE = 8192  # rows and columns: enough to occupy all SMs of any GPU
PRODUCTS = 600  # 0.9 s at 750 TFLOP/s: long enough to reach the power limit


def gemm_tflops(device: torch.device) -> float | None:
    """The bf16 GEMM rate in TFLOP/s right after training, at operating temperature; None without a GPU or free memory.

    Training rate ÷ GEMM rate is the efficiency of the software, GEMM rate ÷ peak that of the GPU.
    """
    if device.type != "cuda":
        return None
    try:
        torch.cuda.empty_cache()
        a, b = torch.randn(2, MATRIX_SIZE, MATRIX_SIZE, device=device, dtype=torch.bfloat16)
        product = torch.mm(a, b)
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        start.record()
        for _ in range(PRODUCTS):
            torch.mm(a, b, out=product)
        end.record()
        end.synchronize()
    except torch.OutOfMemoryError:
        return None
    milliseconds: float = start.elapsed_time(end)
    return PRODUCTS * 2 * MATRIX_SIZE**3 / milliseconds / 1e9


@dataclass(frozen=True)
class StepTimes:
    """Seconds of one step on this rank.

    ``compute``: from ``begin`` to the last gradient; None if ``end_compute`` was not called, or if the time in which
    the process waited for a CPU core is unknown. ``data_wait``: the time in which the device waited for the batch.
    """

    seconds: float
    forward: float
    compute: float | None
    data_wait: float


@dataclass
class _Marks:
    """Times of one step, as CUDA events or as seconds of the CPU clock without those in which the thread waited."""

    previous_end: Any
    batch: Any
    batch_wait_s: float
    start: Any = None
    forward: Any = None
    compute: Any = None
    end: Any = None


class StepTimer:
    """Times steps with CUDA events, without blocking the CPU, or with the CPU clock if there is no GPU.

    A step lasts from the end of the previous step to its own end, waiting included. Forward time is that of the first
    micro-batch, from ``begin`` to the first ``end_forward``: with DDP it does not depend on other ranks. Compute time
    ends at the last ``end_compute``. On a CPU, compute and data wait exclude the time in which the thread was ready but
    had no core: otherwise equal ranks would differ on a machine with more processes than cores.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scheduler = None if device.type == "cuda" else _SchedulerWait.open()
        self._steps: deque[_Marks] = deque()
        self.reset()

    def reset(self) -> None:
        """Starts the next step now: the time since the previous step is not counted."""
        self._previous_end = self._now()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Context manager around the wait for the batch; starts a step."""
        started, waited = perf_counter(), self._core_wait_s()
        yield
        batch_wait_s = perf_counter() - started - (self._core_wait_s() - waited)
        self._marks = _Marks(self._previous_end, self._now(), batch_wait_s)

    def begin(self) -> None:
        self._marks.start = self._now(), self._core_wait_s()

    def end_forward(self) -> None:
        self._marks.forward = self._marks.forward or self._now()

    def end_compute(self) -> None:
        """Marks the last gradient of this rank, before the step waits for other ranks."""
        self._marks.compute = self._now(), self._core_wait_s()

    def end(self) -> None:
        self._marks.end = self._previous_end = self._now()
        self._steps.append(self._marks)

    def read(self) -> StepTimes:
        """The times of the oldest unread step; waits for the step to finish."""
        marks = self._steps.popleft()
        if self._device.type == "cuda":
            marks.end.synchronize()
        start, waited = marks.start
        compute: float | None = None
        if marks.compute and (self._device.type == "cuda" or self._scheduler is not None):
            end, waited_at_end = marks.compute
            compute = self._seconds(start, end) - (waited_at_end - waited)
        data_wait = marks.batch_wait_s
        if self._device.type == "cuda":  # the CPU queues steps ahead: the GPU waits only if it has no work left
            data_wait = min(data_wait, self._seconds(marks.previous_end, marks.batch))
        return StepTimes(
            self._seconds(marks.previous_end, marks.end), self._seconds(start, marks.forward), compute, data_wait
        )

    def _now(self) -> Any:
        if self._device.type != "cuda":
            return perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def _seconds(self, start: Any, end: Any) -> float:
        seconds: float = start.elapsed_time(end) / 1e3 if self._device.type == "cuda" else end - start  # it is in ms
        return seconds

    def _core_wait_s(self) -> float:
        return self._scheduler.seconds() if self._scheduler is not None else 0.0


class _SchedulerWait:
    """The time in which this thread was ready to run but waited for a CPU core (Linux, sched-stats.rst: run_delay)."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor  # kept open: a read takes 1 us
        weakref.finalize(self, os.close, descriptor)

    @classmethod
    def open(cls) -> _SchedulerWait | None:
        """The _SchedulerWait of the calling thread; None if the kernel does not count this time."""
        try:
            wait = cls(os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC))
            wait.seconds()
        except (OSError, ValueError, IndexError):
            return None
        return wait

    def seconds(self) -> float:
        return int(os.pread(self._descriptor, 100, 0).split()[1]) / 1e9
