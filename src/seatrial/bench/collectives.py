"""Measures one collective operation: time, bandwidth by nccl-tests' definitions, and whether the result is right.

Everything here needs an open process group (``bench.group``) and is called by all ranks together.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from math import ceil, comb
from statistics import fmean, median

import torch
import torch.distributed as dist

from seatrial.bench.rank import gather
from seatrial.model import UsageError

WINDOW_S = 0.02  # long against the 1 ms that ranks need to agree, short enough for many windows
MIN_WINDOWS = 10  # the median's interval then leaves out the best and the worst window
MAX_WINDOWS = 200  # enough for any percentile a report shows; a longer load has longer windows, not more of them
PRECISION = 0.01  # windows are added until the median is known to 1 %, or the time is up
CHUNK = 2**24  # elements whose expected values are held at once: an 8 GiB buffer is checked with 0.5 GiB of scratch
STRIDE = 1_000_000_007  # prime and above every period in use, so that a pattern visits all values of its period

DTYPES = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}
_BITS = {2: torch.int16, 4: torch.int32}

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
class Mismatch:
    """A buffer that differs from the exact result: how often, and the first place. ``xor``: the bits that differ."""

    wrong: int
    offset: int  # in elements
    expected: str
    got: str
    xor: str


@dataclass(frozen=True)
class Result:
    """One operation at one size: its times, and the ranks whose data was wrong."""

    timings: Timings
    mismatches: dict[int, Mismatch]


def algorithm_bandwidth(size: int, seconds: float) -> float:
    """GB/s (1e9 B) of a buffer of ``size`` bytes: S / t (nccl-tests, doc/PERFORMANCE.md)."""
    return size / seconds / 1e9


def all_reduce_factor(ranks: int) -> float:
    """What turns algorithm bandwidth into bus bandwidth: 2 (n - 1) / n (nccl-tests, doc/PERFORMANCE.md)."""
    return 2 * (ranks - 1) / ranks


def measure_all_reduce(size: int, dtype: str, device: str, seconds: float, at_least: float = 0.0) -> Result:
    """Time an in-place sum of ``size`` bytes as ``time_operation`` does, then check one sum bit by bit.

    Raises NoMemory on all ranks when the buffer does not fit on one of them.
    """
    buffer = _allocate(size, DTYPES[dtype], torch.device(device))
    # The values grow with every sum, at last to inf: as with nccl-tests in place, this does not change the time.
    timings = time_operation(lambda: dist.all_reduce(buffer), buffer.device, seconds, at_least)
    fill(buffer, dist.get_rank(), dist.get_world_size())
    dist.all_reduce(buffer)
    found = gather(verify(buffer, dist.get_world_size()))
    return Result(timings, {rank: mismatch for rank, mismatch in enumerate(found) if mismatch})


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
    return spent >= seconds or len(windows) >= MAX_WINDOWS or _settled(windows)


def _settled(windows: Sequence[tuple[float, ...]]) -> bool:
    if len(windows) < MIN_WINDOWS:
        return False
    means = [fmean(window) for window in windows]
    middle, interval = median(means), median_interval(means)
    assert interval, "ten samples have an interval"
    return interval[0] >= (1 - PRECISION) * middle and interval[1] <= (1 + PRECISION) * middle


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median by order statistics; None under 6 samples, where there is none."""
    ordered, count = sorted(samples), len(samples)
    tail, outside = 1 / 2**count, 0  # tail: the chance that no more than `outside` samples lie under the true median
    while 2 * tail <= 0.05:
        outside += 1
        tail += comb(count, outside) / 2**count
    return (ordered[outside - 1], ordered[count - outside]) if outside else None


def fill(buffer: torch.Tensor, rank: int, ranks: int) -> None:
    """Write this rank's contribution: integers that differ by rank and position, small enough to sum exactly.

    In any order and grouping, no partial sum over ``ranks`` leaves the integers that the type holds exactly.
    Raises UsageError where so many ranks leave no such integers.
    """
    period, shifts = _pattern(buffer.dtype, ranks)
    for start, chunk in _chunks(buffer):
        chunk.copy_(_positions(start, chunk, period).add_(rank % shifts))


def verify(buffer: torch.Tensor, ranks: int) -> Mismatch | None:
    """Compare bit by bit with the exact sum of what ``ranks`` ranks filled in. None when all is right."""
    period, shifts = _pattern(buffer.dtype, ranks)
    shift = sum(rank % shifts for rank in range(ranks))
    wrong, first = 0, None
    for start, chunk in _chunks(buffer):
        expected = _positions(start, chunk, period).mul_(ranks).add_(shift).to(chunk.dtype)
        differs = _as_bits(chunk) != _as_bits(expected)
        count = int(differs.sum())
        if count and first is None:
            first = (start, int(differs.nonzero()[0]), chunk, expected)
        wrong += count
    return _mismatch(wrong, *first) if first else None


def _mismatch(wrong: int, start: int, index: int, got: torch.Tensor, expected: torch.Tensor) -> Mismatch:
    width = 8 * got.element_size()
    xor = int(_as_bits(got)[index] ^ _as_bits(expected)[index]) % 2**width
    values = str(expected[index].item()), str(got[index].item())
    return Mismatch(wrong, start + index, *values, xor=f"{xor:#0{width // 4 + 2}x}")


def _pattern(dtype: torch.dtype, ranks: int) -> tuple[int, int]:
    """The number of values that positions take (odd, so that shifted blocks, powers of two, differ) and ranks take."""
    exact = int(2 / torch.finfo(dtype).eps)  # every integer up to here has a value of its own
    largest = exact // ranks
    if not largest:
        raise UsageError(f"the data check sums integers exactly, and {dtype} holds none for {ranks} ranks: use float32")
    shifts = min(ranks, largest // 2 + 1)
    return 2 * (largest - shifts + 1) + 1, shifts


def _positions(start: int, chunk: torch.Tensor, period: int) -> torch.Tensor:
    """Integers around 0, one an element, that depend on the position alone."""
    position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=chunk.device)
    return position.mul_(STRIDE).remainder_(period).sub_(period // 2)


def _chunks(buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return ((start, buffer[start : start + CHUNK]) for start in range(0, buffer.numel(), CHUNK))


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.element_size()])


def _allocate(size: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """A filled buffer of ``size`` bytes; NoMemory on all ranks unless all have one."""
    buffer, refusal = None, ""
    try:
        buffer = torch.empty(size // dtype.itemsize, dtype=dtype, device=device)
        fill(buffer, dist.get_rank(), dist.get_world_size())  # the scratch memory of the data check must fit as well
    except RuntimeError as error:
        if not _is_out_of_memory(error):
            raise
        refusal = str(error).splitlines()[0]
    refusals = {rank: text for rank, text in enumerate(gather(refusal)) if text}
    if refusals or buffer is None:
        raise NoMemory(refusals)
    return buffer


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
