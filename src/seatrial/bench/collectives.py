"""Measures one collective operation: time, bandwidth by nccl-tests' definitions, and whether the result is right.

Everything here needs an open process group (``bench.group``) and is called by all ranks together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import ceil
from statistics import fmean, median

import torch
import torch.distributed as dist

from seatrial.bench.alone import settled
from seatrial.bench.exact import Mismatch, fill, verify
from seatrial.bench.operations import Operation, Prepared
from seatrial.bench.rank import gather

WINDOW_S = 0.02  # long against the 1 ms that ranks need to agree, short enough for many windows
MAX_WINDOWS = 200  # enough for any percentile a report shows; a longer load has longer windows, not more of them

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TIMING = {
    "nccl": "back-to-back operations between two CUDA events, after a one-element all-reduce that aligns the ranks",
    "gloo": "back-to-back operations by the host clock, after a one-element all-reduce that aligns the ranks",
}


class NoMemory(Exception):
    """A buffer did not fit on some ranks; raised on all of them. ``refusals`` says why, by rank."""

    def __init__(self, refusals: dict[int, str]) -> None:
        super().__init__(f"no memory on rank {', '.join(map(str, refusals))}")
        self.refusals = refusals


@dataclass(frozen=True)
class Timings:
    """Seconds per operation, ``windows[window][rank]``; each window is ``per_window`` operations back to back."""

    windows: tuple[tuple[float, ...], ...]
    per_window: int
    warmup: int

    @property
    def ranks(self) -> int:
        return len(self.windows[0])

    @property
    def means(self) -> tuple[float, ...]:
        """One figure a window, the mean over ranks: the default of nccl-tests (``-a 1``)."""
        return tuple(fmean(window) for window in self.windows)

    def of_rank(self, rank: int) -> tuple[float, ...]:
        return tuple(window[rank] for window in self.windows)

    @property
    def slowest(self) -> int:
        """The rank with the longest median time."""
        return max(range(self.ranks), key=lambda rank: median(self.of_rank(rank)))


@dataclass(frozen=True)
class Result:
    """One operation at one size, in exact bytes: its times, and the ranks whose data was wrong."""

    size: int
    timings: Timings
    mismatches: dict[int, Mismatch]


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """GB/s (1e9 B) of a buffer of ``size`` bytes: S / t (nccl-tests, doc/PERFORMANCE.md)."""
    return size / seconds / 1e9


def measure(operation: Operation, size: int, dtype: str, device: str, seconds: float, at_least: float = 0.0) -> Result:
    """Time ``operation`` at about ``size`` bytes as ``time_operation`` does, then check one result bit by bit.

    Raises NoMemory on all ranks when the buffers do not fit on one of them.
    """
    kind, ranks = DTYPES[dtype], dist.get_world_size()
    count = operation.elements(size, kind.itemsize, ranks)
    prepared = _prepare(operation, count, kind, torch.device(device))
    timings = time_operation(prepared.run, torch.device(device), seconds, at_least)
    fill(prepared.received, dist.get_rank() + 1, ranks)  # what it must not hold afterwards
    fill(prepared.sent, dist.get_rank(), ranks)
    prepared.run()
    found = gather(verify(prepared.received, ranks, prepared.parts))
    mismatches = {rank: mismatch for rank, mismatch in enumerate(found) if mismatch}
    return Result(count * kind.itemsize, timings, mismatches)


def time_operation(
    operation: Callable[[], object], device: torch.device, seconds: float, at_least: float = 0.0
) -> Timings:
    """Time windows of back-to-back operations until their median is known to 1 % or ``seconds`` are used up.

    Not before ``at_least`` seconds of timed operations, however: a burn-in is to last. All ranks see all times, so all
    take the same decisions and run the same number of operations.
    """
    window_s = max(WINDOW_S, at_least / MAX_WINDOWS)
    time_window(operation, 1, device)  # the first use of a size sets up connections and buffers
    warmup, per_window = 1, 1
    for _ in range(2):  # a guess from one operation, then a better one from a window of them
        estimate = max(gather(time_window(operation, per_window, device)))
        warmup += per_window
        per_window = max(1, ceil(window_s / estimate))
    windows: list[tuple[float, ...]] = []
    spent = 0.0
    while spent < at_least or not _enough(windows, spent, seconds):
        windows.append(tuple(gather(time_window(operation, per_window, device))))
        spent += max(windows[-1]) * per_window
    return Timings(tuple(windows), per_window, warmup)


def time_window(operation: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds per operation of ``count`` back to back on this rank.

    A one-element sum goes ahead of them, so that no rank's time holds its wait for another to arrive.
    """
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        return _time_by_events(operation, count)
    start = time.perf_counter()
    for _ in range(count):
        operation()
    return (time.perf_counter() - start) / count


def _time_by_events(operation: Callable[[], object], count: int) -> float:
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    start.record()
    for _ in range(count):
        operation()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1e3 / count


def _enough(windows: Sequence[tuple[float, ...]], spent: float, seconds: float) -> bool:
    return spent >= seconds or len(windows) >= MAX_WINDOWS or settled([fmean(window) for window in windows])


def _prepare(operation: Operation, count: int, dtype: torch.dtype, device: torch.device) -> Prepared:
    """The operation with filled buffers; NoMemory on all ranks unless all have them."""
    prepared, refusal = None, ""
    try:
        prepared = operation.prepare(count, lambda own: torch.empty(own, dtype=dtype, device=device))
        # the scratch memory of the data check must fit as well
        fill(prepared.sent, dist.get_rank(), dist.get_world_size())
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        refusal = str(error).splitlines()[0]
    refusals = {rank: text for rank, text in enumerate(gather(refusal)) if text}
    if refusals or prepared is None:
        raise NoMemory(refusals)
    return prepared


def _is_out_of_memory(error: RuntimeError) -> bool:
    """CUDA has a type for it; the CPU allocator only says it."""
    return isinstance(error, torch.OutOfMemoryError) or "can't allocate memory" in str(error)


def describe_group() -> dict[str, object]:
    """What carries the operations: backend, number of ranks, way of timing, GPU model, NCCL's version and variables.

    Called by all ranks together. ``gpu`` is the name that NVML knows too, several joined by " + " where ranks differ.
    """
    backend = str(dist.get_backend())
    models = gather(torch.cuda.get_device_name() if backend == dist.Backend.NCCL else "")
    facts: dict[str, object] = {"backend": backend, "world_size": dist.get_world_size(), "timing": TIMING[backend]}
    if backend == dist.Backend.NCCL:
        facts["gpu"] = " + ".join(sorted(set(models)))
        facts["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_")
    facts["backend_environment"] = {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)}
    return facts
