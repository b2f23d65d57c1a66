"""Exposed communication: how much of a step ranks spend on nothing but exchanging data. It is what overlap leaves over.

By kernels: on each GPU, the time in which a kernel of NCCL ran and no other; waiting for a slower rank is part of it.
By a control, under DDP: how much shorter a step is that exchanges no gradients. The two need not agree: NCCL's kernels
take processors and memory bandwidth from the others as well, which only the control sees.
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

Interval = tuple[int, int]  # begin and end, in the same unit
Take = Callable[[bool], object]  # queues a step, with the exchange of gradients or without
NAMES = ("exposed_communication_percent", "exposed_communication_max_percent", "exposed_communication_control_percent")
NOT_MEASURED: dict[str, Any] = dict.fromkeys([*NAMES, "exposed_communication_method"])


def covered_length(intervals: Iterable[Interval]) -> int:
    """Length of what ``intervals`` cover together; what several cover counts once."""
    length, reached = 0, None
    for begin, end in sorted(intervals):
        begin = begin if reached is None else max(begin, reached)
        if end > begin:
            length, reached = length + end - begin, end
    return length


def uncovered_length(some: Iterable[Interval], others: Iterable[Interval]) -> int:
    """Length of what ``some`` cover and none of the ``others``."""
    others = list(others)
    return covered_length([*some, *others]) - covered_length(others)


def exposed_percent(ran: Iterable[tuple[str, int, int]]) -> float | None:
    """Percent of the time from the first kernel to the end of the last, by (name, begin, end); None without a kernel.

    NCCL's kernels are called ncclDevKernel_…, of symmetric memory ncclSym…, before 2.19 ncclKernel_…; "nccl:…" are
    torch's own marks. Copies and fills, of which some belong to an exchange, count as neither.
    """
    exchange: list[Interval] = []
    compute: list[Interval] = []
    for name, begin, end in ran:
        if not name.startswith(("Memcpy", "Memset", "nccl:")):
            (exchange if name.startswith("nccl") else compute).append((begin, end))
    every = [*exchange, *compute]
    if not every:
        return None
    span = max(end for _, end in every) - min(begin for begin, _ in every)
    return 100 * uncovered_length(exchange, compute) / span if span else None


def gpu_kernels(events: Iterable[Any]) -> Iterator[tuple[str, int, int]]:
    """Of torch's raw events (_KinetoEvent) what ran on a GPU: name, begin and end in ns."""
    for event in events:
        if event.device_type() == DeviceType.CUDA and not event.is_user_annotation():
            yield event.name(), event.start_ns(), event.end_ns()


def measure(world: World, steps: int, take: Take, replicated: bool) -> dict[str, Any]:
    """Take some more steps, which nobody counts; what they showed, under NAMES: median and maximum over the ranks.

    All ranks call this, after all else: weights go on changing, and without exchange no longer together.
    """
    take(True)  # what was measured before has emptied caches
    mine = _by_kernels(world, steps, take) if world.device.type == "cuda" else None
    control = None
    if replicated:
        whole, without = (_seconds(world, steps, take, exchange) for exchange in (True, False))
        control = max(0.0, 100 * (1 - without / whole))
    method = f"kernels: NCCL's on a GPU, and no other, in {steps} steps after the measured ones"
    if world.device.type != "cuda":
        mine, method = control, f"control: {steps} steps with and {steps} without exchange of gradients"
    figures = world.gather(mine)
    known = [figure for figure in figures if figure is not None]
    if len(known) < world.size:
        method = "not measured: the profiler saw no kernel" if world.device.type == "cuda" else "not measured on a CPU"
        return NOT_MEASURED | {"exposed_communication_method": method, "exposed_communication_control_percent": control}
    return {
        "exposed_communication_percent": median(known),
        "exposed_communication_max_percent": max(known),
        "exposed_communication_control_percent": control,
        "exposed_communication_method": method,
    }


def _by_kernels(world: World, steps: int, take: Take) -> float | None:
    torch.cuda.synchronize(world.device)
    world.barrier()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(steps):
            take(True)
        torch.cuda.synchronize(world.device)
    # the raw events: torch's own evaluation of them takes minutes
    results = profiler.profiler.kineto_results if profiler.profiler is not None else None
    return exposed_percent(gpu_kernels(results.events() if results is not None else []))


def _seconds(world: World, steps: int, take: Take, exchange: bool) -> float:
    """Of all steps, on the rank that took longest."""
    world.barrier()
    began = time.perf_counter()
    for _ in range(steps):
        take(exchange)
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
    return max(world.gather(time.perf_counter() - began))
