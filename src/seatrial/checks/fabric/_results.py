"""Metrics, curves, facts and rules that the collective checks share."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from math import ceil
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING, Any

from pydantic import Field, JsonValue

from seatrial.checks.check import Check, Context, Needs, Options, Seconds
from seatrial.checks.declare import Answers, Value, absent, fact, metric, value
from seatrial.hardware.links import COLLECTIVE
from seatrial.model import CLUSTER, ByteSize, Fact, NotApplicable, Outcome, Phase, Scope, Series, size_label
from seatrial.util.quantiles import median_interval

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult, Timings
    from seatrial.bench.operations import Operation

Results = Mapping[int, "CollectiveResult"]  # requested size in bytes → result

P99_RATIO_SIZE = "1GiB"  # the size whose p99_ratio has a rule
# Suffix of the metrics of the variant that the option in_place=both adds, by whether this variant is in place
VARIANT_SUFFIXES = {True: "_in_place", False: "_out_of_place"}

# Percentile → minimum number of samples. The maximum of n samples exceeds the percentile p (0.95 or 0.99) with 95 %
# confidence if 1 - p^n >= 0.95.
MIN_SAMPLES = {95: 59, 99: 299}
MODE_DESCRIPTIONS = {
    "cuda_graph": "cuda_graph: operations captured in CUDA graphs, so that the host does not launch each one; "
    "NCCL_GRAPH_MIXING_SUPPORT=0 unless the environment sets it (facts set_by_seatrial, backend_environment)",
    "percentiles": "percentiles: each operation timed separately; its time is that of its slowest rank",
}
bandwidth = partial(metric, unit="GB/s", speed=True, bound=COLLECTIVE)  # of NCCL's operations
# A check of the links between the ranks of a job
group_check = partial(
    Check,
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    needs=Needs(min_ranks=2),
    limit_s=600.0,  # gigabytes over a slow network take minutes
)
MAX_DRIFT = 0.02  # a larger drift is reported; two identical runs may differ by up to this value


def several_nodes(context: Context, reason: str) -> dict[str, tuple[int, ...]]:
    """The ranks of each node. Raises NotApplicable on a single node; ``reason``: why it is not measured."""
    from seatrial.bench import subgroups

    ranks_by_node = subgroups.ranks_by_node(context.node)
    if len(ranks_by_node) < 2:
        raise NotApplicable(f"one node: {reason}")
    return ranks_by_node


class GroupOptions(Options):
    """Options of the checks that measure groups of ranks.

    ``size``: bytes of the buffer on each rank; the default depends on the device. ``seconds``: maximum timed duration;
    on a GPU an imprecise median extends this to at most twice.
    """

    size: ByteSize | None = Field(default=None, ge=4, multiple_of=4)  # whole elements of float32
    seconds: Seconds = 1.0


def speed_values(
    size: int,
    result: CollectiveResult,
    quantities: Sequence[str] = ("busbw", "latency", "latency_max"),
    *,
    prefix: str = "",
    suffix: str = "",
    evidence: JsonValue = None,
) -> Iterator[Value]:
    """Yield busbw (GB/s), latency (us, mean over ranks) and latency_max (us, slowest rank) of the median window.

    ``samples`` has one value per window. ``evidence``: of busbw.
    """
    for quantity in quantities:
        windows = result.timings.window_maxima if quantity == "latency_max" else result.timings.window_means
        median_window = _converted(quantity, result, median(windows))
        name = f"{prefix}{quantity}{suffix}.{size_label(size)}"
        yield value(name, median_window, evidence=evidence if quantity == "busbw" else None)._replace(
            samples=tuple(_converted(quantity, result, seconds) for seconds in windows)
        )


def _converted(quantity: str, result: CollectiveResult, seconds: float) -> float:
    """The quantity (GB/s or us) for one time per operation."""
    return result.bus_bandwidth(seconds) if quantity == "busbw" else seconds * 1e6


def percentile_values(size: int, result: CollectiveResult, subjects: Sequence[str]) -> Answers:
    """Yield percentiles (us), p99 ÷ p50 and the coefficient of variation (%) of single operations.

    The time of an operation is that of its slowest rank; the rank that was slowest most often is the evidence.
    ``subjects``: the subject of each rank.
    """
    label, times_us = size_label(size), [seconds * 1e6 for seconds in result.timings.window_maxima]
    slowest_rank, slowest_share = result.timings.most_often_slowest_rank
    slowest = {
        "bytes": result.size,
        "slowest_rank": subjects[slowest_rank],
        "slowest_in_percent_of_samples": 100 * slowest_share,
    }
    yield value(f"p50.{label}", times_us, evidence=slowest)
    for percent, min_samples in MIN_SAMPLES.items():
        names = [f"p{percent}.{label}", *([f"p99_ratio.{label}"] if percent == 99 else [])]
        if len(times_us) < min_samples:
            yield absent(names, f"p{percent} needs {min_samples} operations, {len(times_us)} were timed")
            continue
        index = ceil(len(times_us) * percent / 100) - 1  # at least ``percent`` % of the times are this or shorter
        percentile_us = sorted(times_us)[index]
        for name, measured in zip(names, (percentile_us, percentile_us / median(times_us)), strict=False):
            yield value(name, measured, evidence=slowest)
    yield value(f"cv.{label}", 100 * pstdev(times_us) / fmean(times_us))


def timing_facts(results: Results, subjects: Sequence[str], suffix: str = "") -> Iterator[Fact]:
    """Yield four facts with a value per size: exact bytes, iterations, spread (us) and drift (%)."""
    by_label = {size_label(size): result for size, result in results.items()}
    yield fact(f"sizes{suffix}", {label: result.size for label, result in by_label.items()})
    yield fact(f"iterations{suffix}", {label: iterations(result.timings) for label, result in by_label.items()})
    yield fact(f"spread{suffix}", {label: _spread(result.timings, subjects) for label, result in by_label.items()})
    yield fact(f"drift_percent{suffix}", {label: 100 * result.timings.drift for label, result in by_label.items()})


def size_curves(results: Results, prefix: str = "") -> Iterator[Series]:
    """Yield bus bandwidth (GB/s) and time (us) over size (B); ``prefix``: prefix of the mode's metric names."""
    x = tuple(result.size for result in results.values())
    for name, unit in {"busbw": "GB/s", "latency": "us"}.items():
        y = tuple(_converted(name, result, median(result.timings.window_means)) for result in results.values())
        yield Series(name=f"{prefix}{name}", subject=CLUSTER, x=x, y=y, x_unit="B", y_unit=unit)


def iterations(timings: Timings) -> dict[str, JsonValue]:
    return {"warmup": timings.warmup, "windows": len(timings.windows), "per_window": timings.per_window}


def _spread(timings: Timings, subjects: Sequence[str]) -> dict[str, JsonValue]:
    """Median, its interval, minimum and maximum of the windows' times per operation in us, and the slowest rank.

    The time of a window is the mean over ranks.
    """
    times_us = [seconds * 1e6 for seconds in timings.window_means]
    interval = median_interval(times_us)
    return {
        "p50_us": median(times_us),
        "min_us": min(times_us),
        "max_us": max(times_us),
        "ci95_of_p50_us": list(interval) if interval else None,
        "slowest_rank": subjects[timings.slowest_rank],
        "slowest_rank_us": median(timings.rank_windows(timings.slowest_rank)) * 1e6,
    }


def sizes_not_allocated(not_allocated: Mapping[str, Any], subject: str | None = None) -> Value:
    """The number of sizes whose buffers did not fit; ``not_allocated``: size → ranks and reasons, the evidence."""
    evidence = {"not_allocated": dict(not_allocated)} if not_allocated else None
    return value("sizes_not_allocated", len(not_allocated), subject, evidence=evidence)


def allocation_metric(name: str, option: str) -> metric:
    """The declaration of ``sizes_not_allocated`` of collectives.``name``; ``option``: NAME=VALUE with smaller sizes."""
    return metric(
        "sizes_not_allocated",
        "== 0 sizes",
        "Buffers of these sizes did not fit into memory; these sizes were not measured.",
        "not_allocated in the evidence has sizes, ranks and reasons. Check for other processes that hold memory: "
        "nvidia-smi, or free -h on a machine without GPUs. If the device has less memory, set smaller sizes and a "
        f"threshold for the largest one, for example: --set 'checks.collectives.{name}.options.{option}' "
        f"--set 'checks.collectives.{name}.expect.busbw.1GiB=> 300 GB/s'.",
        outcome=Outcome.ERROR,
    )


def method_text(
    group: Mapping[str, object],
    settings: Mapping[str, object],
    modes: Sequence[str],
    results: Results,
    operation: Operation,
) -> str:
    """Text of the fact ``method``: transport, ranks, timing, confidence interval.

    ``group``: see ``transport_text``. ``results``: of mode back_to_back.
    """
    nodes = f"{settings['nodes']} {'node' if settings['nodes'] == 1 else 'nodes'}"
    parts = [
        f"{transport_text(group)}, {group['world_size']} ranks on {nodes}, "
        f"{'in' if operation.in_place else 'out of'} place, {settings['dtype']}, "
        f"buffers from {settings['buffers']}, called through {settings['api']}"
    ]
    if results:
        fewest_windows = min(len(result.timings.windows) for result in results.values())
        largest_size = max(results)
        parts += [
            f"back_to_back: median of at least {fewest_windows} windows, mean over ranks",
            f"busbw = algbw · {operation.busbw_formula}, as in nccl-tests",
            f"{_interval_text(results[largest_size], largest_size)}{_drift_text(results)}",
        ]
    return "; ".join([*parts, *(MODE_DESCRIPTIONS[mode] for mode in modes if mode in MODE_DESCRIPTIONS)])


def transport_text(group: Mapping[str, object]) -> str:
    """The library that moved the data, and its transports if logged, such as ``NCCL 2.28.9 over P2P/CUMEM``.

    ``group``: the facts of ``collectives.describe_group``, and ``transports`` of ``_nccl_log``.
    """
    if group["backend"] == "nccl":
        transports = group.get("transports")
        names = " + ".join(transports) if isinstance(transports, dict) and transports else "unknown transports (no log)"
        return f"NCCL {group['nccl_version']} over {names}"
    environment = group["backend_environment"]
    interface = environment.get("GLOO_SOCKET_IFNAME") if isinstance(environment, dict) else None
    return f"gloo over {interface or 'its default interface (GLOO_SOCKET_IFNAME is not set)'}"


def _interval_text(result: CollectiveResult, size: int) -> str:
    interval = median_interval(result.busbw)
    if not interval:
        return f"too few windows for a 95 % interval at {size_label(size)}"
    return f"95 % interval of busbw.{size_label(size)}: {interval[0]:.4g} to {interval[1]:.4g} GB/s"


def _drift_text(results: Results) -> str:
    drift_by_size = {size_label(size): result.timings.drift for size, result in results.items()}
    drifts = [f"{100 * drift:+.1f} % at {name}" for name, drift in drift_by_size.items() if abs(drift) > MAX_DRIFT]
    return f"; time drift from the first to the last third of the windows: {', '.join(drifts)}" if drifts else ""
