"""What the figures say beyond verdicts: time over size, the link that binds, shares of a peak, what a gate can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from operator import attrgetter
from typing import Any

from seatrial.analysis import algorithms as choices
from seatrial.analysis import latency_fit
from seatrial.analysis import sensitivity as gates
from seatrial.analysis.algorithms import size_label
from seatrial.analysis.collective import NVLINK, PORT, Scene
from seatrial.analysis.collective import scene as scene_of
from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.hardware.links import Links, node_share, nvlink_share
from seatrial.hardware.references import Known
from seatrial.judge.peaks import achieved
from seatrial.model import HARDLY, Insight, Measurement, Series, Verdict, format_bytes

_BINDS = 0.9  # of that: under it, something else holds it up
# A line that misses a point by more is not the line of those points
_NO_LINE = 0.15


def insights(
    config: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
    known: Known,
    links: Links,
) -> tuple[Insight, ...]:
    """Every insight of a trial: of collectives in their order, of peaks, then of gates that hardly test anything."""
    chosen = choices.read(measurements, checks)
    gathered: list[Insight] = [*gates.relative(measurements, checks, links)]
    gathered += gates.inside(measurements, config, checks, known, links)
    timing = {name: check for name, check in checks.items() if check.operation}
    for measurement in (one for one in measurements if one.series and one.check in timing):
        series = {one.name: one for one in measurement.series}  # one of thousands of ranks has the curves
        operation = timing[measurement.check].operation
        scene = scene_of(measurement, operation, choices.of(chosen, operation, measurement.facts), links, known)
        if scene and {"device_busbw", "device_latency"} <= set(series):
            gathered += _latency(scene, series["device_busbw"], series["device_latency"])
        if scene and {"busbw", "latency"} <= set(series):
            busbw = series["busbw"]
            gathered += _limiter(scene, busbw)
            reached = {f"busbw.{size_label(x)}": y for x, y in zip(busbw.x, busbw.y, strict=True)}
            gathered += gates.held(scene, measurement.facts, reached, config, checks, known)
    return (*gathered, *achieved(measurements, checks, known), *_weak(verdicts))


def _weak(verdicts: Sequence[Verdict]) -> Iterator[Insight]:
    """Each gate that hardly tests anything, once, however many subjects passed it."""
    lax = {judged_by for judged_by in set(map(attrgetter("judged_by"), verdicts)) if HARDLY in judged_by}
    gates = {(one.check, one.metric): one.judged_by for one in verdicts if one.judged_by in lax} if lax else {}
    for (check, metric), judged_by in gates.items():
        yield Insight(check=check, title=HARDLY, text=f"{metric}, {judged_by.replace(f'; {HARDLY}:', ', is')}")


def _latency(scene: Scene, busbw: Series, latency: Series) -> Iterator[Insight]:
    """Time over size in a CUDA graph, which goes down to the smallest sizes: its line meets the axis at the latency."""
    points = [
        (size, us, "/".join(filter(None, scene.ways.get(size_label(size), ()))))
        for size, us in zip(latency.x, latency.y, strict=True)
        if us > 0
    ]
    lines = latency_fit.regimes(points)
    if not lines or len(busbw.x) != len(latency.x):
        return
    factor = busbw.y[-1] * latency.y[-1] * 1e3 / latency.x[-1]  # busbw over algbw
    text = "; ".join(_line(line, factor) for line in lines)
    regimes = [{**asdict(line), "sizes": list(line.sizes)} for line in lines]
    values: dict[str, Any] = {"busbw_over_algbw": factor, "regimes": regimes}
    yield Insight(check=scene.check, title="latency", text=f"T = α + S/β, in a CUDA graph: {text}", values=values)


def _line(line: latency_fit.Line, factor: float) -> str:
    span = f"{format_bytes(line.sizes[0])} to {format_bytes(line.sizes[-1])}"
    where = f"{line.regime}, {span}" if line.regime else span
    alpha = f"α {line.alpha_us:.3g} µs" if line.alpha_us else "α too small to be seen"
    beta = f"β {line.gbps * factor:.4g} GB/s busbw" if line.gbps else "time does not grow with size"
    bent = ": more than one protocol regime" if line.residual > _NO_LINE else ""
    return f"{where}: {alpha}, {beta}, max fit error {line.residual:.1%} over {len(line.sizes)} sizes{bent}"


def _limiter(scene: Scene, busbw: Series) -> Iterator[Insight]:
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
        if scene.planned and link == NVLINK:
            of_plan = f", {value * share / scene.planned:.0%} of the {scene.planned:g} that NCCL plans with"
        carried.append(f"{link} carries {value * share:.4g} of {rate:.4g} GB/s ({shares[link]:.0%}{of_plan})")
    limiter = _binding(scene, loads, value)
    none = (
        "no known link is near what NCCL reaches on it: the protocol, the GPUs' own pace or something unknown limits it"
    )
    end = f"limited by {limiter}" if limiter != "unknown" else none
    text = f"{value:.4g} GB/s busbw at {label} {scene.by(label)}: {'; '.join(carried)}; {end}"
    values: dict[str, Any] = {
        "limiter": limiter,
        "shares": shares,
        "algorithm": scene.ways[label][0] if label in scene.ways else None,
    }
    yield Insight(check=scene.check, title="binding link", text=text, values=values)


def _binding(scene: Scene, loads: Mapping[str, tuple[float, float]], value: float) -> str:
    """The links that are near what NCCL reaches on them; where none is, the slow path of which NCCL told."""
    of_reach = {name: value * share / scene.reach(name, rate) for name, (share, rate) in loads.items()}
    if near := [name for name, reached in of_reach.items() if reached >= _BINDS]:
        return " or ".join(near)
    if scene.nodes > 1 and scene.links.network == "tcp":
        return "the network (TCP sockets)"
    return "PCIe and host memory (transport SHM)" if "SHM" in scene.links.carriers else "unknown"


def _loads(scene: Scene, label: str) -> dict[str, tuple[float, float]]:
    """Link → what it carries over the bus bandwidth, and its line rate in GB/s."""
    links, algorithm = scene.links, scene.algorithm(label)
    loads = {}
    if links.nvlink_gbps and scene.ranks > scene.nodes:
        loads[NVLINK] = (nvlink_share(scene.operation, algorithm, scene.ranks, scene.nodes), links.nvlink_gbps)
    share = node_share(scene.operation, algorithm, scene.ranks, scene.nodes) if scene.nodes > 1 else None
    if links.ports and links.network == "rdma" and share is not None:
        loads[PORT] = (share / links.ports.count, links.ports.gbps / 8)
    return loads
