"""Durations of training steps and of the forward passes in them, measured on the device, and the device's GEMM rate."""

from __future__ import annotations

import os
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import FSDPModule

MATRIX_SIZE = 8192  # rows and columns: enough to occupy all SMs of any GPU
PRODUCTS = 600  # 0.9 s at 750 TFLOP/s: long enough to reach the power limit
_not_compiled: Any = torch.compiler.disable  # untyped


def gemm_tflops(device: torch.device) -> float | None:
    """The bf16 GEMM rate in TFLOP/s; None without a GPU, or if the matrices do not fit into its free memory.

    Called right after training, when the GPU is at operating temperature. Training rate ÷ GEMM rate is the efficiency
    of the software, GEMM rate ÷ peak that of the GPU.
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

    ``compute``: with a ForwardTimer, the time of the forward passes; without one, the time from ``begin`` to the last
    ``end_compute`` (None if it was not called). None if the core wait (see Clock) is unknown. ``data_wait``: the time
    in which the device waited for the batch.
    """

    seconds: float
    compute: float | None
    data_wait: float


class TimePoint(NamedTuple):
    """A result of ``Clock.now``."""

    time: Any  # a CUDA event, or on a CPU perf_counter() in seconds
    core_wait_s: float  # Clock.core_wait_s() at this time


ForwardPass = tuple[TimePoint, TimePoint]  # start and end


class Clock:
    """Times on the device, by CUDA events that do not block the CPU, or by the CPU clock if there is no GPU.

    On a CPU, a duration excludes the core wait: the time in which the thread was ready to run but had no core.
    With the core wait, ranks with equal work would differ on a machine with more processes than cores.
    ``separates_core_wait``: whether durations exclude the core wait; False on a CPU whose kernel does not count it.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._scheduler = None if device.type == "cuda" else _scheduler_wait()
        self.separates_core_wait = device.type == "cuda" or self._scheduler is not None

    def now(self) -> TimePoint:
        """On a GPU, the end of the work that has been queued so far; on a CPU, the current time."""
        if self._device.type != "cuda":
            return self.cpu_now()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return TimePoint(event, 0.0)

    def cpu_now(self) -> TimePoint:
        """The current time. It is read again if the thread lost its core between the two readings."""
        before = self.core_wait_s()
        while (point := TimePoint(perf_counter(), self.core_wait_s())).core_wait_s != before:
            before = point.core_wait_s
        return point

    def core_wait_s(self) -> float:
        """Seconds that this thread has waited for a CPU core; 0 with a GPU, or if the kernel does not count them."""
        return self._scheduler() if self._scheduler is not None else 0.0

    def seconds(self, start: TimePoint, end: TimePoint, with_core_wait: bool = False) -> float:
        """Seconds from ``start`` to ``end``; a GPU must have completed both events.

        ``with_core_wait``: include the core wait on a CPU.
        """
        if self._device.type == "cuda":
            return float(start.time.elapsed_time(end.time)) / 1e3  # elapsed_time returns ms
        return float(end.time - start.time) - (0.0 if with_core_wait else end.core_wait_s - start.core_wait_s)


class ForwardTimer:
    """Times the forward passes of those modules of ``model`` that compute without waiting for other ranks.

    With FSDP2 these modules are the innermost groups. ``_start`` runs after FSDP2's own hook, which waits until the
    weights are gathered, and ``_end`` runs before the weights are freed. So a slow rank has long forward passes, and
    a rank that waits for the slow rank has not. Without FSDP2 the whole model is timed, since DDP communicates in
    backward passes only.
    """

    def __init__(self, model: nn.Module, device: torch.device) -> None:
        self._clock = Clock(device)
        self._started: Any = None  # TimePoint: start of the current forward pass
        self._forward_passes: list[ForwardPass] = []
        for module in innermost_groups(model) or [model]:
            # not compiled: a group may be inside of a compiled block
            module.register_forward_pre_hook(_not_compiled(self._start))
            module.register_forward_hook(_not_compiled(self._end), prepend=True)

    def _start(self, *_: Any) -> None:
        self._started = self._clock.now()

    def _end(self, *_: Any) -> None:
        self._forward_passes.append((self._started, self._clock.now()))

    def take(self) -> list[ForwardPass]:
        """The forward passes since the last call."""
        forward_passes, self._forward_passes = self._forward_passes, []
        return forward_passes

    def seconds(self, forward_passes: Sequence[ForwardPass]) -> float | None:
        """The total seconds of ``forward_passes``, which must have completed; None if the core wait is unknown."""
        if not self._clock.separates_core_wait:
            return None
        return sum(self._clock.seconds(start, end) for start, end in forward_passes)


def innermost_groups(model: nn.Module) -> list[nn.Module]:
    """The modules of ``model`` that are FSDP2 groups and contain no other FSDP2 group."""
    groups = [module for module in model.modules() if isinstance(module, FSDPModule)]
    return [group for group in groups if sum(isinstance(module, FSDPModule) for module in group.modules()) == 1]


@dataclass
class _StepMarks:
    """The TimePoints of one step; None until StepTimer sets them."""

    previous_end: TimePoint
    batch_ready: TimePoint
    batch_wait_s: float  # seconds for which the CPU waited for the batch
    start: Any = None
    compute_end: Any = None
    end: Any = None
    forward_passes: Sequence[ForwardPass] = ()  # with a ForwardTimer


class StepTimer:
    """Times steps; on a rank with a GPU, only ``read`` blocks the CPU (see Clock).

    A step lasts from the end of the previous step (or from ``reset``) to its own end, waiting included. Compute time is
    that of ``forward_timer``; without a ForwardTimer it lasts from ``begin`` to the last ``end_compute``. On a CPU,
    compute and data wait exclude core wait (see Clock); step time includes it.
    """

    def __init__(self, device: torch.device, forward_timer: ForwardTimer | None = None) -> None:
        self._device, self._clock, self._forward_timer = device, Clock(device), forward_timer
        self._steps: deque[_StepMarks] = deque()
        self.reset()

    def reset(self) -> None:
        """Starts the next step now: the time since the previous step is not counted."""
        self._previous_end = self._clock.now()

    @contextmanager
    def data_wait(self) -> Iterator[None]:
        """Context manager around the wait for the batch; starts a step."""
        started = self._clock.cpu_now()
        yield
        ended = self._clock.cpu_now()
        batch_wait_s = ended.time - started.time - (ended.core_wait_s - started.core_wait_s)
        self._marks = _StepMarks(self._previous_end, self._clock.now(), batch_wait_s)

    def begin(self) -> None:
        self._marks.start = self._clock.now()

    def end_compute(self) -> None:
        """Marks the end of this rank's compute time, before the step waits for other ranks."""
        self._marks.compute_end = self._clock.now()

    def end(self) -> None:
        self._marks.end = self._previous_end = self._clock.now()
        if self._forward_timer is not None:
            self._marks.forward_passes = self._forward_timer.take()
        self._steps.append(self._marks)

    def read(self) -> StepTimes:
        """The times of the oldest unread step; waits for the step to finish."""
        marks, clock = self._steps.popleft(), self._clock
        if self._device.type == "cuda":
            marks.end.time.synchronize()
        compute: float | None = None
        if self._forward_timer is not None:
            compute = self._forward_timer.seconds(marks.forward_passes)
        elif marks.compute_end and clock.separates_core_wait:
            compute = clock.seconds(marks.start, marks.compute_end)
        data_wait = marks.batch_wait_s
        if self._device.type == "cuda":  # the CPU queues steps ahead: the GPU waits only if it has no work left
            data_wait = min(data_wait, clock.seconds(marks.previous_end, marks.batch_ready))
        return StepTimes(
            seconds=clock.seconds(marks.previous_end, marks.end, with_core_wait=True),
            compute=compute,
            data_wait=data_wait,
        )


def _scheduler_wait() -> Callable[[], float] | None:
    """A function that returns for how long the calling thread was ready to run but waited for a CPU core, in seconds.

    None if the kernel does not count this time (Linux, sched-stats.rst: run_delay).
    """
    try:
        descriptor = os.open("/proc/thread-self/schedstat", os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return None

    def seconds() -> float:
        return int(os.pread(descriptor, 100, 0).split()[1]) / 1e9

    weakref.finalize(seconds, os.close, descriptor)  # open until then: a read takes 1 us
    try:
        seconds()
    except (OSError, ValueError, IndexError):
        return None
    return seconds
