"""Insights from the measurements of a trial, such as the smallest detectable fault. They change no outcome. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from math import exp
from typing import Any, NamedTuple

from seatrial.checks.check import HOURS_UNDER_LOAD, Checks
from seatrial.config.schema import Config
from seatrial.hardware import links
from seatrial.hardware.links import network_to_busbw_ratio, nvlink_to_busbw_ratio
from seatrial.hardware.references import References, skus
from seatrial.judge import error_counters
from seatrial.judge.insights import algorithms, latency_fit, power, sensitivity
from seatrial.judge.insights.collective import NVLINK, PORT, Collective, build_collective
from seatrial.judge.insights.peaks import achieved_over_peak
from seatrial.model import Baseline, Insight, Measurement, Series, format_bytes, size_label

RARE_FAULTS = "Rare faults"  # title of an insight that the first page of a report shows
_FAULT_PERIODS_H = (1, 10, 100)
_SATURATED = 0.9  # a link that carries at least this share of its achievable bandwidth is a bottleneck
_MAX_FIT_ERROR = 0.15  # with a larger error, the sizes belong to more than one protocol regime


def trial_insights(
    config: Config,
    measurements: Sequence[Measurement],
    checks: Checks,
    site: Baseline | None = None,
) -> tuple[Insight, ...]:
    """The insights on thresholds, collectives and peak performance, then those on error counters."""
    trial_links = links.read(measurements, checks)
    references = References(site, skus(), links=trial_links, tcp=config.cluster.fabric)
    choices = algorithms.read_choices(measurements, checks)
    insights: list[Insight] = [*sensitivity.comparison_insights(measurements, checks, trial_links)]
    insights += sensitivity.per_node_insights(measurements, config, checks, references, trial_links)
    operations = {name: check.operation for name, check in checks.items() if check.operation}
    for measurement in measurements:
        # only one rank of a check records series; they hold the values of all ranks together
        if not measurement.series or measurement.check not in operations:
            continue
        series = {curve.name: curve for curve in measurement.series}
        operation = operations[measurement.check]
        operation_choices = algorithms.select_choices(choices, operation, measurement.facts)
        collective = build_collective(measurement, operation, operation_choices, trial_links, references)
        if collective and {"cuda_graph_busbw", "cuda_graph_latency"} <= set(series):
            insights += _latency(collective, series["cuda_graph_busbw"], series["cuda_graph_latency"])
        if collective and {"busbw", "latency"} <= set(series):
            busbw = series["busbw"]
            insights += _bandwidth_limit(collective, busbw)
            measured = {f"busbw.{size_label(x)}": y for x, y in zip(busbw.x, busbw.y, strict=True)}
            insights += sensitivity.threshold_insights(
                collective, measurement.facts, measured, config, checks, references
            )
    insights += power.sensitivity_insights(measurements, checks, references)
    insights += achieved_over_peak(measurements, checks, references)
    insights += _soak(measurements)
    return (*insights, *error_counters.insights(measurements))


def _soak(measurements: Sequence[Measurement]) -> Iterator[Insight]:
    """Yield the rare faults that a check would have seen in its hours under load: a Poisson process per device."""
    for measurement in measurements:
        hours = measurement.facts.get(HOURS_UNDER_LOAD)
        if measurement.rank or not isinstance(hours, float):
            continue
        device = "GPU" if measurement.facts.get("gpu") else "CPU"
        seen = {str(period): 100 * (1 - exp(-hours / period)) for period in _FAULT_PERIODS_H}
        text = (
            f"a fault that a {device} shows once in N hours under load would have been seen with probability "
            f"{', '.join(f'{percent:.2g} % (N = {period})' for period, percent in seen.items())}: "
            f"1 - exp(-T/N), faults as a Poisson process, T = {hours:.3g} h under load of each {device}"
        )
        yield Insight(check=measurement.check, title=RARE_FAULTS, text=text, values={"hours": hours, "seen": seen})


def _latency(collective: Collective, busbw: Series, latency: Series) -> Iterator[Insight]:
    """Yield latency α and bandwidth β of each regime, from times in a CUDA graph, which cover the smallest sizes."""
    points = []
    for size, us in zip(latency.x, latency.y, strict=True):
        if us > 0:
            choice = collective.choices.get(size_label(size), ())
            points.append(latency_fit.Point(size, us, regime="/".join(filter(None, choice))))
    lines = latency_fit.fit_regimes(points)
    if not lines or len(busbw.x) != len(latency.x):
        return
    # Divided by algbw = size / latency in bytes per us, which is GB/s · 1e3; a latency may be 0
    busbw_over_algbw = busbw.y[-1] * latency.y[-1] * 1e3 / latency.x[-1]
    text = "; ".join(_line_text(line, busbw_over_algbw) for line in lines)
    regimes = [{**asdict(line), "sizes": list(line.sizes)} for line in lines]
    values: dict[str, Any] = {"busbw_over_algbw": busbw_over_algbw, "regimes": regimes}
    yield Insight(check=collective.check, title="latency", text=f"T = α + S/β, in a CUDA graph: {text}", values=values)


def _line_text(line: latency_fit.FittedLine, busbw_over_algbw: float) -> str:
    sizes = f"{format_bytes(line.sizes[0])} to {format_bytes(line.sizes[-1])}"
    regime = f"{line.regime}, {sizes}" if line.regime else sizes
    alpha = f"α {line.alpha_us:.3g} µs" if line.alpha_us else "α too small to measure"
    beta = f"β {line.gbps * busbw_over_algbw:.4g} GB/s busbw" if line.gbps else "time does not grow with size"
    poor_fit = ": more than one protocol regime" if line.max_relative_error > _MAX_FIT_ERROR else ""
    return (
        f"{regime}: {alpha}, {beta}, max fit error {line.max_relative_error:.1%} over {len(line.sizes)} sizes{poor_fit}"
    )


class _LinkLoad(NamedTuple):
    """The load of a link: ``over_busbw`` times the bus bandwidth of the collective."""

    over_busbw: float
    line_rate: float  # GB/s


def _bandwidth_limit(collective: Collective, curve: Series) -> Iterator[Insight]:
    """Yield, for the largest size, each link's load as a share of its line rate, and the link that limits bandwidth."""
    label, busbw = size_label(curve.x[-1]), curve.y[-1]
    loads = _link_loads(collective, label)
    if not loads:
        text = f"{busbw:.4g} GB/s at {label}: limit unknown, no line rate of NVLinks or network ports was read"
        yield Insight(check=collective.check, title="bandwidth limit", text=text, values={"limiter": "unknown"})
        return
    shares = {link: busbw * load.over_busbw / load.line_rate for link, load in loads.items()}
    load_texts = []
    for link, (over_busbw, line_rate) in loads.items():
        load, planned, of_planned = busbw * over_busbw, collective.planned_nvlink_gb_s, ""
        if planned and link == NVLINK:
            of_planned = f", {load / planned:.0%} of NCCL's planned {planned:g} GB/s"
        load_texts.append(f"{link} carries {load:.4g} of {line_rate:.4g} GB/s ({shares[link]:.0%}{of_planned})")
    limiter = _limiter(collective, loads, busbw)
    if limiter == "unknown":
        conclusion = "no link saturated; limited by protocol, GPU or unknown"
    else:
        conclusion = f"limited by {limiter}"
    text = (
        f"{busbw:.4g} GB/s busbw at {label} {collective.algorithm_text(label)}: {'; '.join(load_texts)}; {conclusion}"
    )
    values: dict[str, Any] = {
        "limiter": limiter,
        "shares": shares,
        "algorithm": collective.choices[label].algorithm if label in collective.choices else None,
    }
    yield Insight(check=collective.check, title="bandwidth limit", text=text, values=values)


def _limiter(collective: Collective, loads: Mapping[str, _LinkLoad], busbw: float) -> str:
    """The saturated links; if there is none, the slow transport in NCCL's log; else ``unknown``."""
    saturated = [
        link
        for link, (over_busbw, line_rate) in loads.items()
        if busbw * over_busbw / collective.achievable_gb_s(link, line_rate) >= _SATURATED
    ]
    if saturated:
        return " or ".join(saturated)
    if collective.nodes > 1 and collective.links.network == "tcp":
        return "the network (TCP sockets)"
    return "PCIe and host memory (transport SHM)" if "SHM" in collective.links.intra_node_transports else "unknown"


def _link_loads(collective: Collective, label: str) -> dict[str, _LinkLoad]:
    """The loads of NVLINK and PORT, without links whose line rate or traffic is unknown."""
    known, algorithm = collective.links, collective.algorithm(label)
    operation, ranks, nodes = collective.operation, collective.ranks, collective.nodes
    loads = {}
    if known.nvlink_gb_s and ranks > nodes:
        loads[NVLINK] = _LinkLoad(nvlink_to_busbw_ratio(operation, algorithm, ranks, nodes), known.nvlink_gb_s)
    ratio = network_to_busbw_ratio(operation, algorithm, ranks, nodes) if nodes > 1 else None
    if known.ports and known.network == "rdma" and ratio is not None:
        loads[PORT] = _LinkLoad(ratio / known.ports.count, known.ports.gbps / 8)  # Gb/s → GB/s
    return loads
