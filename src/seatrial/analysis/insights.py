"""What the figures say beyond verdicts: time over size, the link that binds, shares of a peak, what a gate can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from seatrial.analysis import algorithms as choices
from seatrial.analysis import latency_fit
from seatrial.analysis import sensitivity as gates
from seatrial.analysis.algorithms import size_label
from seatrial.analysis.collective import CHECK, NVLINK, PORT, Scene
from seatrial.analysis.collective import scene as scene_of
from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.hardware.links import Links, node_share, nvlink_share
from seatrial.hardware.references import Known
from seatrial.judge.peaks import achieved
from seatrial.model import Insight, Measurement, Series, format_bytes

_BACK_TO_BACK = ("time over size", "intercept", "intercept_us", "back to back")
_BINDS = 0.9  # of that: under it, something else holds it up
# A line that misses a point by more is not the line of those points
_NO_LINE = 0.15


def insights(
    config: Config,
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    known: Known,
    links: Links,
) -> tuple[Insight, ...]:
    """Every insight of a trial: of collectives in their order, then of peaks."""
    chosen = choices.read(measurements)
    found: list[Insight] = [*gates.relative(measurements, checks, links)]
    found += gates.inside(measurements, config, checks, known, links)
    for measurement in (one for one in measurements if one.series):  # one of thousands of ranks has the curves
        series = {one.name: one for one in measurement.series}
        operation = measurement.check.removeprefix(CHECK)
        scene = scene_of(measurement, operation, choices.of(chosen, operation, measurement.facts), links, known)
        if scene and {"device_busbw", "device_latency"} <= set(series):
            found += _lines(scene, series["device_busbw"], series["device_latency"], graph=True)
        if scene and {"busbw", "latency"} <= set(series):
            busbw = series["busbw"]
            found += _lines(scene, busbw, series["latency"], graph=False)
            found += _limiter(scene, busbw)
            reached = {f"busbw.{size_label(x)}": y for x, y in zip(busbw.x, busbw.y, strict=True)}
            found += gates.held(scene, measurement.facts, reached, config, checks, known)
        found += gates.scaling(measurement, config)
    return (*found, *achieved(measurements, known))


def _lines(scene: Scene, busbw: Series, latency: Series, *, graph: bool) -> Iterator[Insight]:
    """Time over size as a line: in a CUDA graph, down to the smallest sizes, it meets the axis at the latency.

    Back to back, at large sizes, what it has there is an intercept, and the latency of nothing.
    """
    title, name, key, how = ("latency", "α", "alpha_us", "in a CUDA graph") if graph else _BACK_TO_BACK
    points = [
        (size, us, "/".join(filter(None, scene.ways.get(size_label(size), ()))))
        for size, us in zip(latency.x, latency.y, strict=True)
        if us > 0
    ]
    if not points or len(busbw.x) != len(latency.x):
        return
    factor = busbw.y[-1] * latency.y[-1] * 1e3 / latency.x[-1]  # busbw over algbw
    parts = latency_fit.regimes(points)
    text = "; ".join(_told(part, factor, name) for part in parts)
    regimes = [{**asdict(part), "sizes": list(part.sizes)} for part in parts]
    values: dict[str, Any] = {
        "busbw_over_algbw": factor,
        "regimes": [{key if one == "alpha_us" else one: value for one, value in part.items()} for part in regimes],
    }
    yield Insight(check=scene.check, title=title, text=f"T = {name} + S/β, {how}: {text}", values=values)


def _told(part: latency_fit.Line | latency_fit.TooFew, factor: float, name: str) -> str:
    span = f"{format_bytes(part.sizes[0])} to {format_bytes(part.sizes[-1])}"
    where = f"{part.regime}, {span}" if part.regime else span
    if isinstance(part, latency_fit.TooFew):
        return f"{where}: {len(part.sizes)} of the {latency_fit.ENOUGH} sizes that a line needs"
    alpha = f"{name} {part.alpha_us:.3g} µs" if part.alpha_us else f"{name} too small to be seen"
    beta = f"β {part.gbps * factor:.4g} GB/s busbw" if part.gbps else "time does not grow with size"
    off = f"{len(part.sizes)} sizes off it by {part.residual:.1%} at most"
    bent = ": these are not of one regime, and more sizes would tell where it ends" if part.residual > _NO_LINE else ""
    return f"{where}: {alpha}, {beta}, {off}{bent}"


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
    told = []
    for link, (share, rate) in loads.items():
        of_plan = ""
        if scene.planned and link == NVLINK:
            of_plan = f", {value * share / scene.planned:.0%} of the {scene.planned:g} that NCCL plans with"
        told.append(f"{link} carries {value * share:.4g} of {rate:.4g} GB/s ({shares[link]:.0%}{of_plan})")
    limiter = _binding(scene, loads, value)
    none = (
        "no known link is near what NCCL reaches on it: the protocol, the GPUs' own pace or something unknown limits it"
    )
    end = f"limited by {limiter}" if limiter != "unknown" else none
    text = f"{value:.4g} GB/s busbw at {label} {scene.by(label)}: {'; '.join(told)}; {end}"
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
