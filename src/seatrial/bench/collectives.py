"""Measures one collective operation: time, bandwidth by nccl-tests' definitions, and correctness of the result.

The results of the three timing modes are not comparable with each other: ``measure_back_to_back`` as nccl-tests does by
default, ``measure_cuda_graph`` without launch overhead of the host (nccl-tests -G), and ``measure_each_operation``.

Everything here needs an open process group (``bench.group``) and is called by all ranks together.
"""

from __future__ import annotations

import os
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import pairwise
from math import ceil
from statistics import fmean, median
from typing import TypeVar

import torch
import torch.distributed as dist

from seatrial.bench import group
from seatrial.bench.buffers import Allocator
from seatrial.bench.data_check import CHUNK_ELEMENTS, ExpectedPart, Mismatch, fill_input, fill_with_nan, verify
from seatrial.bench.operations import Operation, PreparedOperation, collective_api
from seatrial.bench.rank import gather, joined_names
from seatrial.bench.timing import drift, median_converged, time_is_up
from seatrial.hardware.network_time import busbw_factor
from seatrial.util.gc_pause import gc_paused
from seatrial.util.text import and_more

T = TypeVar("T")

# Much longer than the 1 ms in which ranks exchange their times, and than the fixed overhead of a window. All-reduce of
# 64 MiB on H200 differed from nccl-tests by -1.1 % with windows of 20 ms, by +0.03 % with 50 ms (docs/results)
WINDOW_S = 0.05
# The time of ten windows. Fewer windows may agree by chance: with windows of 0.2 s in total, medians differed by up to
# 3.6 % (all-to-all, 64 MiB, 4 H200)
MIN_TIMED_S = 0.5
# Up to this size in bytes, CUDA graphs are timed in shorter windows and for a shorter time. A window still contains
# thousands of operations. In 362 timings on 2 and 4 H200 (docs/results), the median of any successive windows of 0.2 s
# in total differed by at most 0.5 % from the median of all windows
GRAPH_SMALL_SIZE = 2**20
GRAPH_WINDOW_S = 0.02
GRAPH_MIN_TIMED_S = 0.2
MAX_WINDOWS = 200  # a longer burn-in uses longer windows, not more windows

OPERATIONS_PER_GRAPH = 100  # makes the launch time of the graph negligible
PERCENTILE_SAMPLES = 300  # an upper 95 % confidence bound of the 99th percentile needs at least 299

_MAX_LISTED_RANKS = 4  # ranks listed in an error message
DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}

TIMING = (
    "back-to-back operations by the host clock from the first call to the end of the last, after a one-element "
    "all-reduce that aligns the ranks, as in nccl-tests; every operation uses the same buffers, so L2 caches them as "
    "far as they fit (nccl-tests cycles through buffers of its largest size)"
)


class AllocationError(Exception):
    """Buffers did not fit into memory on some ranks; raised on all ranks. ``reasons``: rank → reason."""

    def __init__(self, reasons: dict[int, str]) -> None:
        self.reasons = reasons
        super().__init__(f"out of memory on {self.summary()}")

    def summary(self, rank_name: Callable[[int], str] = "rank {}".format) -> str:
        """The reasons of the first few ranks: not of all, since thousands of ranks may each print this text."""
        texts = [f"{rank_name(rank)}: {reason}" for rank, reason in self.reasons.items()]
        return and_more(texts, _MAX_LISTED_RANKS, "; ")


@dataclass(frozen=True)
class Timings:
    """``windows[window][rank]``: seconds per operation; a window is ``per_window`` operations back to back.

    ``warmup``: the number of untimed operations before the first window. With CUDA graphs, operations before and
    during the capture are not included.
    """

    windows: tuple[tuple[float, ...], ...]
    per_window: int
    warmup: int

    @property
    def rank_count(self) -> int:
        return len(self.windows[0])

    @property
    def window_means(self) -> tuple[float, ...]:
        """Mean over ranks of each window, as nccl-tests by default (``-a 1``)."""
        return tuple(fmean(window) for window in self.windows)

    @property
    def window_maxima(self) -> tuple[float, ...]:
        """Maximum over ranks of each window: a training step waits for the slowest rank (``-a 3`` of nccl-tests)."""
        return tuple(max(window) for window in self.windows)

    @property
    def drift(self) -> float:
        """Relative increase of the median time from the first to the last third of the windows."""
        return drift(self.window_means)

    def rank_windows(self, rank: int) -> tuple[float, ...]:
        return tuple(window[rank] for window in self.windows)

    def of_ranks(self, ranks: Sequence[int]) -> Timings:
        return replace(self, windows=tuple(tuple(window[rank] for rank in ranks) for window in self.windows))

    @property
    def slowest_rank(self) -> int:
        """The rank with the longest median time."""
        return max(range(self.rank_count), key=lambda rank: median(self.rank_windows(rank)))

    @property
    def most_often_slowest_rank(self) -> tuple[int, float]:
        """The rank that was slowest in the most windows, and the share of windows in which this rank was slowest."""
        ((rank, count),) = Counter(window.index(max(window)) for window in self.windows).most_common(1)
        return rank, count / len(self.windows)


@dataclass(frozen=True)
class CollectiveResult:
    """One ``operation`` (its name) at one exact ``size`` in bytes: its times, and the mismatches by rank."""

    size: int
    timings: Timings
    mismatches: dict[int, Mismatch]
    operation: str = "all_reduce"

    def bus_bandwidth(self, seconds: float) -> float:
        """Bus bandwidth in GB/s of an operation that takes ``seconds``, as nccl-tests defines it."""
        return algorithm_bandwidth(self.size, seconds) * busbw_factor(self.operation, self.timings.rank_count)

    @property
    def busbw(self) -> tuple[float, ...]:
        """Bus bandwidth of every window in GB/s."""
        return tuple(map(self.bus_bandwidth, self.timings.window_means))


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """Algorithm bandwidth S / t in GB/s (1e9 B) of a buffer of ``size`` bytes (nccl-tests, doc/PERFORMANCE.md)."""
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
    """Time ``operation`` at about ``size`` bytes with ``time_operation``, then check one result bit by bit.

    ``buffers`` is a key of ``buffers.ALLOCATORS``. Raises AllocationError on all ranks if the buffers do not fit into
    the memory of one rank, SeatrialError if that allocator is not available.
    """

    def time_back_to_back(prepared: PreparedOperation, target: torch.device) -> Timings:
        return time_operation(prepared.run, target, seconds, min_seconds)

    return _measure(operation, size, dtype, device, buffers, time_back_to_back)


def measure_cuda_graph(
    operation: Operation, size: int, dtype: str, device: str, seconds: float, *, buffers: str = "torch"
) -> CollectiveResult:
    """As ``measure_back_to_back``, with the operations in a CUDA graph; NCCL only."""

    is_small = size <= GRAPH_SMALL_SIZE
    window_s, min_timed_s = (GRAPH_WINDOW_S, GRAPH_MIN_TIMED_S) if is_small else (WINDOW_S, MIN_TIMED_S)

    def time_graphs(prepared: PreparedOperation, target: torch.device) -> Timings:
        time_window(prepared.run, 1, target)  # sets up connections and NCCL's buffers before the capture
        count = max(1, min(OPERATIONS_PER_GRAPH, ceil(window_s / _estimate(prepared.run, target))))
        with _captured(prepared.run, count) as replay:
            graphs = time_operation(replay, target, seconds, window_s=window_s, min_timed_s=min_timed_s)
        windows = tuple(tuple(value / count for value in window) for window in graphs.windows)
        return replace(graphs, windows=windows, per_window=count * graphs.per_window, warmup=count * graphs.warmup)

    return _measure(operation, size, dtype, device, buffers, time_graphs, in_graph=True)


def measure_each_operation(
    operation: Operation, size: int, dtype: str, device: str, seconds: float, *, buffers: str = "torch"
) -> CollectiveResult:
    """Time as many operations as fit into ``seconds``, at most PERCENTILE_SAMPLES; each window is one operation."""

    def time_single_operations(prepared: PreparedOperation, target: torch.device) -> Timings:
        time_window(prepared.run, 1, target)
        count = max(1, min(PERCENTILE_SAMPLES, int(seconds / _estimate(prepared.run, target))))
        by_rank = gather(_time_each(prepared.run, count, target))
        return Timings(tuple(zip(*by_rank, strict=True)), per_window=1, warmup=4)  # one above, three in _estimate

    return _measure(operation, size, dtype, device, buffers, time_single_operations)


def check_data(
    operation: Operation, size: int, dtype: str, device: str, *, buffers: str = "torch"
) -> dict[int, Mismatch]:
    """Run ``operation`` once at about ``size`` bytes without timing, and return the mismatches by rank."""
    return _measure(operation, size, dtype, device, buffers, lambda *_: Timings((), 0, 0)).mismatches


def _measure(
    operation: Operation,
    size: int,
    dtype: str,
    device: str,
    buffers: str,
    time_prepared: Callable[[PreparedOperation, torch.device], Timings],
    *,
    in_graph: bool = False,
) -> CollectiveResult:
    """Prepare the operation, time it with ``time_prepared`` and check one result, in a CUDA graph if ``in_graph``."""
    torch_dtype, target = DTYPES[dtype], torch.device(device)
    count = operation.element_count(size, torch_dtype.itemsize, dist.get_world_size())
    allocator = Allocator(buffers, target)
    prepared = _prepare(operation, count, torch_dtype, target, allocator)
    with allocator.registration():
        timings = time_prepared(prepared, target)
        with _captured(prepared.run, 1) if in_graph else nullcontext(prepared.run) as run:
            mismatches = _check_result(prepared, run)
    del run, prepared  # frees the buffers before the allocator's memory pool, which holds them
    return CollectiveResult(count * torch_dtype.itemsize, timings, mismatches, operation.name)


def _check_result(prepared: PreparedOperation, run: Callable[[], object]) -> dict[int, Mismatch]:
    """Call ``run`` once on known data; the mismatches by rank."""
    fill_with_nan(prepared.received)  # first: in place, ``sent`` is part of ``received``
    fill_input(prepared.sent, dist.get_rank(), prepared.summed_ranks)
    run()
    mismatches = gather(verify(prepared.received, prepared.summed_ranks, prepared.expected))
    return {rank: mismatch for rank, mismatch in enumerate(mismatches) if mismatch}


def time_operation(
    operation: Callable[[], object],
    device: torch.device,
    seconds: float,
    min_seconds: float = 0.0,
    *,
    window_s: float = WINDOW_S,
    min_timed_s: float = MIN_TIMED_S,
) -> Timings:
    """Time windows of back-to-back operations until their median is known to 1 %, but at least for ``min_timed_s``.

    Timing ends after ``seconds`` or MAX_WINDOWS windows at the latest. There are two exceptions. On a GPU whose median
    is not even known to 3 %, it continues for up to twice ``seconds``. For a burn-in it lasts at least ``min_seconds``.
    All ranks get the times of all ranks, so that all run the same number of operations.
    """
    window_s = max(window_s, min_seconds / MAX_WINDOWS)
    time_window(operation, 1, device)  # the first use of a size sets up connections and buffers
    warmup, per_window = 1, 1
    for _ in range(2):  # estimate from one operation, then from a window
        estimate = max(gather(time_window(operation, per_window, device)))
        warmup += per_window
        per_window = max(1, ceil(window_s / estimate))
    windows: list[tuple[float, ...]] = []
    spent = 0.0
    while spent < min_seconds or not _is_complete(windows, spent, seconds, min_timed_s, device):
        windows.append(tuple(gather(time_window(operation, per_window, device))))
        spent += max(windows[-1]) * per_window
    return Timings(tuple(windows), per_window, warmup)


def time_window(operation: Callable[[], object], count: int, device: torch.device) -> float:
    """Seconds per operation on this rank, for ``count`` operations back to back until the last has ended."""
    wait = collective_api(device).wait
    _align(device)
    with gc_paused():  # a collection takes as long as hundreds of small operations
        start = time.perf_counter()
        for _ in range(count):
            operation()
        wait()
        return (time.perf_counter() - start) / count


def _time_each(operation: Callable[[], object], count: int, device: torch.device) -> list[float]:
    """Seconds of each of ``count`` back-to-back operations on this rank, by CUDA events, on a CPU by the host clock."""
    wait = collective_api(device).wait
    _align(device)
    with gc_paused():  # a collection takes as long as hundreds of small operations
        if device.type != "cuda":
            times = [time.perf_counter()]
            for _ in range(count):
                operation()  # gloo's operations return when they are done
                times.append(time.perf_counter())
            return [after - before for before, after in pairwise(times)]
        events = [torch.cuda.Event(enable_timing=True) for _ in range(count + 1)]  # type: ignore[no-untyped-call]
        events[0].record()
        for event in events[1:]:
            operation()
            event.record()
        wait()
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(events)]


def _estimate(operation: Callable[[], object], device: torch.device) -> float:
    """Seconds of one operation on the slowest rank, median of three; the same value on all ranks."""
    return median(max(gather(time_window(operation, 1, device))) for _ in range(3))


def _align(device: torch.device) -> None:
    """Wait for a one-element all-reduce, so that no rank's time includes waiting for a late peer."""
    dist.all_reduce(torch.zeros(1, device=device))
    if device.type == "cuda":
        torch.cuda.synchronize(device)


@contextmanager
def _captured(operation: Callable[[], object], count: int) -> Iterator[Callable[[], object]]:
    """Context manager: captures ``count`` operations in one CUDA graph and yields the function that replays it.

    At the end it destroys the graph and waits until the device is idle: destroy_process_group hangs for minutes while a
    graph references the communicator.
    """
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    try:
        # thread_local: other threads (NCCL's, torch's watchdog) may call CUDA during the capture
        with torch.cuda.graph(graph, capture_error_mode="thread_local"):
            for _ in range(count):
                operation()
        yield graph.replay
    finally:
        torch.cuda.synchronize()
        graph.reset()
        torch.cuda.synchronize()


def _is_complete(
    windows: Sequence[tuple[float, ...]], spent: float, seconds: float, min_timed_s: float, device: torch.device
) -> bool:
    """Whether no more time or windows are left, or the median is known to 1 % after at least ``min_timed_s``."""
    means = [fmean(window) for window in windows]
    if len(windows) >= MAX_WINDOWS or time_is_up(means, spent, seconds, device.type):
        return True
    return spent >= min_timed_s and median_converged(means)


def _prepare(
    operation: Operation, count: int, dtype: torch.dtype, device: torch.device, allocator: Allocator
) -> PreparedOperation:
    """The operation with filled buffers. Raises AllocationError on all ranks if they do not fit on one rank."""

    def prepare() -> PreparedOperation:
        prepared = operation.prepare(count, lambda elements: allocator.empty(elements, dtype))
        # Filling and verifying now ensures that the scratch memory of the data check fits as well
        rank, first_chunk = dist.get_rank(), prepared.sent[:CHUNK_ELEMENTS]
        fill_input(prepared.sent, rank, prepared.summed_ranks)
        verify(first_chunk, prepared.summed_ranks, [ExpectedPart(first_chunk.numel(), 0, rank)])
        return prepared

    return allocate_on_all_ranks(prepare, device)


def allocate_on_all_ranks(allocate: Callable[[], T], device: torch.device) -> T:
    """Call ``allocate`` on all ranks and return its result; AllocationError on all ranks if one is out of memory."""
    allocated, reason = None, ""
    try:
        allocated = allocate()
    except RuntimeError as error:
        # The CPU allocator and NCCL's raise a plain RuntimeError
        out_of_memory_texts = ("can't allocate memory", "ncclMemAlloc failed")
        has_such_text = any(text in str(error) for text in out_of_memory_texts)
        if not (isinstance(error, torch.OutOfMemoryError) or has_such_text):
            raise
        reason = str(error).splitlines()[0]
    reasons = {rank: text for rank, text in enumerate(gather(reason)) if text}
    if reasons or allocated is None:
        del allocated
        if device.type == "cuda":
            torch.cuda.empty_cache()  # NCCL's own buffers cannot use memory in torch's cache
        raise AllocationError(reasons)
    return allocated


def describe_api(device: str) -> str:
    """The APIs by which ranks call operations. Called by all ranks together."""
    return str(joined_names(gather(collective_api(torch.device(device)).description)))


def supports_out_of_place(device: str) -> bool:
    """Whether all ranks can call every operation out of place. Called by all ranks together."""
    return all(gather(collective_api(torch.device(device)).supports_out_of_place))


def describe_group() -> dict[str, object]:
    """Facts about the process group: backend, world size, timing method, GPU model, NCCL's version and variables.

    ``set_by_seatrial`` lists the variables that seatrial set. Called by all ranks together.
    """
    backend = str(dist.get_backend())
    models = gather(torch.cuda.get_device_name() if backend == dist.Backend.NCCL else "")
    facts: dict[str, object] = {"backend": backend, "world_size": dist.get_world_size(), "timing": TIMING}
    if backend == dist.Backend.NCCL:
        facts["gpu"] = joined_names(models)
        facts["set_by_seatrial"] = sorted(group.set_by_seatrial)
        facts["nccl_version"] = group.nccl_version()
    prefixes = ("NCCL_", "TORCH_NCCL_", "GLOO_")
    facts["backend_environment"] = {key: value for key, value in sorted(os.environ.items()) if key.startswith(prefixes)}
    return facts
