"""Measures one collective operation: time, bandwidth by nccl-tests' definitions, and whether the result is right.

Three ways of timing, which answer three questions and must not be mixed:

- ``measure`` (parity): how long do many, one after the other? As nccl-tests times them, and comparable to it.
- ``measure_replayed`` (device): how long does the device take, without what the host needs to start each one?
- ``measure_each`` (distribution): how long does each take, how unlike are they, and who is late?

Everything here needs an open process group (``bench.group``) and is called by all ranks together.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.distributed as dist

from seatrial.bench import group
from seatrial.bench.buffers import NcclAllocator, TorchAllocator, buffer_allocator
from seatrial.bench.data_check import CHUNK_ELEMENTS, ExpectedPart, Mismatch, fill_input, fill_with_nan, verify
from seatrial.bench.operations import Operation, PreparedOperation, collective_api
from seatrial.bench.rank import gather
from seatrial.bench.timing import drift, median_converged
from seatrial.util.gc_pause import gc_paused
from seatrial.util.text import and_more

T = TypeVar("T")

# Long against the 1 ms that ranks need to agree, and against what surrounds the operations of a window (with 20 ms
# all-reduce of 64 MiB on H200 was 1.1 % under nccl-tests', with 50 ms 0.03 % over: docs/results); ten fit in LEAST_S
WINDOW_S = 0.05
# Ten windows may agree and still be one moment: medians of 0.2 s were up to 3.6 % apart (all-to-all of 64 MiB, 4 H200)
MIN_TIMED_S = 0.5
MAX_WINDOWS = 200  # enough for any percentile a report shows; a longer load has longer windows, not more of them

OPERATIONS_PER_GRAPH = 100  # operations: against them, what starting the graph takes is lost
PERCENTILE_SAMPLES = 300  # the 99th percentile is known from 299 on (one-sided 95 %, order statistics)

_NAMED = 4  # ranks in a sentence
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TIMING = (
    "back-to-back operations by the host clock from the first call to the end of the last, after a one-element "
    "all-reduce that aligns the ranks: as nccl-tests times them, but in the same memory again and again, of which the "
    "L2 holds what fits, where nccl-tests moves on through buffers of its largest size"
)


class AllocationError(Exception):
    """A buffer did not fit on some ranks; raised on all of them. ``refusals`` says why, by rank."""

    def __init__(self, refusals: dict[int, str]) -> None:
        self.reasons = refusals
        super().__init__(f"no memory on {self.summary()}")

    def summary(self, called: Callable[[int], str] = "rank {}".format) -> str:
        """Where and why, of the first few ranks: every rank tells it, and there may be thousands."""
        return and_more([f"{called(rank)}: {why}" for rank, why in self.reasons.items()], _NAMED, "; ")


@dataclass(frozen=True)
class Timings:
    """Seconds per operation, ``windows[window][rank]``; each window is ``per_window`` operations back to back."""

    windows: tuple[tuple[float, ...], ...]
    per_window: int
    warmup: int

    @property
    def rank_count(self) -> int:
        return len(self.windows[0])

    @property
    def window_means(self) -> tuple[float, ...]:
        """One figure a window, the mean over ranks: the default of nccl-tests (``-a 1``)."""
        return tuple(fmean(window) for window in self.windows)

    @property
    def window_maxima(self) -> tuple[float, ...]:
        """One figure a window, the slowest rank's: what a step of training waits for (``-a 3`` of nccl-tests)."""
        return tuple(max(window) for window in self.windows)

    @property
    def drift(self) -> float:
        return drift(self.window_means)

    def rank_windows(self, rank: int) -> tuple[float, ...]:
        return tuple(window[rank] for window in self.windows)

    @property
    def slowest_rank(self) -> int:
        """The rank with the longest median time."""
        return max(range(self.rank_count), key=lambda rank: median(self.rank_windows(rank)))

    @property
    def most_often_slowest_rank(self) -> tuple[int, float]:
        """The rank that took longest in most windows, and in which share of them."""
        ((rank, count),) = Counter(window.index(max(window)) for window in self.windows).most_common(1)
        return rank, count / len(self.windows)


@dataclass(frozen=True)
class CollectiveResult:
    """One operation at one size, in exact bytes: its times, and the ranks whose data was wrong."""

    size: int
    timings: Timings
    mismatches: dict[int, Mismatch]


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """GB/s (1e9 B) of a buffer of ``size`` bytes: S / t (nccl-tests, doc/PERFORMANCE.md)."""
    return size / seconds / 1e9


def measure_back_to_back(
    operation: Operation,
    size: int,
    dtype: str,
    device: str,
    seconds: float,
    min_seconds: float = 0.0,
    *,
    buffers: str = "torch",
) -> CollectiveResult:
    """Time ``operation`` at about ``size`` bytes as ``time_operation`` does, then check one result bit by bit.

    ``buffers`` is a key of ``buffers.SOURCES``. Raises NoMemory on all ranks when they do not fit on one of them,
    SeatrialError where there is no such source.
    """

    def time_it(prepared: PreparedOperation, target: torch.device) -> Timings:
        return time_operation(prepared.run, target, seconds, min_seconds)

    return _measure(operation, size, dtype, device, buffers, time_it)


def measure_cuda_graph(
    operation: Operation, size: int, dtype: str, device: str, seconds: float, *, buffers: str = "torch"
) -> CollectiveResult:
    """As ``measure``, of operations in a CUDA graph, which the device starts by itself; NCCL only."""

    def time_it(prepared: PreparedOperation, target: torch.device) -> Timings:
        time_window(prepared.run, 1, target)  # connections and buffers are made before the capture
        count = max(1, min(OPERATIONS_PER_GRAPH, ceil(WINDOW_S / _estimate(prepared.run, target))))
        with _captured(prepared.run, count) as replay:
            graphs = time_operation(replay, target, seconds)
        windows = tuple(tuple(value / count for value in window) for window in graphs.windows)
        return replace(graphs, windows=windows, per_window=count * graphs.per_window, warmup=count * graphs.warmup)

    return _measure(operation, size, dtype, device, buffers, time_it, replayed=True)


def measure_each_operation(
    operation: Operation, size: int, dtype: str, device: str, seconds: float, *, buffers: str = "torch"
) -> CollectiveResult:
    """Time every one of SAMPLES operations, or of as many as ``seconds`` allow: a window is one of them."""

    def time_it(prepared: PreparedOperation, target: torch.device) -> Timings:
        time_window(prepared.run, 1, target)
        count = max(1, min(PERCENTILE_SAMPLES, int(seconds / _estimate(prepared.run, target))))
        by_rank = gather(_time_each(prepared.run, count, target))
        return Timings(tuple(zip(*by_rank, strict=True)), per_window=1, warmup=4)

    return _measure(operation, size, dtype, device, buffers, time_it)


def check_data(
    operation: Operation, size: int, dtype: str, device: str, *, buffers: str = "torch"
) -> dict[int, Mismatch]:
    """What is wrong, by rank, when ``operation`` moves about ``size`` bytes once; nothing is timed. Raises NoMemory."""
    kind, target = DTYPES[dtype], torch.device(device)
    count = operation.element_count(size, kind.itemsize, dist.get_world_size())
    source = buffer_allocator(buffers, target)
    prepared = _prepare(operation, count, kind, target, source)
    with source.registration():
        return _check_result(prepared, prepared.run)


def _measure(
    operation: Operation,
    size: int,
    dtype: str,
    device: str,
    buffers: str,
    time_it: Callable[[PreparedOperation, torch.device], Timings],
    *,
    replayed: bool = False,
) -> CollectiveResult:
    kind, ranks, target = DTYPES[dtype], dist.get_world_size(), torch.device(device)
    count = operation.element_count(size, kind.itemsize, ranks)
    # the pool outlives what is allocated from it, which ends with the call
    source = buffer_allocator(buffers, target)
    timings, mismatches = _time_and_check(operation, count, kind, target, source, time_it, replayed)
    return CollectiveResult(count * kind.itemsize, timings, mismatches)


def _time_and_check(
    operation: Operation,
    count: int,
    dtype: torch.dtype,
    device: torch.device,
    source: TorchAllocator | NcclAllocator,
    time_it: Callable[[PreparedOperation, torch.device], Timings],
    replayed: bool,
) -> tuple[Timings, dict[int, Mismatch]]:
    prepared = _prepare(operation, count, dtype, device, source)
    with source.registration():
        timings = time_it(prepared, device)
        if not replayed:
            return timings, _check_result(prepared, prepared.run)
        with _captured(prepared.run, 1) as replay:
            return timings, _check_result(prepared, replay)


def _check_result(prepared: PreparedOperation, run: Callable[[], object]) -> dict[int, Mismatch]:
    """Run once on known data: what is wrong, by rank."""
    fill_with_nan(prepared.received)  # before the rest: in place, what is sent lies in there
    fill_input(prepared.sent, dist.get_rank(), prepared.summed_ranks)
    run()
    found = gather(verify(prepared.received, prepared.summed_ranks, prepared.expected))
    return {rank: mismatch for rank, mismatch in enumerate(found) if mismatch}


def time_operation(
    operation: Callable[[], object], device: torch.device, seconds: float, min_seconds: float = 0.0
) -> Timings:
    """Time windows of back-to-back operations until their median is known to 1 % or ``seconds`` are used up.

    Not before LEAST_S or ``at_least`` seconds of timed operations, however: a burn-in is to last. All ranks see all
    times, so all take the same decisions and run the same number of operations.
    """
    window_s = max(WINDOW_S, min_seconds / MAX_WINDOWS)
    time_window(operation, 1, device)  # the first use of a size sets up connections and buffers
    warmup, per_window = 1, 1
    for _ in range(2):  # a guess from one operation, then a better one from a window of them
        estimate = max(gather(time_window(operation, per_window, device)))
        warmup += per_window
        per_window = max(1, ceil(window_s / estimate))
    windows: list[tuple[float, ...]] = []
    spent = 0.0
    while spent < min_seconds or not _enough(windows, spent, seconds):
        windows.append(tuple(gather(time_window(operation, per_window, device))))
        spent += max(windows[-1]) * per_window
    return Timings(tuple(windows), per_window, warmup)


def time_window(operation: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds per operation of ``count`` back to back on this rank, to the end of the last."""
    wait = collective_api(device).wait
    _align(device)
    with gc_paused():  # it would stop the host for as long as hundreds of small operations take
        start = time.perf_counter()
        for _ in range(count):
            operation()
        wait()
        return (time.perf_counter() - start) / count


def _time_each(operation: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds of each of ``count`` operations back to back on this rank: between two events of its stream."""
    wait = collective_api(device).wait
    _align(device)
    with gc_paused():  # it would stop the host for as long as hundreds of small operations take
        if device.type != "cuda":
            ends = [time.perf_counter()]
            for _ in range(count):
                operation()
                ends.append(time.perf_counter())
            return [after - before for before, after in pairwise(ends)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            operation()
            event.record()
        wait()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _estimate(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds of one operation on the slowest rank, from three: the same on all ranks."""
    return median(max(gather(time_window(operation, 1, device))) for _ in range(3))


def _align(device: torch.device) -> None:
    """A one-element sum, to its end, so that no rank's time holds its wait for another to arrive."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _captured(operation: Callable[[], object], count: int) -> Iterator[Callable[[], object]]:
    """``count`` operations as one CUDA graph: what is yielded starts it.

    NCCL's communicator cannot be torn down while a graph holds its operations (destroy_process_group hung for
    minutes): the graph is gone afterwards, and the device idle.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # other threads of ours, NCCL's and torch's watchdog's, may call CUDA meanwhile
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(count):
                operation()
        yield graph.replay
    finally:
        torch.cuda.synchronize()
        graph.reset()
        torch.cuda.synchronize()


def _enough(windows: Sequence[tuple[float, ...]], spent: float, seconds: float) -> bool:
    if spent >= seconds or len(windows) >= MAX_WINDOWS:
        return True
    return spent >= MIN_TIMED_S and median_converged([fmean(window) for window in windows])


def _prepare(
    operation: Operation, count: int, dtype: torch.dtype, device: torch.device, source: TorchAllocator | NcclAllocator
) -> PreparedOperation:
    """The operation with filled buffers; NoMemory on all ranks unless all have them."""

    def prepare() -> PreparedOperation:
        prepared = operation.prepare(count, lambda own: source.empty(own, dtype, device))
        # the scratch memory of the data check must fit as well, that of filling and that of comparing
        rank, first = dist.get_rank(), prepared.sent[:CHUNK_ELEMENTS]
        fill_input(prepared.sent, rank, prepared.summed_ranks)
        verify(first, prepared.summed_ranks, [ExpectedPart(first.numel(), 0, rank)])
        return prepared

    return allocate_on_all_ranks(prepare, device)


def allocate_on_all_ranks(make: Callable[[], T], device: torch.device) -> T:
    """What ``make`` allocates; NoMemory on all ranks where it does not fit on one of them. Called by all together."""
    made, refusal = None, ""
    try:
        made = make()
    except RuntimeError as error:
        # CUDA has a type for it; the CPU allocator and NCCL's only say it
        untyped = ("can't allocate memory", "ncclMemAlloc failed")
        if not isinstance(error, torch.OutOfMemoryError) and not any(text in str(error) for text in untyped):
            raise
        refusal = str(error).splitlines()[0]
    refusals = {rank: text for rank, text in enumerate(gather(refusal)) if text}
    if refusals or made is None:
        del made
        if device.type == "cuda":
            torch.cuda.empty_cache()  # NCCL, for its own buffers, takes none of what torch keeps for later
        raise AllocationError(refusals)
    return made


def describe_api(device: str) -> str:
    """What ``measure`` and its like call here, several joined by " + " where ranks differ. Called by all together."""
    return " + ".join(sorted(set(gather(collective_api(torch.device(device)).description))))


def supports_out_of_place(device: str) -> bool:
    """Whether every operation can be called out of place here. Called by all together: the same on all ranks."""
    return all(gather(collective_api(torch.device(device)).supports_out_of_place))


def describe_group() -> dict[str, object]:
    """What carries the operations: backend, number of ranks, way of timing, GPU model, NCCL's version and variables.

    ``set_by_seatrial`` names those of the variables that no site has set.
    Called by all ranks together. ``gpu`` is the name that NVML knows too, several joined by " + " where ranks differ.
    """
    backend = str(dist.get_backend())
    models = gather(torch.cuda.get_device_name() if backend == dist.Backend.NCCL else "")
    facts: dict[str, object] = {"backend": backend, "world_size": dist.get_world_size(), "timing": TIMING}
    if backend == dist.Backend.NCCL:
        facts["gpu"] = " + ".join(sorted(set(models)))
        facts["set_by_seatrial"] = sorted(group.set_by_seatrial)
        facts["nccl_version"] = ".".join(map(str, torch.cuda.nccl.version()))  # type: ignore[no-untyped-call]
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_")
    facts["backend_environment"] = {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)}
    return facts
