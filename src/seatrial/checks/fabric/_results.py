"""What the checks of collective operations report of what was timed: metrics, curves, facts and a sentence."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from math import ceil
from statistics import fmean, median, pstdev
from typing import TYPE_CHECKING

from pydantic import Field, JsonValue

from seatrial.checks.base import Options, metric
from seatrial.hardware.bounds import COLLECTIVE
from seatrial.model import CLUSTER, ByteSize, Fact, Metric, Observation, Outcome, Rule, Series, format_bytes
from seatrial.util.quantiles import median_interval

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult, Timings
    from seatrial.bench.data_check import Mismatch
    from seatrial.bench.operations import Operation
    from seatrial.bench.pairs import PairResults
    from seatrial.bench.subgroups import GroupResult

Results = Mapping[int, "CollectiveResult"]  # by the size asked for, in bytes

UNITS = {"busbw": "GB/s", "algbw": "GB/s", "latency": "us", "latency_max": "us"}
BANDWIDTH_BOUNDS = {"*busbw*": COLLECTIVE, "algbw*": COLLECTIVE}  # Check.bounds
VARIANT_SUFFIXES = {
    True: "_in_place",
    False: "_out_of_place",
}  # of the names of a second placement's metrics, by ``in_place``

# Fewest samples with which the largest is above the percentile with 95 % certainty: 1 - p^n >= 0.95
MIN_SAMPLES = {50: 1, 95: 59, 99: 299}
MODE_DESCRIPTIONS = {
    "device": "device: in CUDA graphs, where the host starts none of them, with NCCL_GRAPH_MIXING_SUPPORT=0 unless the "
    "environment says otherwise (facts set_by_seatrial, backend_environment)",
    "distribution": "distribution: single operations, each as long as on its slowest rank",
}
MAX_DRIFT = 0.02  # told in words from here on: as much as an A/A repeat may differ by


class GroupOptions(Options):
    """``size``: bytes of the buffer on each rank; by default what suits the device. ``seconds`` cap the timed part."""

    size: ByteSize | None = Field(default=None, ge=4)
    seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def size_label(size: int) -> str:
    """The size as part of a metric's name; plain bytes where the short form would be rounded."""
    short = format_bytes(size)
    return f"{size}B" if "." in short else short


def back_to_back_metrics(
    size: int, result: CollectiveResult, operation: Operation, ending: str = ""
) -> Iterator[Metric]:
    """The figures at the median window, those of all windows as samples; latency_max is that of the slowest rank."""
    return _figures({f"{name}{ending}": name for name in UNITS}, size, result, operation)


def cuda_graph_metrics(size: int, result: CollectiveResult, operation: Operation) -> Iterator[Metric]:
    """Time and bus bandwidth of operations that the device starts by itself."""
    return _figures({"cuda_graph_latency": "latency", "cuda_graph_busbw": "busbw"}, size, result, operation)


def _figures(names: Mapping[str, str], size: int, result: CollectiveResult, operation: Operation) -> Iterator[Metric]:
    """``names``: what a metric is called → its key in UNITS."""
    for name, figure in names.items():
        seconds = result.timings.window_maxima if figure == "latency_max" else result.timings.window_means
        yield Metric(
            name=f"{name}.{size_label(size)}",
            value=_figure(figure, result, median(seconds), operation),
            unit=UNITS[figure],
            subject=CLUSTER,
            samples=tuple(_figure(figure, result, one, operation) for one in seconds),
        )


def _figure(name: str, result: CollectiveResult, seconds: float, operation: Operation) -> float:
    """One time per operation as nccl-tests prints it; see UNITS."""
    if name.startswith("latency"):
        return seconds * 1e6
    algbw = result.size / seconds / 1e9
    return algbw * operation.busbw_factor(result.timings.rank_count) if name == "busbw" else algbw


def percentile_metrics(size: int, result: CollectiveResult) -> Iterator[Metric]:
    """Percentiles and spread of single operations, each as long as it was on its slowest rank."""
    us = [seconds * 1e6 for seconds in result.timings.window_maxima]
    yield metric(f"p50.{size_label(size)}", us, "us")
    for percent, fewest in MIN_SAMPLES.items():
        if percent != 50 and len(us) >= fewest:  # the smallest value that so many percent do not exceed
            yield metric(f"p{percent}.{size_label(size)}", sorted(us)[ceil(len(us) * percent / 100) - 1], "us")
    yield metric(f"cv.{size_label(size)}", 100 * pstdev(us) / fmean(us), "%")


def rank_time_metric(subject: str, size: int, seconds: Sequence[float]) -> Metric:
    """A rank's own time. It shows who differs, not who is at fault: who is slow here is often who waits least."""
    return metric(f"rank_time.{size_label(size)}", [one * 1e6 for one in seconds], "us", subject)


def curves_and_counts(results: Results, subjects: Sequence[str], operation: Operation) -> Iterator[Observation]:
    """What is said of the parity mode over all sizes."""
    yield from size_curves(results, operation)
    yield from count_facts(results, subjects)


def count_facts(results: Results, subjects: Sequence[str], ending: str = "") -> Iterator[Fact]:
    """Exact bytes, iterations, interval and drift of each size."""
    columns: dict[str, Callable[[CollectiveResult], JsonValue]] = {
        "sizes": lambda result: result.size,
        "iterations": lambda result: _iterations(result.timings),
        "spread": lambda result: _spread(result.timings, subjects),
        "drift_percent": lambda result: 100 * result.timings.drift,
    }
    for name, column in columns.items():
        yield Fact(name=f"{name}{ending}", value={size_label(size): column(result) for size, result in results.items()})


def size_curves(results: Results, operation: Operation, prefix: str = "") -> Iterator[Series]:
    """Bus bandwidth and time over size; ``prefix`` is that of the mode's metrics."""
    x = tuple(result.size for result in results.values())
    for name in ("busbw", "latency"):
        y = tuple(_figure(name, one, median(one.timings.window_means), operation) for one in results.values())
        yield Series(name=f"{prefix}{name}", subject=CLUSTER, x=x, y=y, x_unit="B", y_unit=UNITS[name])


def _iterations(timings: Timings) -> dict[str, JsonValue]:
    return {"warmup": timings.warmup, "windows": len(timings.windows), "per_window": timings.per_window}


def _spread(timings: Timings, subjects: Sequence[str]) -> dict[str, JsonValue]:
    """Times per operation in us over the windows (mean over ranks), and the slowest rank beside them."""
    us = [seconds * 1e6 for seconds in timings.window_means]
    interval = median_interval(us)
    return {
        "p50_us": median(us),
        "min_us": min(us),
        "max_us": max(us),
        "ci95_of_p50_us": list(interval) if interval else None,
        "slowest_rank": subjects[timings.slowest_rank],
        "slowest_rank_us": median(timings.rank_windows(timings.slowest_rank)) * 1e6,
    }


def cuda_graph_fact(results: Results) -> Fact:
    """How often each size was timed, in which bytes."""
    counts: dict[str, JsonValue] = {
        size_label(size): {"bytes": result.size, **_iterations(result.timings)} for size, result in results.items()
    }
    return Fact(name="cuda_graph", value=counts)


def percentiles_fact(results: Results, subjects: Sequence[str]) -> Fact:
    """Who was slowest, and how often; and why a percentile is not told."""
    told: dict[str, JsonValue] = {}
    for size, result in results.items():
        count = len(result.timings.windows)
        rank, share = result.timings.most_often_slowest_rank
        left_out: dict[str, JsonValue] = {
            f"p{percent}": f"not told: it takes {fewest} samples, here are {count}"
            for percent, fewest in MIN_SAMPLES.items()
            if count < fewest
        }
        told[size_label(size)] = {
            "bytes": result.size,
            "samples": count,
            "slowest_rank": subjects[rank],
            "slowest_in_percent_of_samples": 100 * share,
            **left_out,
        }
    return Fact(name="distribution", value=told)


def wrong_data_results(
    wrong: Iterable[tuple[Mapping[str, JsonValue], Mismatch]], subject: str = CLUSTER
) -> Iterator[Observation]:
    """How much data was wrong, of all that was moved; ``wrong``: each mismatch behind what says where it was."""
    found = list(wrong)
    yield metric("wrong_elements", sum(mismatch.wrong for _, mismatch in found), "count", subject)
    if found:
        yield Fact(name="wrong_data", value=[{**where, **asdict(mismatch)} for where, mismatch in found])


def group_wrong_data_results(results: Mapping[str, GroupResult], subject: str = CLUSTER) -> Iterator[Observation]:
    """The same of all groups that were measured, by what each is called."""
    every = ((name, found) for name, result in results.items() for found in result.mismatches.items())
    return wrong_data_results((({"group": name, "rank": rank}, mismatch) for name, (rank, mismatch) in every), subject)


def pair_wrong_data_results(figures: PairResults, subject: str = CLUSTER) -> Iterator[Observation]:
    """The same of what one rank sent another: who sent it, who received it."""
    named = figures.subjects
    lines = ((line, line.mismatch) for line in figures.corrupted if line.mismatch)
    return wrong_data_results(
        (({"from": named[line.partner], "to": named[line.rank]}, bad) for line, bad in lines), subject
    )


def wrong_data_rule(fix: str) -> Rule:
    """The rule on ``wrong_elements``; ``fix`` says what the check's fact wrong_data names."""
    return Rule(
        metric="wrong_elements",
        expect="== 0",
        evidence_facts=("wrong_data",),
        meaning="data is corrupted on its way, and every gradient of a training goes this way",
        fix=f"Train nothing on these nodes. {fix}",
    )


def allocation_rule(name: str, option: str) -> Rule:
    """The rule on ``sizes_not_allocated`` of collectives.``name``; ``option`` is one that asks for less than the default."""
    return Rule(
        metric="sizes_not_allocated",
        evidence_facts=("not_allocated",),
        expect="== 0 sizes",
        outcome_if_violated=Outcome.ERROR,
        meaning="These sizes were to be measured and did not fit into memory: nothing is known of them.",
        fix="The fact not_allocated says which size, where, and why. Something else may hold the memory: see "
        "nvidia-smi, or free -h on a machine without GPUs. Where the device is simply smaller, say which sizes count, "
        f"and what the largest has to reach: --set 'checks.collectives.{name}.options.{option}' "
        f"--set 'checks.collectives.{name}.expect.busbw.1GiB=> 300 GB/s'.",
    )


def method_text(
    path: Mapping[str, object],
    facts: Mapping[str, object],
    modes: Sequence[str],
    results: Results,
    operation: Operation,
) -> str:
    """What was measured, over which path, how often and how sure, in a sentence; ``results`` are those of parity."""
    nodes = f"{facts['nodes']} {'node' if facts['nodes'] == 1 else 'nodes'}"
    place = "in" if operation.in_place else "out of"
    said = [
        f"{transport_text(path)}, {path['world_size']} ranks on {nodes}, {place} place, {facts['dtype']}, "
        f"buffers of {facts['buffers']}, called by {facts['called']}"
    ]
    if results:
        windows = [len(result.timings.windows) for result in results.values()]
        count = f"{min(windows)} to {max(windows)}" if len(set(windows)) > 1 else str(windows[0])
        said += [
            f"parity: each figure is the median of {count} windows, each the mean over ranks",
            f"busbw = algbw · {operation.busbw_formula}, as nccl-tests has it",
            f"{_certainty(results[max(results)], max(results), operation)}{_drifts(results)}",
        ]
    return "; ".join([*said, *(MODE_DESCRIPTIONS[mode] for mode in modes if mode in MODE_DESCRIPTIONS)])


def transport_text(path: Mapping[str, object]) -> str:
    """Which library moved the data, and over what as far as its log tells: NCCL chooses by itself."""
    if path["backend"] == "nccl":
        transports = path.get("transports")
        told = " + ".join(transports) if isinstance(transports, dict) and transports else "transports that no log tells"
        return f"NCCL {path['nccl_version']} over {told}"
    environment = path["backend_environment"]
    interface = environment.get("GLOO_SOCKET_IFNAME") if isinstance(environment, dict) else None
    return f"gloo over {interface or 'the interface of its own choice (GLOO_SOCKET_IFNAME is not set)'}"


def _certainty(result: CollectiveResult, size: int, operation: Operation) -> str:
    """The 95 % interval of the bus bandwidth at one size."""
    interval = median_interval(
        [_figure("busbw", result, seconds, operation) for seconds in result.timings.window_means]
    )
    if not interval:
        return f"too few windows for a 95 % interval at {size_label(size)}"
    return f"95 % interval of busbw.{size_label(size)}: {interval[0]:.4g} to {interval[1]:.4g} GB/s"


def _drifts(results: Results) -> str:
    drifting = {size_label(size): result.timings.drift for size, result in results.items()}
    told = [f"{100 * drift:+.1f} % at {name}" for name, drift in drifting.items() if abs(drift) > MAX_DRIFT]
    return f"; times drifted from the first third of the windows to the last: {', '.join(told)}" if told else ""
