"""The measurement of one collective operation, such as all_reduce.

Sizes, bandwidths and timing follow nccl-tests, so that published figures of nccl-tests can be compared directly.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, TypeVar

from pydantic import JsonValue

from seatrial.checks.check import Context, facts
from seatrial.checks.declare import Answer, Answers, NoValue, absent, fact, not_requested, value
from seatrial.checks.fabric import _forced_ring, _nccl_log, _results, _wrong_data
from seatrial.checks.fabric._sizes import (
    ELEMENT_SIZES,
    CollectiveOptions,
    default_gpu_sizes,
    mode_sizes,
    omitted_sizes,
)
from seatrial.model import NotApplicable, SeatrialError, format_bytes, parse_bytes, size_label

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult
    from seatrial.bench.data_check import Mismatch
    from seatrial.bench.operations import Operation

T = TypeVar("T")
# Yields the metrics of one mode; returns the results of this mode: size in bytes → result
ModeResults = Generator[Answer, None, dict[int, "CollectiveResult"]]

# By default NCCL uses protocol LL at the first size and Simple at the second.
GPU_DATA_CHECK_SIZES = tuple(map(parse_bytes, ("64KiB", "64MiB")))
CPU_DATA_CHECK_SIZES = (parse_bytes("64KiB"),)

# Between nodes these operations use as many channels per peer as the NCCL variable CHANNELS_PER_PEER sets; one or two
# channels do not saturate fast ports (NVIDIA/nccl-tests#321)
POINT_TO_POINT_OPERATIONS = ("all_to_all", "send_receive")
CHANNELS_PER_PEER = "NCCL_NCHANNELS_PER_NET_PEER"
NET_PEER_CHANNELS = "net_peer_channels"  # evidence with the value of CHANNELS_PER_PEER

NO_CUDA_GRAPH = "gloo runs on the CPU and has no CUDA graphs"


def measure_all_reduce(context: Context, options: CollectiveOptions) -> Answers:
    """Yield the results of the all-reduce, then those with NCCL_ALGO=Ring."""
    yield from measure("all_reduce", context, options)
    yield from _forced_ring.measure(context, options)


def measure(name: str, context: Context, options: CollectiveOptions) -> Answers:
    """Yield the cluster's metrics on rank 0, and on every rank its time per operation at the largest size.

    Raises NotApplicable with fewer than two ranks, or if cuda_graph is the only mode on a CPU. Raises SeatrialError if
    no size fits into memory or the requested buffers are not available.
    """
    if context.world_size < 2:
        raise NotApplicable(f"a collective operation needs at least 2 ranks, got {context.world_size}")
    from seatrial.bench import collectives, rank
    from seatrial.bench.buffers import ALLOCATORS
    from seatrial.bench.operations import OPERATIONS

    is_rank_0, operation, buffers = context.rank == 0, OPERATIONS[name], ALLOCATORS[options.buffers]
    subjects, group_facts = rank.gather(context.subject), collectives.describe_group()
    node_count = len({subject.partition("/")[0] for subject in subjects})
    gpu_sizes = default_gpu_sizes(name, node_count, context.tcp_network)
    modes = _Modes(operation, gpu_sizes, options, context, subjects)
    settings = {"nodes": node_count, "dtype": options.dtype, "in_place": operation.in_place, "buffers": buffers}
    settings["api"] = collectives.describe_api(context.device)
    if is_rank_0:
        yield from facts({**group_facts, **settings, "modes": list(options.modes)})
    for answer in modes.run():
        if is_rank_0:
            yield answer
    # Read after the measurement: NCCL opens connections at first use
    group_facts["transports"] = _nccl_log.connections_by_transport()
    if modes.not_allocated and not modes.data_checks:
        last_tried, reason_by_subject = list(modes.not_allocated.items())[-1]
        subject, reason = next(iter(reason_by_subject.items()))
        raise SeatrialError(
            f"no buffer could be allocated at any size; request a smaller size. {last_tried}: {subject}: {reason}"
        )
    if not modes.data_checks:
        raise NotApplicable(NO_CUDA_GRAPH)
    timed_check_count = len(modes.data_checks)
    modes.check_other_dtypes()
    if modes.back_to_back:
        size = max(modes.back_to_back)
        windows = modes.back_to_back[size].timings.rank_windows(context.rank)
        yield value(f"rank_time.{size_label(size)}", [1e6 * seconds for seconds in windows], context.subject)
    if is_rank_0:
        yield _wrong_data.wrong_data(modes.mismatches())
        if parse_bytes(_results.P99_RATIO_SIZE) not in modes.percentiles:
            yield absent(f"p99_ratio.{_results.P99_RATIO_SIZE}", "no operations of this size were timed one by one")
        yield fact("additional_data_checks", list(modes.data_checks)[timed_check_count:])
        yield _results.sizes_not_allocated(modes.not_allocated)
        yield from modes.not_measured()
        yield fact("transports", group_facts["transports"])
        method = _results.method_text(group_facts, settings, modes.applicable_modes, modes.back_to_back, operation)
        yield fact("method", method)


@dataclass
class _Modes:
    """Measures one operation in the requested modes, and collects the results.

    All ranks call every method; rank 0 reports the observations. ``default_gpu_sizes``: without sizes that the network
    is too slow for. ``subjects``: by rank. ``data_checks``: size as in ``_size_name`` → wrong data by rank.
    ``not_allocated``: size as in ``_size_name`` → subject of a rank → why its buffers could not be allocated.
    ``back_to_back``, ``percentiles``: size in bytes → result.
    """

    operation: Operation
    default_gpu_sizes: Sequence[int]
    options: CollectiveOptions
    context: Context
    subjects: list[str]
    data_checks: dict[str, Mapping[int, Mismatch]] = field(default_factory=dict)
    not_allocated: dict[str, dict[str, str]] = field(default_factory=dict)
    back_to_back: dict[int, CollectiveResult] = field(default_factory=dict)
    percentiles: dict[int, CollectiveResult] = field(default_factory=dict)

    @property
    def applicable_modes(self) -> list[str]:
        """The requested modes that exist on this device."""
        return [mode for mode in self.options.modes if self.context.on_gpu or mode != "cuda_graph"]

    def run(self) -> Answers:
        """Yield the results of all requested modes, in a fixed order."""
        modes = self.options.modes
        if "back_to_back" in modes:
            yield from self.run_back_to_back()
        if "cuda_graph" in modes:
            yield from self.run_cuda_graph()
        if "percentiles" in modes:
            yield from self.run_percentiles()

    def run_back_to_back(self) -> Answers:
        self.back_to_back = yield from self._time_back_to_back(self.operation, "")
        if self.back_to_back:
            yield from _results.size_curves(self.back_to_back)
            yield from _results.timing_facts(self.back_to_back, self.subjects)
        if self.options.in_place == "both":
            yield from self._run_opposite_variant()

    def _run_opposite_variant(self) -> Answers:
        """Measure the other variant: in place if the operation is out of place, and the reverse.

        All ranks take the same branch.
        """
        from seatrial.bench.collectives import supports_out_of_place

        variant = self.operation.opposite_variant()
        if not variant:
            yield absent(f"*{_results.VARIANT_SUFFIXES[True]}.*", "this operation exists out of place only")
        elif not variant.in_place and not supports_out_of_place(self.context.device):
            reason = "torch's process group, used on this device, has this operation in place only"
            yield absent(f"*{_results.VARIANT_SUFFIXES[False]}.*", reason)
        else:
            suffix = _results.VARIANT_SUFFIXES[variant.in_place]
            results = yield from self._time_back_to_back(variant, suffix.replace("_", " ").strip(), suffix)
            yield from _results.timing_facts(results, self.subjects, suffix)

    def _time_back_to_back(self, operation: Operation, label: str, suffix: str = "") -> ModeResults:
        from seatrial.bench.collectives import measure_back_to_back

        min_seconds, max_seconds = self.options.min_seconds_per_size, self.options.seconds_per_size
        time_size = partial(
            measure_back_to_back, operation, seconds=max(min_seconds, max_seconds), min_seconds=min_seconds
        )
        values_of_size = partial(_results.speed_values, suffix=suffix, evidence=self._net_peer_channels())
        return self._each_size("back_to_back", label, time_size, values_of_size)

    def _net_peer_channels(self) -> dict[str, JsonValue] | None:
        """The evidence NET_PEER_CHANNELS of point-to-point operations between nodes."""
        nodes = {subject.partition("/")[0] for subject in self.subjects}
        if self.operation.name not in POINT_TO_POINT_OPERATIONS or len(nodes) == 1:
            return None
        channels = os.environ.get(CHANNELS_PER_PEER)
        setting = f"={channels}" if channels else " is not set: NCCL's default"
        return {NET_PEER_CHANNELS: f"{CHANNELS_PER_PEER}{setting}"}

    def run_cuda_graph(self) -> Answers:
        from seatrial.bench.collectives import measure_cuda_graph

        if not self.context.on_gpu:
            yield absent("cuda_graph_*", NO_CUDA_GRAPH)
            return
        time_size = partial(measure_cuda_graph, self.operation, seconds=self.options.seconds_per_size)
        quantities, prefix = ("latency", "busbw"), "cuda_graph_"
        values_of_size = partial(_results.speed_values, quantities=quantities, prefix=prefix)
        results = yield from self._each_size("cuda_graph", "cuda_graph", time_size, values_of_size)
        if results:
            yield from _results.size_curves(results, prefix)
        counts = {
            size_label(size): {"bytes": result.size, **_results.iterations(result.timings)}
            for size, result in results.items()
        }
        yield fact("cuda_graph", counts)

    def run_percentiles(self) -> Answers:
        from seatrial.bench.collectives import measure_each_operation

        time_size = partial(measure_each_operation, self.operation, seconds=self.options.seconds_per_size)
        values_of_size = partial(_results.percentile_values, subjects=self.subjects)
        self.percentiles = yield from self._each_size("percentiles", "percentiles", time_size, values_of_size)

    def _each_size(
        self,
        mode: str,
        label: str,
        time_size: Callable[..., CollectiveResult],
        values_of_size: Callable[..., Answers],
    ) -> ModeResults:
        """Yield the values of each size of a mode; return the results of the sizes that fit on every rank.

        ``label``: see ``_size_name``. ``time_size`` measures one size; ``values_of_size`` yields its values.
        """
        requested = mode_sizes(mode, self.options, self.default_gpu_sizes, gpu=self.context.on_gpu)
        element_bytes = ELEMENT_SIZES[self.options.dtype]
        sizes = {self.operation.nominal_size(size, element_bytes, self.context.world_size) for size in requested}
        results: dict[int, CollectiveResult] = {}
        for size in sorted(sizes, reverse=True):
            if result := self._run_if_allocated(label, size, partial(time_size, dtype=self.options.dtype)):
                results[size] = result
                self.data_checks[_size_name(label, size)] = result.mismatches
                yield from values_of_size(size, result)
        return dict(sorted(results.items()))

    def check_other_dtypes(self) -> None:
        """Check the data of each dtype that is not timed, since NCCL has separate reduction code for each dtype."""
        from seatrial.bench.collectives import check_data

        other_dtypes = [dtype for dtype in ELEMENT_SIZES if dtype != self.options.dtype]
        sizes = GPU_DATA_CHECK_SIZES if self.context.on_gpu else CPU_DATA_CHECK_SIZES
        for dtype, size in product(other_dtypes, sizes):
            run = partial(check_data, self.operation, dtype=dtype)
            if (mismatches := self._run_if_allocated(dtype, size, run)) is not None:
                self.data_checks[_size_name(dtype, size)] = mismatches

    def _run_if_allocated(self, label: str, size: int, run: Callable[..., T]) -> T | None:
        """The result of ``run``; None if the buffers do not fit on a rank, with the reason in ``not_allocated``."""
        from seatrial.bench.collectives import AllocationError

        self.context.progress(f"{label} {format_bytes(size)}".lstrip())
        try:
            return run(size=size, device=self.context.device, buffers=self.options.buffers)
        except AllocationError as error:
            self.not_allocated[_size_name(label, size)] = {
                self.subjects[rank]: reason for rank, reason in error.reasons.items()
            }
            return None

    def mismatches(self) -> Iterator[_wrong_data.Located]:
        """Yield (location, mismatch) for the wrong data of each rank; a location has size, rank and subject."""
        for size, mismatches in self.data_checks.items():
            for rank, mismatch in mismatches.items():
                yield {"size": size, "rank": rank, "subject": self.subjects[rank]}, mismatch

    def not_measured(self) -> Iterator[NoValue]:
        """Yield the bus bandwidth at each default size that was not measured, and the reason.

        Either the trial's options do not contain the size, or the network is too slow for it. Then the largest default
        size that the network is fast enough for is judged instead.
        """
        name, network, gpu = self.operation.name, self.context.tcp_network, self.context.on_gpu
        gpu_sizes = default_gpu_sizes(name, network.nodes) if network else self.default_gpu_sizes  # even slow ones
        default = mode_sizes("back_to_back", CollectiveOptions(), gpu_sizes, gpu=gpu)
        requested: Sequence[int] = []
        reason = "the trial's options omit mode back_to_back"
        if "back_to_back" in self.options.modes:
            requested = mode_sizes("back_to_back", self.options, self.default_gpu_sizes, gpu=gpu)
            reason = f"the trial's options request only sizes {', '.join(map(size_label, sorted(requested)))}"
        omitted = omitted_sizes(name, self.options, network)
        for size in default:
            busbw = f"busbw.{size_label(size)}"
            if network and size in omitted:
                largest = max(size for size in default if size not in omitted)
                yield absent(busbw, network.too_slow_reason(name, size), instead=f"busbw.{size_label(largest)}")
            elif size not in requested:
                yield not_requested(busbw, reason)


def _size_name(label: str, size: int) -> str:
    """The size as facts name it: ``1MiB``, ``percentiles 4KiB``, ``float16 64KiB``; ``label``: the part before it."""
    return f"{label} {size_label(size)}".lstrip()
