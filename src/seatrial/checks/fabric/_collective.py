"""What the checks of collective operations share: one measurement, one vocabulary of metrics and facts.

Sizes, bandwidths and the way of timing are those of nccl-tests, so that its published figures compare directly.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, TypeVar

from pydantic import BeforeValidator, Field, JsonValue, model_validator

from seatrial.checks.base import Check, Context, Needs, Options, facts, metric
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric import _results as figures
from seatrial.model import (
    NOT_REQUESTED,
    ByteSize,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult
    from seatrial.bench.data_check import Mismatch
    from seatrial.bench.operations import Operation

T = TypeVar("T")
Measured = Generator[
    Observation, None, dict[int, "CollectiveResult"]
]  # of one mode: yields its metrics, returns its results

# The largest shows the links. At 1 MiB the host's start of each operation shows: two runs of one machine gave 13 and
# 16 us there; for small sizes there is the mode device.
GPU_SIZES = tuple(map(parse_bytes, ("10MiB", "64MiB", "1GiB")))
# Gloo moves data through the CPU: a rehearsal of the procedure, kept to a few seconds on two cores.
CPU_SIZES = tuple(map(parse_bytes, ("64KiB", "1MiB", "10MiB")))
# Where what the host needs to start an operation hides what the device needs for it.
# Six, so that each of two protocols, which change about there, has the three that a line over its sizes needs.
CUDA_GRAPH_SIZES = tuple(map(parse_bytes, ("8B", "1KiB", "16KiB", "64KiB", "256KiB", "1MiB")))
# One at which the 300 operations that a 99th percentile takes end within a second or two.
GPU_PERCENTILE_SIZES = (parse_bytes("1GiB"),)
CPU_PERCENTILE_SIZES = (parse_bytes("1MiB"),)

# NCCL carries the one by LL and the other by Simple, where it has not been told otherwise.
GPU_DATA_CHECK_SIZES = tuple(map(parse_bytes, ("64KiB", "64MiB")))
CPU_DATA_CHECK_SIZES = (parse_bytes("64KiB"),)

ELEMENT_SIZES = {"float32": 4, "float16": 2, "bfloat16": 2}

NO_CUDA_GRAPH = "not applicable: gloo moves data by the CPU, and there is no CUDA graph of that"


def expand_size_sweep(sizes: Any) -> Any:
    """``{from: 8B, to: 1KiB, factor: 2}`` as the list of its sizes; anything else as it is."""
    if not isinstance(sizes, Mapping):
        return sizes
    if wrong := {"from", "to"} - set(sizes) or set(sizes) - {"from", "to", "factor"}:
        raise ValueError(f"a sweep of sizes has from, to and factor (2 by default): see {', '.join(map(str, wrong))}")
    first, last, factor = parse_bytes(sizes["from"]), parse_bytes(sizes["to"]), sizes.get("factor", 2)
    if not isinstance(factor, int) or factor < 2 or not 0 < first <= last:
        raise ValueError(f"a sweep goes up by a whole factor of 2 or more; from {first} B to {last} B by {factor}?")
    found = [first]
    while found[-1] * factor <= last:
        found.append(found[-1] * factor)
    return found


SizeList = Annotated[tuple[ByteSize, ...] | None, BeforeValidator(expand_size_sweep)]


class CollectiveOptions(Options):
    """``sizes``: bytes of the buffer on each rank, a list or a sweep; by default what suits the device.

    ``modes``: what is timed. parity: operations back to back, as nccl-tests times them. device: the same in a CUDA
    graph, without what the host needs to start each one. distribution: every single one, for percentiles.
    ``placement``: ``both`` measures an operation in place as well as out of place, where it can be called both ways.
    ``buffers``: whose allocator they come from.
    ``seconds_per_size`` caps the timed part of one size; it ends earlier once the median is known to 1 %. A burn-in
    raises ``min_seconds_per_size``: the load of mode parity then lasts at least so long at each size.
    """

    # which option lists the sizes of a metric, where it is not the one called sizes
    size_option_by_metric: ClassVar[dict[str, str]] = {
        **dict.fromkeys(("cuda_graph_latency", "cuda_graph_busbw"), "cuda_graph_sizes"),
        **dict.fromkeys(("p50", "p95", "p99", "cv"), "percentile_sizes"),
    }

    modes: tuple[Literal["parity", "device", "distribution"], ...] = Field(default=("parity",), min_length=1)
    sizes: SizeList = Field(default=None, min_length=1)
    cuda_graph_sizes: SizeList = Field(default=None, min_length=1)
    percentile_sizes: SizeList = Field(default=None, min_length=1)
    dtype: Literal["float32", "float16", "bfloat16"] = "float32"
    placement: Literal["usual", "both"] = "usual"
    buffers: Literal["torch", "nccl", "nccl_registered"] = "torch"
    seconds_per_size: float = Field(default=2.0, gt=0, allow_inf_nan=False)
    min_seconds_per_size: float = Field(default=0.0, ge=0, allow_inf_nan=False)

    @model_validator(mode="after")
    def _whole_elements(self) -> CollectiveOptions:
        element = ELEMENT_SIZES[self.dtype]
        for size in (*(self.sizes or ()), *(self.cuda_graph_sizes or ()), *(self.percentile_sizes or ())):
            if size == 0 or size % element:
                raise ValueError(f"size {size} B is not a whole number of {self.dtype} elements of {element} B")
        return self


@dataclass(frozen=True)
class DefaultSizes:
    """What is measured where a trial names no sizes, in bytes."""

    gpu: tuple[int, ...] = GPU_SIZES
    cpu: tuple[int, ...] = CPU_SIZES

    def for_mode(self, mode: str, options: CollectiveOptions, *, gpu: bool) -> Sequence[int]:
        """The sizes of a mode, downwards: torch then cuts the buffers of the smaller from the largest ones' memory.

        nccl-tests has one buffer for all sizes. Memory of its own made all-gather of 64 MiB up to 1.2 % slower on H200,
        by what the allocator happened to find (docs/results).
        """
        chosen = {
            "parity": options.sizes or (self.gpu if gpu else self.cpu),
            "device": options.cuda_graph_sizes or CUDA_GRAPH_SIZES,
            "distribution": options.percentile_sizes or (GPU_PERCENTILE_SIZES if gpu else CPU_PERCENTILE_SIZES),
        }
        return sorted(set(chosen[mode]), reverse=True)


# Other than usual: 8 GiB is what published acceptance figures use. On a CPU: kept to about ten seconds on two cores.
_OWN_SIZES = {
    "all_reduce": DefaultSizes(
        gpu=tuple(map(parse_bytes, ("1MiB", "10MiB", "100MiB", "1GiB", "8GiB"))),
        cpu=tuple(map(parse_bytes, ("64KiB", "1MiB", "10MiB", "100MiB"))),
    ),
}


def default_sizes(name: str) -> DefaultSizes:
    """At which sizes the operation called ``name`` is measured where a trial names none."""
    return _OWN_SIZES.get(name, DefaultSizes())


def collective_check(name: str, title: str, *, rules: tuple[Rule, ...] = (), limit_s: float = 600.0) -> Check:
    """The check of the operation called ``name``; every one judges its data and that no size was left out.

    The limit is generous: gigabytes over a slow network take minutes and are slow, not hung.
    """
    return Check(
        name=f"collectives.{name}",
        title=title,
        phase=Phase.INTERCONNECT,
        scope=Scope.CLUSTER,
        metrics={
            **{f"{figure}.*": unit for figure, unit in figures.UNITS.items()},
            "rank_time.*": "us",
            **{
                f"{figure}{end}.*": unit
                for figure, unit in figures.UNITS.items()
                for end in figures.VARIANT_SUFFIXES.values()
            },
            "cuda_graph_latency.*": "us",
            "cuda_graph_busbw.*": "GB/s",
            **{f"p{percent}.*": "us" for percent in figures.MIN_SAMPLES},
            "cv.*": "%",
            "wrong_elements": "count",
            "sizes_not_allocated": "sizes",
        },
        rules=(figures.allocation_rule(name, "sizes=[1MiB, 1GiB]"), _WRONG, *rules),
        measure=partial(measure, name),
        limit_s=limit_s,
        needs=Needs(min_ranks=2),
        options=CollectiveOptions,
        operation=name,
        bounds=figures.BANDWIDTH_BOUNDS,
        performance_metrics=("busbw*", "algbw*", "latency*", "rank_time.*", "device_*", "p[59]*", "cv*"),
    )


def busbw_rule(name: str, size: str, *, reference_optional: bool = False) -> Rule:
    """The bus bandwidth at a size that saturates the links, against what is known of it.

    ``if_known``: for operations that hardly anybody publishes figures of. Training sums, gathers and scatters.
    """
    return Rule(
        metric=f"busbw.{size}",
        reference=f"{name}.busbw.{size}",
        fail_below=0.90,
        warn_below=0.95,
        applies_if={"backend": "nccl"},
        reference_optional=reference_optional,
        meaning="At this size the links are saturated: what is missing here is missing from every exchange of gradients, "
        "parameters or tokens.",
        fix="Run `nvidia-smi topo -m` and `nvidia-smi nvlink -s`: every pair should be joined by all of its "
        "links at full speed. Then `nvidia-smi -q -d PERFORMANCE,CLOCK` for a throttled GPU. Across nodes, repeat "
        "with NCCL_DEBUG=INFO: `NET/Socket` in place of `NET/IB` means that RDMA is not in use; see `ibstat`.",
    )


def measure(name: str, context: Context, options: CollectiveOptions) -> Iterator[Observation]:
    """Yield the cluster's figures on rank 0, and on every rank its own time at the largest size.

    Raises NotApplicable with fewer than two ranks, SeatrialError when not even one size fits into memory, or when
    there are no buffers as they are asked for.
    """
    if context.world_size < 2:
        raise NotApplicable(f"a collective operation needs at least 2 processes, here is {context.world_size}")
    from seatrial.bench import collectives, rank
    from seatrial.bench.buffers import ALLOCATORS
    from seatrial.bench.operations import OPERATIONS

    leads, operation, buffers = context.rank == 0, OPERATIONS[name], ALLOCATORS[options.buffers]
    modes = _Modes(operation, default_sizes(name), options, context, rank.gather(context.subject))
    path = collectives.describe_group()
    nodes = len({subject.partition("/")[0] for subject in modes.subjects})
    shape = {"nodes": nodes, "dtype": options.dtype, "in_place": operation.in_place, "buffers": buffers}
    shape["called"] = collectives.describe_api(context.device)
    if leads:
        yield from facts({**path, **shape, "modes": list(options.modes)})
    for observation in modes.run():
        if leads:
            yield observation
    path["transports"] = _nccl_log.connections_by_transport(
        context.device
    )  # afterwards: connections are made at their first use
    if modes.refused and not modes.checked:
        raise SeatrialError(f"no buffer could be allocated: {modes.refused}")
    if not modes.checked:
        raise NotApplicable(NO_CUDA_GRAPH)
    timed = len(modes.checked)
    modes.check_other_types()
    if modes.parity:
        size = max(modes.parity)
        yield figures.rank_time_metric(context.subject, size, modes.parity[size].timings.rank_windows(context.rank))
    if leads:
        yield from figures.wrong_data_results(modes.mismatches())
        yield Fact(name="additional_data_checks", value=[called for called, _ in modes.checked[timed:]])
        yield metric("sizes_not_allocated", len(modes.refused), "sizes")
        yield from facts({"not_allocated": modes.refused} if modes.refused else {})
        yield from modes.left_out()
        yield Fact(name="transports", value=path["transports"])
        yield Fact(name="how", value=figures.method_text(path, shape, modes.done, modes.parity, operation))


@dataclass
class _Modes:
    """One operation in the modes that are asked for. All ranks call every method; rank 0 reports what it yields."""

    operation: Operation
    defaults: DefaultSizes
    options: CollectiveOptions
    place: Context
    subjects: list[str]
    checked: list[tuple[str, Mapping[int, Mismatch]]] = field(default_factory=list)  # wrong data by rank, of each size
    refused: dict[str, object] = field(default_factory=dict)
    parity: dict[int, CollectiveResult] = field(default_factory=dict)

    @property
    def done(self) -> list[str]:
        """The modes that apply here."""
        return [mode for mode in self.options.modes if self.place.on_gpu or mode != "device"]

    def run(self) -> Iterator[Observation]:
        modes = {"parity": self.in_parity, "device": self.on_device, "distribution": self.one_by_one}
        for name, mode in modes.items():
            if name in self.options.modes:
                yield from mode()

    def in_parity(self) -> Iterator[Observation]:
        self.parity = yield from self._in_parity(self.operation, "")
        if self.parity:
            yield from figures.curves_and_counts(self.parity, self.subjects, self.operation)
        if self.options.placement == "both":
            yield from self._elsewhere()

    def _elsewhere(self) -> Iterator[Observation]:
        """The other placement, where there is one here. All ranks agree on that."""
        from seatrial.bench.collectives import supports_out_of_place

        other = self.operation.in_place_variant()
        if not other:
            yield Fact(name="in_place_variant", value="not applicable: this operation is out of place only")
        elif not other.in_place and not supports_out_of_place(self.place.device):
            only = "not applicable: torch's process group, which is called here, has this operation in place only"
            yield Fact(name="in_place_variant", value=only)
        else:
            ending = figures.VARIANT_SUFFIXES[other.in_place]
            results = yield from self._in_parity(other, "in place" if other.in_place else "out of place", ending)
            yield from figures.count_facts(results, self.subjects, ending)

    def _in_parity(self, operation: Operation, word: str, ending: str = "") -> Measured:
        from seatrial.bench.collectives import measure_back_to_back as back_to_back

        least, most = self.options.min_seconds_per_size, self.options.seconds_per_size
        timed = partial(back_to_back, operation, seconds=max(least, most), min_seconds=least)
        return self._each_size(
            "parity", word, timed, partial(figures.back_to_back_metrics, operation=operation, ending=ending)
        )

    def on_device(self) -> Iterator[Observation]:
        from seatrial.bench.collectives import measure_cuda_graph

        if not self.place.on_gpu:
            yield Fact(name="cuda_graph", value=NO_CUDA_GRAPH)
            return
        timed = partial(measure_cuda_graph, self.operation, seconds=self.options.seconds_per_size)
        results = yield from self._each_size(
            "device", "device", timed, partial(figures.cuda_graph_metrics, operation=self.operation)
        )
        if results:
            yield from figures.size_curves(results, self.operation, "device_")
        yield figures.cuda_graph_fact(results)

    def one_by_one(self) -> Iterator[Observation]:
        from seatrial.bench.collectives import measure_each_operation

        timed = partial(measure_each_operation, self.operation, seconds=self.options.seconds_per_size)
        results = yield from self._each_size("distribution", "distribution", timed, figures.percentile_metrics)
        yield figures.percentiles_fact(results, self.subjects)

    def _each_size(
        self, mode: str, word: str, timed: Callable[..., CollectiveResult], report: Callable[..., Iterator[Metric]]
    ) -> Measured:
        """Yield the metrics of each size of a mode; return the results of those that every rank has memory for."""
        asked, element = (
            self.defaults.for_mode(mode, self.options, gpu=self.place.on_gpu),
            ELEMENT_SIZES[self.options.dtype],
        )
        results: dict[int, CollectiveResult] = {}
        for size in sorted(
            {self.operation.nominal_size(one, element, self.place.world_size) for one in asked}, reverse=True
        ):
            name = f"{word} {figures.size_label(size)}".lstrip()
            if result := self._if_it_fits(name, partial(timed, size=size, dtype=self.options.dtype)):
                results[size] = result
                self.checked.append((name, result.mismatches))
                yield from report(size, result)
        return dict(sorted(results.items()))

    def check_other_types(self) -> None:
        """Other types are added up by other code: of those not timed only the data is checked."""
        from seatrial.bench.collectives import check_data

        for dtype in (one for one in ELEMENT_SIZES if one != self.options.dtype):
            for size in GPU_DATA_CHECK_SIZES if self.place.on_gpu else CPU_DATA_CHECK_SIZES:
                name = f"{dtype} {figures.size_label(size)}"
                wrong = self._if_it_fits(name, partial(check_data, self.operation, size, dtype))
                if wrong is not None:
                    self.checked.append((name, wrong))

    def _if_it_fits(self, name: str, run: Callable[..., T]) -> T | None:
        """What ``run`` returns; None where some rank has no memory for it, which is kept in ``refused``."""
        from seatrial.bench.collectives import AllocationError

        self.place.progress(name)
        try:
            return run(device=self.place.device, buffers=self.options.buffers)
        except AllocationError as error:
            self.refused[name] = {self.subjects[rank]: reason for rank, reason in error.reasons.items()}
            return None

    def mismatches(self) -> Iterator[tuple[dict[str, JsonValue], Mismatch]]:
        for name, wrong in self.checked:
            for rank, mismatch in wrong.items():
                yield {"size": name, "rank": rank, "subject": self.subjects[rank]}, mismatch

    def left_out(self) -> Iterator[Observation]:
        """Which of the sizes that would be measured by default the trial's options do not ask for."""
        default = self.defaults.for_mode("parity", CollectiveOptions(), gpu=self.place.on_gpu)
        asked = self.defaults.for_mode("parity", self.options, gpu=self.place.on_gpu)
        asked = asked if "parity" in self.options.modes else []
        if absent := [figures.size_label(size) for size in default if size not in asked]:
            only = (
                f"sizes of {', '.join(map(figures.size_label, sorted(asked)))}" if asked else "no size in mode parity"
            )
            why = f"the trial's options ask for {only}"
            yield Fact(name=NOT_REQUESTED, value={f"busbw.{size}": why for size in absent})


_WRONG = Rule(
    metric="wrong_elements",
    evidence_facts=("wrong_data",),
    expect="== 0",
    meaning="The numbers are small integers, exact in any order: one wrong bit means that data is corrupted on its way, "
    "and every gradient of every training run goes this way.",
    fix="Train nothing on these nodes. The fact wrong_data names rank, offset and flipped bits. On that "
    "rank's node look at `nvidia-smi -q -d ECC,ROW_REMAPPER`, `nvidia-smi nvlink -e`, `dmesg | grep -i xid`. "
    "Then repeat with NCCL_P2P_DISABLE=1: wrong again, suspect a GPU's memory; right now, suspect NVLink.",
)
