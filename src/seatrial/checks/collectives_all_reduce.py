"""How fast do all processes sum a buffer together, and is the sum right, bit by bit?

Sizes, bandwidths and the way of timing are those of nccl-tests, so that its published figures compare directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from statistics import median
from typing import TYPE_CHECKING, Literal

from pydantic import Field, model_validator

from seatrial.checks.base import Check, Needs, Options, Place
from seatrial.model import (
    CLUSTER,
    ByteSize,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    Series,
    format_bytes,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.collectives import NoMemory, Result, Timings

# The largest shows the links, the smallest the latency; 8 GiB is what published acceptance figures use.
GPU_SIZES = tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB")))
# Gloo moves data through the CPU: a rehearsal of the procedure, kept to about ten seconds on two cores.
CPU_SIZES = tuple(map(parse_bytes, ("64KiB", "1MiB", "10MiB", "100MiB")))

ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

UNITS = {"busbw": "GB/s", "algbw": "GB/s", "latency": "us"}


class AllReduceOptions(Options):
    """``sizes``: bytes of the buffer on each rank; by default what suits the device (see GPU_SIZES, CPU_SIZES).

    ``seconds_per_size`` caps the timed part of one size; it ends earlier once the median is known to 1 %. A burn-in
    raises ``min_seconds_per_size``: the load then lasts at least so long at each size, however sure the median is.
    """

    sizes: tuple[ByteSize, ...] | None = Field(default=None, min_length=1)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    seconds_per_size: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    min_seconds_per_size: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole_elements(self) -> AllReduceOptions:
        element = ELEMENT_SIZES[self.dtype]
        for size in self.sizes or ():
            if size == 0 or size % element:
                raise ValueError(f"size {size} B is not a whole number of {self.dtype} elements of {element} B")
        return self


def measure(place: Place, options: AllReduceOptions) -> Iterator[Observation]:
    """Yield the cluster's figures on rank 0, and on every rank its own time at the largest size.

    Raises NotApplicable with fewer than two ranks, SeatrialError when not even one size fits into memory.
    """
    if place.world_size < 2:
        raise NotApplicable(f"an all-reduce needs at least 2 processes, here is {place.world_size}")
    from seatrial.bench import collectives, rank

    leads = place.rank == 0
    subjects = rank.gather(place.subject)
    sizes = options.sizes or (GPU_SIZES if place.device.startswith("cuda") else CPU_SIZES)
    path = collectives.describe_group()
    if leads:
        nodes = len({subject.partition("/")[0] for subject in subjects})
        yield from _facts({**path, "nodes": nodes, "dtype": options.dtype, "in_place": True})
    results: dict[int, Result] = {}
    refused: dict[str, object] = {}
    least, most = options.min_seconds_per_size, max(options.min_seconds_per_size, options.seconds_per_size)
    for size in sorted(set(sizes)):
        place.note(_label(size))
        try:
            results[size] = collectives.measure_all_reduce(size, options.dtype, place.device, most, least)
        except collectives.NoMemory as error:
            refused[_label(size)] = _by_subject(error, subjects)
            continue
        if leads:
            yield from _size_metrics(size, results[size].timings)
    if not results:
        raise SeatrialError(f"no buffer could be allocated: {refused}")
    yield _rank_time(place, max(results), results[max(results)].timings)
    if leads:
        yield from _summary(results, subjects)
        yield Metric(name="sizes_refused", value=len(refused), unit="sizes", subject=CLUSTER)
        yield from _facts({"not_allocated": refused} if refused else {})
        yield Fact(name="how", value=_how(path, nodes, options.dtype, results))


def _how(path: dict[str, object], nodes: int, dtype: str, results: dict[int, Result]) -> str:
    """What was measured, over which path, how often and how sure, in a sentence."""
    ranks, windows = path["world_size"], [len(result.timings.windows) for result in results.values()]
    count = f"{min(windows)} to {max(windows)}" if len(set(windows)) > 1 else str(windows[0])
    return (
        f"{_carrier(path)}, {ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}, in place, {dtype}; each "
        f"figure is the median of {count} windows, each the mean over ranks; busbw = algbw · 2(n−1)/n, "
        f"as nccl-tests has it; {_certainty(max(results), results[max(results)].timings)}"
    )


def _carrier(path: dict[str, object]) -> str:
    """Which library moved the data, and over what as far as it is known: NCCL chooses by itself."""
    if path["backend"] == "nccl":
        return f"NCCL {path['nccl_version']} over the transports of its own choice"
    environment = path["backend_environment"]
    interface = environment.get("GLOO_SOCKET_IFNAME") if isinstance(environment, dict) else None
    return f"gloo over {interface or 'the interface of its own choice (GLOO_SOCKET_IFNAME is not set)'}"


def _certainty(size: int, timings: Timings) -> str:
    """The 95 % interval of the bus bandwidth at one size."""
    from seatrial.bench.collectives import median_interval

    interval = median_interval([_figures(size, seconds, timings.ranks)["busbw"] for seconds in timings.means])
    if not interval:
        return f"too few windows for a 95 % interval at {_label(size)}"
    return f"95 % interval of busbw.{_label(size)}: {interval[0]:.4g} to {interval[1]:.4g} GB/s"


def _figures(size: int, seconds: float, ranks: int) -> dict[str, float]:
    """One time per operation as nccl-tests prints it; see UNITS."""
    from seatrial.bench.collectives import algorithm_bandwidth, all_reduce_factor

    algbw = algorithm_bandwidth(size, seconds)
    return {"busbw": algbw * all_reduce_factor(ranks), "algbw": algbw, "latency": seconds * 1e6}


def _size_metrics(size: int, timings: Timings) -> Iterator[Metric]:
    """The figures at the median window, those of all windows as samples."""
    value = _figures(size, median(timings.means), timings.ranks)
    samples = [_figures(size, seconds, timings.ranks) for seconds in timings.means]
    for name, unit in UNITS.items():
        yield Metric(
            name=f"{name}.{_label(size)}",
            value=value[name],
            unit=unit,
            subject=CLUSTER,
            samples=tuple(sample[name] for sample in samples),
        )


def _rank_time(place: Place, size: int, timings: Timings) -> Metric:
    """This rank's own time: over all ranks it shows who is slower than the rest."""
    us = tuple(seconds * 1e6 for seconds in timings.of_rank(place.rank))
    name = f"rank_time.{_label(size)}"
    return Metric(name=name, value=median(us), unit="us", subject=place.subject, samples=us)


def _summary(results: dict[int, Result], subjects: list[str]) -> Iterator[Observation]:
    wrong = [mismatch.wrong for result in results.values() for mismatch in result.mismatches.values()]
    yield Metric(name="wrong_elements", value=sum(wrong), unit="count", subject=CLUSTER)
    yield from _curves(results)
    labelled = {_label(size): result for size, result in results.items()}
    yield Fact(name="sizes", value={_label(size): size for size in results})
    yield Fact(name="iterations", value={label: _iterations(result.timings) for label, result in labelled.items()})
    yield Fact(name="spread", value={label: _spread(result.timings, subjects) for label, result in labelled.items()})
    if wrong:
        yield from _facts(
            {"wrong_data": [found for size in results for found in _wrong(size, results[size], subjects)]}
        )


def _curves(results: dict[int, Result]) -> Iterator[Series]:
    points = [_figures(size, median(r.timings.means), r.timings.ranks) for size, r in results.items()]
    for name in ("busbw", "latency"):
        y = tuple(point[name] for point in points)
        yield Series(name=name, subject=CLUSTER, x=tuple(results), y=y, x_unit="B", y_unit=UNITS[name])


def _iterations(timings: Timings) -> dict[str, object]:
    return {"warmup": timings.warmup, "windows": len(timings.windows), "per_window": timings.per_window}


def _spread(timings: Timings, subjects: list[str]) -> dict[str, object]:
    """Times per operation in us over the windows (mean over ranks), and the slowest rank beside them."""
    from seatrial.bench.collectives import median_interval

    us = [seconds * 1e6 for seconds in timings.means]
    interval = median_interval(us)
    return {
        "p50_us": median(us),
        "min_us": min(us),
        "max_us": max(us),
        "ci95_of_p50_us": list(interval) if interval else None,
        "slowest_rank": subjects[timings.slowest],
        "slowest_rank_us": median(timings.of_rank(timings.slowest)) * 1e6,
    }


def _wrong(size: int, result: Result, subjects: list[str]) -> Iterator[dict[str, object]]:
    for rank, mismatch in result.mismatches.items():
        yield {"size": _label(size), "rank": rank, "subject": subjects[rank], **asdict(mismatch)}


def _by_subject(error: NoMemory, subjects: list[str]) -> dict[str, str]:
    return {subjects[rank]: reason for rank, reason in error.refusals.items()}


def _facts(values: dict[str, object]) -> Iterator[Fact]:
    return (Fact(name=name, value=value) for name, value in values.items())


def _label(size: int) -> str:
    """The size as part of a metric's name; plain bytes where the short form would be rounded."""
    short = format_bytes(size)
    return f"{size}B" if "." in short else short


CHECK = Check(
    name="collectives.all_reduce",
    title="All-reduce bandwidth, latency and correctness",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={
        "busbw.*": "GB/s",
        "algbw.*": "GB/s",
        "latency.*": "us",
        "rank_time.*": "us",
        "wrong_elements": "count",
        "sizes_refused": "sizes",
    },
    rules=(
        Rule(
            metric="sizes_refused",
            shows=("not_allocated",),
            expect="== 0 sizes",
            why="These sizes were to be measured and did not fit into memory: nothing is known of them.",
            remedy="The fact not_allocated says which size, where, and why. Something else may hold the memory: see "
            "nvidia-smi, or free -h on a machine without GPUs. Where the device is simply smaller, say which sizes "
            "count: --set 'checks.collectives.all_reduce.options.sizes=[1MiB, 1GiB]'.",
        ),
        Rule(
            metric="wrong_elements",
            shows=("wrong_data",),
            expect="== 0",
            why="The sum of small integers is exact in any order: one wrong bit means that data is corrupted on its "
            "way, and every gradient of every training run goes this way.",
            remedy="Train nothing on these nodes. The fact wrong_data names rank, offset and flipped bits. On that "
            "rank's node look at `nvidia-smi -q -d ECC,ROW_REMAPPER`, `nvidia-smi nvlink -e`, `dmesg | grep -i xid`. "
            "Then repeat with NCCL_P2P_DISABLE=1: wrong again, suspect a GPU's memory; right now, suspect NVLink.",
        ),
        Rule(
            metric="busbw.8GiB",
            baseline="all_reduce.busbw.8GiB",
            fail_below=0.90,
            warn_below=0.95,
            where={"backend": "nccl"},
            why="At this size the links are saturated: what is missing here is missing from every gradient exchange.",
            remedy="Run `nvidia-smi topo -m` and `nvidia-smi nvlink -s`: every pair should be joined by all of its "
            "links at full speed. Then `nvidia-smi -q -d PERFORMANCE,CLOCK` for a throttled GPU. Across nodes, repeat "
            "with NCCL_DEBUG=INFO: `NET/Socket` in place of `NET/IB` means that RDMA is not in use; see `ibstat`.",
        ),
    ),
    measure=measure,
    limit_s=600.0,  # 8 GiB over a slow network takes minutes and is slow, not hung
    needs=Needs(ranks=2),
    options=AllReduceOptions,
)
