"""Exposed communication: the percentage of a step in which communication does not overlap with computation.

There are two methods. From kernels: on each GPU, the time in which only NCCL kernels ran, including waits for slower
ranks. From a control run (DDP only): how much shorter a step without gradient all-reduce is. The results can differ:
NCCL kernels take SMs and memory bandwidth from compute kernels. Only the control run measures this slowdown.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from statistics import median
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from seatrial.train.parallel import World

Interval = tuple[int, int]  # start and end, in the same unit
StepFunction = Callable[[bool], object]  # queues a step, with or without gradient communication
NAMES = ("exposed_communication_percent", "exposed_communication_max_percent", "exposed_communication_control_percent")
NOT_MEASURED: dict[str, Any] = dict.fromkeys([*NAMES, "exposed_communication_method"])


def covered_length(intervals: Iterable[Interval]) -> int:
    """The length of the union of ``intervals``."""
    length, covered_until = 0, None
    for start, end in sorted(intervals):
        new_start = start if covered_until is None else max(start, covered_until)
        if end > new_start:
            length, covered_until = length + end - new_start, end
    return length


def uncovered_length(intervals: Iterable[Interval], others: Iterable[Interval]) -> int:
    """The length that ``intervals`` cover and ``others`` do not."""
    others = list(others)
    return covered_length([*intervals, *others]) - covered_length(others)


def exposed_percent(kernels: Iterable[tuple[str, int, int]]) -> float | None:
    """Percent of the time from the first kernel's start to the last kernel's end in which only NCCL kernels ran.

    ``kernels``: (name, start, end). None without kernels. NCCL kernels are named ncclDevKernel_…, with symmetric memory
    ncclSym…, before NCCL 2.19 ncclKernel_…; "nccl:…" are annotations of torch. Memcpy and Memset count as neither NCCL
    nor computation, since some of them belong to collectives.
    """
    communication: list[Interval] = []
    compute: list[Interval] = []
    for name, start, end in kernels:
        if not name.startswith(("Memcpy", "Memset", "nccl:")):
            (communication if name.startswith("nccl") else compute).append((start, end))
    all_kernels = [*communication, *compute]
    if not all_kernels:
        return None
    duration = max(end for _, end in all_kernels) - min(start for start, _ in all_kernels)
    return 100 * uncovered_length(communication, compute) / duration if duration else None


def gpu_kernels(events: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    """Name, start and end in ns of the GPU kernels among torch's raw profiler events (_KinetoEvent)."""
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            yield event.name(), event.start_ns(), event.end_ns()


def measure(world: World, steps: int, run_step: StepFunction, replicated: bool) -> dict[str, Any]:
    """Runs additional steps; returns the metrics NAMES (median and maximum over ranks, control run) and the method.

    ``replicated``: whether each rank has all weights (DDP), which the control run requires. All ranks call this as the
    last action of the run: the steps change the weights, and after the control run the weights differ between ranks.
    """
    on_gpu = world.device.type == "cuda"
    run_step(True)  # this step refills caches; its time is not used
    kernel_percent = _exposed_from_kernels(world, steps, run_step) if on_gpu else None
    control_percent = None
    if replicated:
        with_communication = _seconds(world, steps, run_step, communicate=True)
        without_communication = _seconds(world, steps, run_step, communicate=False)
        control_percent = max(0.0, 100 * (1 - without_communication / with_communication))
    rank_percent = kernel_percent if on_gpu else control_percent
    percents = [percent for percent in world.gather(rank_percent) if percent is not None]
    measured = NOT_MEASURED | {"exposed_communication_control_percent": control_percent}
    if len(percents) < world.size:
        reason = "the profiler recorded no kernels" if on_gpu else "on CPUs it requires DDP"
        return measured | {"exposed_communication_method": f"not measured: {reason}"}
    if on_gpu:
        method = f"kernels: time with only NCCL kernels on the GPU, in {steps} steps after the measured ones"
    else:
        method = f"control run: {steps} steps with and {steps} without gradient communication"
    return measured | {
        "exposed_communication_percent": median(percents),
        "exposed_communication_max_percent": max(percents),
        "exposed_communication_method": method,
    }


def _exposed_from_kernels(world: World, steps: int, run_step: StepFunction) -> float | None:
    torch.cuda.synchronize(world.device)
    world.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            run_step(True)
        torch.cuda.synchronize(world.device)
    # raw events: torch's own aggregation takes minutes
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return exposed_percent(gpu_kernels(results.events() if results is not None else []))


def _seconds(world: World, steps: int, run_step: StepFunction, communicate: bool) -> float:
    """Total duration of ``steps`` steps on the slowest rank."""
    world.barrier()
    start = time.perf_counter()
    for _ in range(steps):
        run_step(communicate)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return max(world.gather(time.perf_counter() - start))
