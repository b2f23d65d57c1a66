"""What the figures say beyond verdicts: time over size, the link that binds, shares of a peak, what a gate can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from seatrial.analysis import algorithms as choices
from seatrial.analysis import latency_fit
from seatrial.analysis import sensitivity as gates
from seatrial.analysis.algorithms import size_label
from seatrial.analysis.collective import NVLINK, PORT, Collective
from seatrial.analysis.collective import collective_from as scene_of
from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.hardware.links import Links, network_to_busbw_ratio, nvlink_to_busbw_ratio
from seatrial.hardware.references import References
from seatrial.judge.peaks import achieved_over_peak
from seatrial.model import Insight, Measurement, Series, format_bytes

_BINDS = 0.9  # of that: under it, something else holds it up
# A line that misses a point by more is not the line of those points
_NO_LINE = 0.15


def performance_insights(
    config: Config,
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    known: References,
    links: Links,
) -> tuple[Insight, ...]:
    """Every insight of a trial: of collectives in their order, then of peaks."""
    chosen = choices.read_choices(measurements, checks)
    gathered: list[Insight] = [*gates.comparison_insights(measurements, checks, links)]
    gathered += gates.per_node_insights(measurements, config, checks, known, links)
    timing = {name: check for name, check in checks.items() if check.operation}
    for measurement in (one for one in measurements if one.series and one.check in timing):
        series = {one.name: one for one in measurement.series}  # one of thousands of ranks has the curves
        operation = timing[measurement.check].operation
        scene = scene_of(
            measurement, operation, choices.choices_for(chosen, operation, measurement.facts), links, known
        )
        if scene and {"cuda_graph_busbw", "cuda_graph_latency"} <= set(series):
            gathered += _latency(scene, series["cuda_graph_busbw"], series["cuda_graph_latency"])
        if scene and {"busbw", "latency"} <= set(series):
            busbw = series["busbw"]
            gathered += _limiter(scene, busbw)
            reached = {f"busbw.{size_label(x)}": y for x, y in zip(busbw.x, busbw.y, strict=True)}
            gathered += gates.threshold_insights(scene, measurement.facts, reached, config, checks, known)
    return (*gathered, *achieved_over_peak(measurements, checks, known))


def _latency(scene: Collective, busbw: Series, latency: Series) -> Iterator[Insight]:
    """Time over size in a CUDA graph, which goes down to the smallest sizes: its line meets the axis at the latency."""
    points = [
        (size, us, "/".join(filter(None, scene.choices.get(size_label(size), ()))))
        for size, us in zip(latency.x, latency.y, strict=True)
        if us > 0
    ]
    lines = latency_fit.fit_regimes(points)
    if not lines or len(busbw.x) != len(latency.x):
        return
    factor = busbw.y[-1] * latency.y[-1] * 1e3 / latency.x[-1]  # busbw over algbw
    text = "; ".join(_line(line, factor) for line in lines)
    regimes = [{**asdict(line), "sizes": list(line.sizes)} for line in lines]
    values: dict[str, Any] = {"busbw_over_algbw": factor, "regimes": regimes}
    yield Insight(check=scene.check, title="latency", text=f"T = α + S/β, in a CUDA graph: {text}", values=values)


def _line(line: latency_fit.FittedLine, factor: float) -> str:
    span = f"{format_bytes(line.sizes[0])} to {format_bytes(line.sizes[-1])}"
    where = f"{line.regime}, {span}" if line.regime else span
    alpha = f"α {line.alpha_us:.3g} µs" if line.alpha_us else "α too small to be seen"
    beta = f"β {line.gbps * factor:.4g} GB/s busbw" if line.gbps else "time does not grow with size"
    bent = ": more than one protocol regime" if line.max_relative_error > _NO_LINE else ""
    return f"{where}: {alpha}, {beta}, max fit error {line.max_relative_error:.1%} over {len(line.sizes)} sizes{bent}"


def _limiter(scene: Collective, busbw: Series) -> Iterator[Insight]:
    """What each link carries at the largest size, beside its line rate, and which of them holds it up."""
    label, value = size_label(busbw.x[-1]), busbw.y[-1]
    loads = _loads(scene, label)
    if not loads:
        why = "no line rate of NVLinks or network ports is known"
        text = f"what limits {value:.4g} GB/s at {label} is not known: {why}"
        yield Insight(check=scene.check, title="binding link", text=text, values={"limiter": "unknown"})
        return
    shares = {name: value * share / rate for name, (share, rate) in loads.items()}
    carried = []
    for link, (share, rate) in loads.items():
        of_plan = ""
        if scene.planned_nvlink_gbps and link == NVLINK:
            of_plan = f", {value * share / scene.planned_nvlink_gbps:.0%} of the {scene.planned_nvlink_gbps:g} that NCCL plans with"
        carried.append(f"{link} carries {value * share:.4g} of {rate:.4g} GB/s ({shares[link]:.0%}{of_plan})")
    limiter = _binding(scene, loads, value)
    none = (
        "no known link is near what NCCL reaches on it: the protocol, the GPUs' own pace or something unknown limits it"
    )
    end = f"limited by {limiter}" if limiter != "unknown" else none
    text = f"{value:.4g} GB/s busbw at {label} {scene.algorithm_text(label)}: {'; '.join(carried)}; {end}"
    values: dict[str, Any] = {
        "limiter": limiter,
        "shares": shares,
        "algorithm": scene.choices[label][0] if label in scene.choices else None,
    }
    yield Insight(check=scene.check, title="binding link", text=text, values=values)


def _binding(scene: Collective, loads: Mapping[str, tuple[float, float]], value: float) -> str:
    """The links that are near what NCCL reaches on them; where none is, the slow path of which NCCL told."""
    of_reach = {name: value * share / scene.achievable_gbps(name, rate) for name, (share, rate) in loads.items()}
    if near := [name for name, reached in of_reach.items() if reached >= _BINDS]:
        return " or ".join(near)
    if scene.nodes > 1 and scene.links.network == "tcp":
        return "the network (TCP sockets)"
    return "PCIe and host memory (transport SHM)" if "SHM" in scene.links.intra_node_transports else "unknown"


def _loads(scene: Collective, label: str) -> dict[str, tuple[float, float]]:
    """Link → what it carries over the bus bandwidth, and its line rate in GB/s."""
    links, algorithm = scene.links, scene.algorithm(label)
    loads = {}
    if links.nvlink_gbps and scene.ranks > scene.nodes:
        loads[NVLINK] = (nvlink_to_busbw_ratio(scene.operation, algorithm, scene.ranks, scene.nodes), links.nvlink_gbps)
    share = network_to_busbw_ratio(scene.operation, algorithm, scene.ranks, scene.nodes) if scene.nodes > 1 else None
    if links.ports and links.network == "rdma" and share is not None:
        loads[PORT] = (share / links.ports.count, links.ports.gbps / 8)
    return loads
