"""What the checks of collective operations share: one measurement, one vocabulary of metrics and facts.

Sizes, bandwidths and the way of timing are those of nccl-tests, so that its published figures compare directly.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import partial
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
from seatrial.statistics import median_interval

if TYPE_CHECKING:
    from seatrial.bench.collectives import NoMemory, Result, Timings
    from seatrial.bench.operations import Operation

# The largest shows the links, the smallest the latency.
GPU_SIZES = tuple(map(parse_bytes, ("1MiB", "64MiB", "1GiB")))
# Gloo moves data through the CPU: a rehearsal of the procedure, kept to a few seconds on two cores.
CPU_SIZES = tuple(map(parse_bytes, ("64KiB", "1MiB", "10MiB")))

ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

UNITS = {"busbw": "GB/s", "algbw": "GB/s", "latency": "us"}


class CollectiveOptions(Options):
    """``sizes``: bytes of the buffer on each rank; by default what suits the device.

    ``seconds_per_size`` caps the timed part of one size; it ends earlier once the median is known to 1 %. A burn-in
    raises ``min_seconds_per_size``: the load then lasts at least so long at each size, however sure the median is.
    """

    sizes: tuple[ByteSize, ...] | None = Field(default=None, min_length=1)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    seconds_per_size: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    min_seconds_per_size: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole_elements(self) -> CollectiveOptions:
        element = ELEMENT_SIZES[self.dtype]
        for size in self.sizes or ():
            if size == 0 or size % element:
                raise ValueError(f"size {size} B is not a whole number of {self.dtype} elements of {element} B")
        return self


@dataclass(frozen=True)
class Sizes:
    """What is measured where a trial names no sizes, in bytes."""

    gpu: tuple[int, ...] = GPU_SIZES
    cpu: tuple[int, ...] = CPU_SIZES


def measure(name: str, defaults: Sizes, place: Place, options: CollectiveOptions) -> Iterator[Observation]:
    """Yield the cluster's figures on rank 0, and on every rank its own time at the largest size.

    Raises NotApplicable with fewer than two ranks, SeatrialError when not even one size fits into memory.
    """
    if place.world_size < 2:
        raise NotApplicable(f"a collective operation needs at least 2 processes, here is {place.world_size}")
    from seatrial.bench import collectives, rank
    from seatrial.bench.operations import OPERATIONS

    operation, leads = OPERATIONS[name], place.rank == 0
    subjects = rank.gather(place.subject)
    path = collectives.describe_group()
    nodes = len({subject.partition("/")[0] for subject in subjects})
    if leads:
        yield from _facts({**path, "nodes": nodes, "dtype": options.dtype, "in_place": operation.in_place})
    results: dict[int, Result] = {}
    refused: dict[str, object] = {}
    least, most = options.min_seconds_per_size, max(options.min_seconds_per_size, options.seconds_per_size)
    for size in sorted(set(options.sizes or (defaults.gpu if place.device.startswith("cuda") else defaults.cpu))):
        place.note(_label(size))
        try:
            results[size] = collectives.measure(operation, size, options.dtype, place.device, most, least)
        except collectives.NoMemory as error:
            refused[_label(size)] = _by_subject(error, subjects)
            continue
        if leads:
            yield from _size_metrics(size, results[size], operation)
    if not results:
        raise SeatrialError(f"no buffer could be allocated: {refused}")
    yield _rank_time(place, max(results), results[max(results)].timings)
    if leads:
        yield from _summary(results, subjects, operation)
        yield Metric(name="sizes_refused", value=len(refused), unit="sizes", subject=CLUSTER)
        yield from _facts({"not_allocated": refused} if refused else {})
        yield Fact(name="how", value=_how(path, nodes, options.dtype, results, operation))


def _how(path: dict[str, object], nodes: int, dtype: str, results: dict[int, Result], operation: Operation) -> str:
    """What was measured, over which path, how often and how sure, in a sentence."""
    ranks, windows = path["world_size"], [len(result.timings.windows) for result in results.values()]
    count = f"{min(windows)} to {max(windows)}" if len(set(windows)) > 1 else str(windows[0])
    place = "in" if operation.in_place else "out of"
    return (
        f"{_carrier(path)}, {ranks} ranks on {nodes} {'node' if nodes == 1 else 'nodes'}, {place} place, {dtype}; each "
        f"figure is the median of {count} windows, each the mean over ranks; busbw = algbw · {operation.formula}, "
        f"as nccl-tests has it; {_certainty(results[max(results)], max(results), operation)}"
    )


def _carrier(path: dict[str, object]) -> str:
    """Which library moved the data, and over what as far as it is known: NCCL chooses by itself."""
    if path["backend"] == "nccl":
        return f"NCCL {path['nccl_version']} over the transports of its own choice"
    environment = path["backend_environment"]
    interface = environment.get("GLOO_SOCKET_IFNAME") if isinstance(environment, dict) else None
    return f"gloo over {interface or 'the interface of its own choice (GLOO_SOCKET_IFNAME is not set)'}"


def _certainty(result: Result, size: int, operation: Operation) -> str:
    """The 95 % interval of the bus bandwidth at one size."""
    interval = median_interval([_figures(result, seconds, operation)["busbw"] for seconds in result.timings.means])
    if not interval:
        return f"too few windows for a 95 % interval at {_label(size)}"
    return f"95 % interval of busbw.{_label(size)}: {interval[0]:.4g} to {interval[1]:.4g} GB/s"


def _figures(result: Result, seconds: float, operation: Operation) -> dict[str, float]:
    """One time per operation as nccl-tests prints it; see UNITS."""
    algbw = result.size / seconds / 1e9
    return {"busbw": algbw * operation.factor(result.timings.ranks), "algbw": algbw, "latency": seconds * 1e6}


def _size_metrics(size: int, result: Result, operation: Operation) -> Iterator[Metric]:
    """The figures at the median window, those of all windows as samples."""
    value = _figures(result, median(result.timings.means), operation)
    samples = [_figures(result, seconds, operation) for seconds in result.timings.means]
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


def _summary(results: dict[int, Result], subjects: list[str], operation: Operation) -> Iterator[Observation]:
    wrong = [mismatch.wrong for result in results.values() for mismatch in result.mismatches.values()]
    yield Metric(name="wrong_elements", value=sum(wrong), unit="count", subject=CLUSTER)
    yield from _curves(results, operation)
    labelled = {_label(size): result for size, result in results.items()}
    yield Fact(name="sizes", value={label: result.size for label, result in labelled.items()})
    yield Fact(name="iterations", value={label: _iterations(result.timings) for label, result in labelled.items()})
    yield Fact(name="spread", value={label: _spread(result.timings, subjects) for label, result in labelled.items()})
    if wrong:
        yield from _facts(
            {"wrong_data": [found for size in results for found in _wrong(size, results[size], subjects)]}
        )


def _curves(results: dict[int, Result], operation: Operation) -> Iterator[Series]:
    points = [_figures(result, median(result.timings.means), operation) for result in results.values()]
    x = tuple(result.size for result in results.values())
    for name in ("busbw", "latency"):
        y = tuple(point[name] for point in points)
        yield Series(name=name, subject=CLUSTER, x=x, y=y, x_unit="B", y_unit=UNITS[name])


def _iterations(timings: Timings) -> dict[str, object]:
    return {"warmup": timings.warmup, "windows": len(timings.windows), "per_window": timings.per_window}


def _spread(timings: Timings, subjects: list[str]) -> dict[str, object]:
    """Times per operation in us over the windows (mean over ranks), and the slowest rank beside them."""
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


def collective_check(
    name: str, title: str, *, defaults: Sizes | None = None, rules: tuple[Rule, ...] = (), limit_s: float = 600.0
) -> Check:
    """The check of the operation called ``name``; every one judges its data and that no size was left out.

    The limit is generous: gigabytes over a slow network take minutes and are slow, not hung.
    """
    return Check(
        name=f"collectives.{name}",
        title=title,
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
        rules=(_refused(name), _WRONG, *rules),
        measure=partial(measure, name, defaults or Sizes()),
        limit_s=limit_s,
        needs=Needs(ranks=2),
        options=CollectiveOptions,
        performance=("busbw.*", "algbw.*", "latency.*", "rank_time.*"),
    )


def saturated(name: str, size: str) -> Rule:
    """The bus bandwidth at a size that saturates the links, against what is known of it."""
    return Rule(
        metric=f"busbw.{size}",
        baseline=f"{name}.busbw.{size}",
        fail_below=0.90,
        warn_below=0.95,
        where={"backend": "nccl"},
        why="At this size the links are saturated: what is missing here is missing from every exchange of gradients, "
        "parameters or tokens.",
        remedy="Run `nvidia-smi topo -m` and `nvidia-smi nvlink -s`: every pair should be joined by all of its "
        "links at full speed. Then `nvidia-smi -q -d PERFORMANCE,CLOCK` for a throttled GPU. Across nodes, repeat "
        "with NCCL_DEBUG=INFO: `NET/Socket` in place of `NET/IB` means that RDMA is not in use; see `ibstat`.",
    )


def _refused(name: str) -> Rule:
    return Rule(
        metric="sizes_refused",
        shows=("not_allocated",),
        expect="== 0 sizes",
        why="These sizes were to be measured and did not fit into memory: nothing is known of them.",
        remedy="The fact not_allocated says which size, where, and why. Something else may hold the memory: see "
        "nvidia-smi, or free -h on a machine without GPUs. Where the device is simply smaller, say which sizes "
        f"count: --set 'checks.collectives.{name}.options.sizes=[1MiB, 1GiB]'.",
    )


_WRONG = Rule(
    metric="wrong_elements",
    shows=("wrong_data",),
    expect="== 0",
    why="The numbers are small integers, exact in any order: one wrong bit means that data is corrupted on its way, "
    "and every gradient of every training run goes this way.",
    remedy="Train nothing on these nodes. The fact wrong_data names rank, offset and flipped bits. On that "
    "rank's node look at `nvidia-smi -q -d ECC,ROW_REMAPPER`, `nvidia-smi nvlink -e`, `dmesg | grep -i xid`. "
    "Then repeat with NCCL_P2P_DISABLE=1: wrong again, suspect a GPU's memory; right now, suspect NVLink.",
)
