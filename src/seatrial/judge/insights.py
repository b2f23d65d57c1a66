"""What the figures say beyond verdicts: time over size, the link that binds, shares of a peak, what a gate can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from operator import attrgetter
from typing import Any

from seatrial.checks.base import Check
from seatrial.judge import chosen as choices
from seatrial.judge import fit, gates
from seatrial.judge.baselines import Known, Reference
from seatrial.judge.chosen import Chosen, Way, size_label
from seatrial.judge.links import HIERARCHICAL, Links, node_share, nvlink_share
from seatrial.judge.lint import key_of
from seatrial.judge.peaks import achieved
from seatrial.model import HARDLY, Insight, Limit, Measurement, Rule, Series, Verdict, format_bytes, format_value
from seatrial.settings import Config

_CHECK = "collectives."
_NVLINK, _PORT = "NVLink of a GPU", "network port"
_POINT_TO_POINT = ("all_to_all", "send_receive")
# What is reached of the line rate where a link is all that holds a transfer up. NVLink: what NCCL plans with on an
# H200, 370.8 of 478.1 GB/s (SKU files say it of others). A port: 384 of 400 Gb/s, oci-hpc's gate on ib_write_bw
_REACHES = {_NVLINK: 0.77, _PORT: 0.96}
_BACK_TO_BACK = ("time over size", "intercept", "intercept_us", "back to back")
_BINDS = 0.9  # of that: under it, something else holds it up
# A line that misses a point by more is not the line of those points
_NO_LINE = 0.15
# A gate that a network at this share of its line rate passes is no test of the network
_HARDLY_NETWORK = 0.7


@dataclass(frozen=True)
class _Scene:
    """One measured collective: what, among how many, over which links."""

    check: str
    operation: str
    ranks: int
    nodes: int
    ways: Mapping[str, Way]  # size label → algorithm and protocol, by NCCL's log
    links: Links
    planned: float | None  # GB/s of a GPU's NVLinks that NCCL plans with; None where nobody knows

    def algorithm(self, label: str) -> str:
        """As NCCL's log names it, else the likeliest: Tree on two nodes (NVIDIA/nccl#812), Ring on one and on many."""
        likeliest = "Tree" if self.nodes == 2 and self.operation == "all_reduce" else "Ring"
        return self.ways[label][0] if label in self.ways else likeliest

    def by(self, label: str) -> str:
        """The way of the data, in words, and whether it is known."""
        if self.operation in _POINT_TO_POINT:
            return "from point to point"
        return f"by {self.algorithm(label)}" + ("" if label in self.ways else " (assumed: no log says which)")


def insights(
    config: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
    known: Known,
    links: Links,
) -> tuple[Insight, ...]:
    """Every insight of a trial: of collectives in their order, of peaks, then of gates that hardly test anything."""
    chosen = choices.read(measurements)
    found: list[Insight] = [*gates.relative(measurements, checks, links)]
    for measurement in (one for one in measurements if one.series):  # one of thousands of ranks has the curves
        series = {one.name: one for one in measurement.series}
        scene = _scene(measurement, chosen, links, known)
        if scene and {"device_busbw", "device_latency"} <= set(series):
            found += _lines(scene, series["device_busbw"], series["device_latency"], graph=True)
        if scene and {"busbw", "latency"} <= set(series):
            busbw = series["busbw"]
            found += _lines(scene, busbw, series["latency"], graph=False)
            found += _limiter(scene, busbw)
            expect = config.checks[scene.check].expect if scene.check in config.checks else {}
            rules = checks[scene.check].rules if scene.check in checks else ()
            for metric, limit in {**dict(_baselines(rules, busbw, measurement, known)), **expect}.items():
                if metric.startswith("busbw.") and limit.op in (">", ">="):
                    best = known.published(key_of(metric, rules), measurement.facts)
                    found += _gate(scene, metric, limit, best, busbw)
    return (*found, *achieved(measurements, known), *_weak(verdicts))


def _baselines(
    rules: Sequence[Rule], busbw: Series, measurement: Measurement, known: Known
) -> Iterator[tuple[str, Limit]]:
    """What rules on known figures ask of the sizes that were measured: under it they fail."""
    measured = {f"busbw.{size_label(size)}" for size in busbw.x}
    for rule in (rule for rule in rules if rule.baseline and rule.metric in measured):
        best = known.published(rule.baseline or "", measurement.facts)
        if isinstance(best, Reference):
            least = best.floor or rule.fail_below * best.value
            yield rule.metric, Limit(op=">=", value=float(f"{least:.4g}"), unit=best.unit)


def _scene(measurement: Measurement, chosen: Chosen, links: Links, known: Known) -> _Scene | None:
    """None for what is not a collective over NCCL."""
    facts, operation = measurement.facts, measurement.check.removeprefix(_CHECK)
    ranks, nodes = facts.get("world_size"), facts.get("nodes")
    if not measurement.check.startswith(_CHECK) or facts.get("backend") != "nccl":
        return None
    if not isinstance(ranks, int) or not isinstance(nodes, int) or ranks < 2:
        return None
    sku = known.sku(str(facts.get("gpu") or ""))
    spec = None if isinstance(sku, str) else sku.spec.get("nvlink_nccl")
    ways = choices.of(chosen, operation, facts)
    return _Scene(measurement.check, operation, ranks, nodes, ways, links, spec.value if spec else None)


def _weak(verdicts: Sequence[Verdict]) -> Iterator[Insight]:
    """Each gate that hardly tests anything, once, however many subjects passed it."""
    lax = {judged_by for judged_by in set(map(attrgetter("judged_by"), verdicts)) if HARDLY in judged_by}
    gates = {(one.check, one.metric): one.judged_by for one in verdicts if one.judged_by in lax} if lax else {}
    for (check, metric), judged_by in gates.items():
        yield Insight(check=check, title=HARDLY, text=f"{metric}, {judged_by.replace(f'; {HARDLY}:', ', is')}")


def _lines(scene: _Scene, busbw: Series, latency: Series, *, graph: bool) -> Iterator[Insight]:
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
    parts = fit.regimes(points)
    text = "; ".join(_told(part, factor, name) for part in parts)
    regimes = [{**asdict(part), "sizes": list(part.sizes)} for part in parts]
    values: dict[str, Any] = {
        "busbw_over_algbw": factor,
        "regimes": [{key if one == "alpha_us" else one: value for one, value in part.items()} for part in regimes],
    }
    yield Insight(check=scene.check, title=title, text=f"T = {name} + S/β, {how}: {text}", values=values)


def _told(part: fit.Line | fit.TooFew, factor: float, name: str) -> str:
    span = f"{format_bytes(part.sizes[0])} to {format_bytes(part.sizes[-1])}"
    where = f"{part.regime}, {span}" if part.regime else span
    if isinstance(part, fit.TooFew):
        return f"{where}: {len(part.sizes)} of the {fit.ENOUGH} sizes that a line needs"
    alpha = f"{name} {part.alpha_us:.3g} µs" if part.alpha_us else f"{name} too small to be seen"
    beta = f"β {part.gbps * factor:.4g} GB/s busbw" if part.gbps else "time does not grow with size"
    off = f"{len(part.sizes)} sizes off it by {part.residual:.1%} at most"
    bent = ": these are not of one regime, and more sizes would tell where it ends" if part.residual > _NO_LINE else ""
    return f"{where}: {alpha}, {beta}, {off}{bent}"


def _limiter(scene: _Scene, busbw: Series) -> Iterator[Insight]:
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
        if scene.planned and link == _NVLINK:
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


def _binding(scene: _Scene, loads: Mapping[str, tuple[float, float]], value: float) -> str:
    """The links that are near what NCCL reaches on them; where none is, the slow path of which NCCL told."""
    of_reach = {name: value * share / _reach(scene, name, rate) for name, (share, rate) in loads.items()}
    if near := [name for name, reached in of_reach.items() if reached >= _BINDS]:
        return " or ".join(near)
    if scene.nodes > 1 and scene.links.network == "tcp":
        return "the network (TCP sockets)"
    return "PCIe and host memory (transport SHM)" if "SHM" in scene.links.carriers else "unknown"


def _reach(scene: _Scene, link: str, rate: float) -> float:
    """GB/s of a link, with this line rate, where it is all that holds a collective up."""
    return scene.planned if scene.planned and link == _NVLINK else _REACHES[link] * rate


def _loads(scene: _Scene, label: str) -> dict[str, tuple[float, float]]:
    """Link → what it carries over the bus bandwidth, and its line rate in GB/s."""
    links, algorithm = scene.links, scene.algorithm(label)
    loads = {}
    if links.nvlink_gbps and scene.ranks > scene.nodes:
        loads[_NVLINK] = (nvlink_share(scene.operation, algorithm, scene.ranks, scene.nodes), links.nvlink_gbps)
    share = node_share(scene.operation, algorithm, scene.ranks, scene.nodes) if scene.nodes > 1 else None
    if links.ports and links.network == "rdma" and share is not None:
        loads[_PORT] = (share / links.ports.count, links.ports.gbps / 8)
    return loads


def _gate(scene: _Scene, metric: str, limit: Limit, known: Reference | str, busbw: Series) -> Iterator[Insight]:
    """The smallest fault that a gate sees: what may be missing while it is passed."""
    label = metric.partition(".")[2]
    reached = dict(zip(map(size_label, busbw.x), busbw.y, strict=True)).get(label)
    best = known.value if isinstance(known, Reference) else reached
    if not best:
        return
    of = f"{known.of}" if isinstance(known, Reference) else "what was measured here"
    share = limit.value / best
    told, values = [f"{share:.0%} of the {format_value(best, 'GB/s')} of {of}"], {"share_of_expected": share}
    if scene.links.nvlinks and scene.links.nvlink_gbps and scene.nodes == 1 and share <= 1:
        # those that are left may carry what passes, also where more of them would not be faster
        needed = limit.value * nvlink_share(scene.operation, scene.algorithm(label), scene.ranks, scene.nodes)
        enough = min(share, needed / _reach(scene, _NVLINK, scene.links.nvlink_gbps))
        missing = int(scene.links.nvlinks * (1 - enough) + 1e-9)
        told.append(f"the least that it sees is {missing + 1} of a GPU's {scene.links.nvlinks} NVLinks down")
        values["nvlinks_missing_unseen"] = missing
    if scene.nodes > 1:
        told.append(_network(scene, label, limit.value, values))
    yield Insight(check=scene.check, title="gate", text=f"{metric} {limit}: {'; '.join(told)}", values=dict(values))


def _network(scene: _Scene, label: str, gate: float, values: dict[str, float]) -> str:
    """What the ports of a node carry at the gate: the slowest of them sets the pace of all."""
    ports, algorithm = scene.links.ports, scene.algorithm(label)
    share = node_share(scene.operation, algorithm, scene.ranks, scene.nodes)
    if not ports or share is None:
        return "what it asks of the network is not known: no ports were discovered on all nodes alike"
    needed = gate * share / ports.count * 8
    values["port_share_needed"] = needed / ports.gbps
    arithmetic = f"{gate:g} GB/s × {share:.3g} ÷ {ports.count} ports = {needed:.0f} of {ports.gbps:g} Gb/s a port"
    how = scene.by(label)
    if needed > ports.gbps:
        return f"{how} more than the network can carry: {arithmetic}"
    lost = f"with every port, or one of them, at {needed / ports.gbps:.0%} of its line rate it is passed"
    advice = "; force NCCL_ALGO=Ring to test the network" if algorithm in HIERARCHICAL else ""
    hardly = "it hardly tests the network: " if needed < _HARDLY_NETWORK * ports.gbps else ""
    return f"{how} {hardly}{arithmetic}; {lost}{advice if hardly else ''}"
