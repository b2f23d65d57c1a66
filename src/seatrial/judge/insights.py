"""What the figures say beyond verdicts: lines fitted to time over size, the link that binds, what each gate can see."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.judge import fit
from seatrial.judge.baselines import Known, Reference
from seatrial.judge.links import HIERARCHICAL, Links, node_share, nvlink_share
from seatrial.judge.lint import key_of
from seatrial.model import (
    HARDLY,
    Insight,
    Limit,
    Measurement,
    Rule,
    Series,
    Verdict,
    format_bytes,
    format_value,
    parse_bytes,
)
from seatrial.settings import Config

_CHECK = "collectives."
_CONTRAST = "collectives.contrast"
_NVLINK = "NVLink of a GPU"
_POINT_TO_POINT = ("all_to_all", "send_receive")
# NCCL reaches 0.77 of the line rate of an H200's NVLinks and 0.94 of an InfiniBand port's: under half, something else
# holds it up
_BINDS = 0.5
# A line that misses a point by more is not the line of those points
_NO_LINE = 0.15
# A gate that a network at this share of its line rate passes is no test of the network
_HARDLY_NETWORK = 0.7


_Chosen = Mapping[str, Mapping[str, tuple[str, str]]]  # operation → size label → algorithm and protocol


# NCCL's log has them in capitals; the variable by which a person forces one, as here
_AS_NCCL_ALGO = {
    "RING": "Ring",
    "TREE": "Tree",
    "NVLS_TREE": "NVLSTree",
    "COLLNET_CHAIN": "CollNetChain",
    "COLLNET_DIRECT": "CollNetDirect",
}


@dataclass(frozen=True)
class _Scene:
    """One measured collective: what, among how many, over which links."""

    check: str
    operation: str
    ranks: int
    nodes: int
    algorithms: Mapping[str, str]  # size label → algorithm
    gpu: str
    links: Links

    def algorithm(self, label: str) -> str:
        """As NCCL's log names it, else the likeliest: Tree on two nodes (NVIDIA/nccl#812), Ring on one and on many."""
        return self.algorithms.get(label) or ("Tree" if self.nodes == 2 and self.operation == "all_reduce" else "Ring")

    def by(self, label: str) -> str:
        """The way of the data, in words, and whether it is known."""
        if self.operation in _POINT_TO_POINT:
            return "from point to point"
        return f"by {self.algorithm(label)}" + ("" if label in self.algorithms else " (assumed: no log says which)")


def insights(
    config: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
    known: Known,
    links: Links,
) -> tuple[Insight, ...]:
    """Every insight of a trial: of collectives in their order, then of gates that hardly test anything."""
    chosen = _algorithms(measurements)
    found: list[Insight] = []
    for measurement in (one for one in measurements if one.series):  # one of thousands of ranks has the curves
        series = {one.name: one for one in measurement.series}
        scene = _scene(measurement, chosen, links) if {"busbw", "latency"} <= set(series) else None
        if scene:
            busbw = series["busbw"]
            found += _lines(scene, busbw, series["latency"], chosen)
            found += _limiter(scene, busbw, known)
            expect = config.checks[scene.check].expect if scene.check in config.checks else {}
            rules = checks[scene.check].rules if scene.check in checks else ()
            for metric, limit in {**_own_gates(rules, measurement.facts, known), **expect}.items():
                if metric.startswith("busbw.") and limit.op in (">", ">="):
                    best = known.published(key_of(metric, rules), measurement.facts)
                    found += _gate(scene, metric, limit, best, busbw)
    return (*found, *_weak(verdicts))


def _own_gates(rules: Sequence[Rule], facts: Mapping[str, JsonValue], known: Known) -> dict[str, Limit]:
    """Under what the rules of a check fail a figure, where it is known what good hardware reaches."""
    found = [(rule, known.published(rule.baseline, facts)) for rule in rules if rule.baseline]
    return {
        rule.metric: Limit(op=">=", value=float(f"{best.floor or rule.fail_below * best.value:.4g}"), unit=best.unit)
        for rule, best in found
        if isinstance(best, Reference)
    }


def _scene(measurement: Measurement, chosen: _Chosen, links: Links) -> _Scene | None:
    """None for what is not a collective over NCCL."""
    facts, operation = measurement.facts, measurement.check.removeprefix(_CHECK)
    ranks, nodes = facts.get("world_size"), facts.get("nodes")
    if not measurement.check.startswith(_CHECK) or facts.get("backend") != "nccl":
        return None
    if not isinstance(ranks, int) or not isinstance(nodes, int) or ranks < 2:
        return None
    names = {label: algorithm for label, (algorithm, _) in chosen.get(operation, {}).items()}
    return _Scene(measurement.check, operation, ranks, nodes, names, str(facts.get("gpu") or ""), links)


def _weak(verdicts: Sequence[Verdict]) -> Iterator[Insight]:
    """Each gate that hardly tests anything, once, however many subjects passed it."""
    gates = {(one.check, one.metric): one.judged_by for one in verdicts if HARDLY in one.judged_by}
    for (check, metric), judged_by in gates.items():
        yield Insight(check=check, title=HARDLY, text=f"{metric}, {judged_by.replace(f'; {HARDLY}:', ', is')}")


def _algorithms(measurements: Sequence[Measurement]) -> _Chosen:
    """Operation → size label → algorithm and protocol, as collectives.contrast has them from NCCL's log.

    Its fact ``path_by_size`` is of all-reduce; that of other operations nobody has looked for.
    """
    told: dict[str, tuple[str, str]] = {}
    for one in (one for one in measurements if one.check == _CONTRAST):
        ways = one.facts.get("path_by_size")
        default = ways.get("default") if isinstance(ways, dict) else None
        for label, way in default.items() if isinstance(default, dict) else ():
            if isinstance(way, dict) and way.get("algorithm") not in (None, "not told"):
                name = str(way["algorithm"])
                told[label] = _AS_NCCL_ALGO.get(name, name), str(way.get("protocol") or "")
    return {"all_reduce": told} if told else {}


def _lines(scene: _Scene, busbw: Series, latency: Series, chosen: _Chosen) -> Iterator[Insight]:
    names = chosen.get(scene.operation, {})
    points = [
        (size, us, "/".join(filter(None, names.get(_label(size), ("",)))))
        for size, us in zip(latency.x, latency.y, strict=True)
        if us > 0
    ]
    if not points or len(busbw.x) != len(latency.x):
        return
    factor = busbw.y[-1] * latency.y[-1] * 1e3 / latency.x[-1]  # busbw over algbw
    parts = fit.regimes(points)
    text = "; ".join(_told(part, factor) for part in parts)
    values: dict[str, Any] = {
        "busbw_over_algbw": factor,
        "regimes": [{**asdict(part), "sizes": list(part.sizes)} for part in parts],
    }
    yield Insight(check=scene.check, title="time over size", text=f"T = α + S/β: {text}", values=values)


def _told(part: fit.Line | fit.TooFew, factor: float) -> str:
    span = f"{format_bytes(part.sizes[0])} to {format_bytes(part.sizes[-1])}"
    where = f"{part.regime}, {span}" if part.regime else span
    if isinstance(part, fit.TooFew):
        return f"{where}: {len(part.sizes)} of the {fit.ENOUGH} sizes that a line needs"
    alpha = f"α {part.alpha_us:.3g} µs" if part.alpha_us else "α too small to be seen"
    beta = f"β {part.gbps * factor:.4g} GB/s busbw" if part.gbps else "time does not grow with size"
    off = f"{len(part.sizes)} sizes off it by {part.residual:.1%} at most"
    bent = ": these are not of one regime, and more sizes would tell where it ends" if part.residual > _NO_LINE else ""
    return f"{where}: {alpha}, {beta}, {off}{bent}"


def _limiter(scene: _Scene, busbw: Series, known: Known) -> Iterator[Insight]:
    """What each link carries at the largest size, beside its line rate, and which of them holds it up."""
    label, value = _label(busbw.x[-1]), busbw.y[-1]
    loads = _loads(scene, label)
    if not loads:
        why = "no line rate of NVLinks or network ports is known"
        text = f"what limits {value:.4g} GB/s at {label} is not known: {why}"
        yield Insight(check=scene.check, title="binding link", text=text, values={"limiter": "unknown"})
        return
    shares = {name: value * share / rate for name, (share, rate) in loads.items()}
    told = []
    for link, (share, rate) in loads.items():
        of_plan = _plan(scene, link, value * share, known)
        told.append(f"{link} carries {value * share:.4g} of {rate:.4g} GB/s ({shares[link]:.0%}{of_plan})")
    limiter = _binding(scene, shares)
    end = f"limited by {limiter}" if limiter != "unknown" else "no known link is near its line rate: limiter unknown"
    text = f"{value:.4g} GB/s busbw at {label} {scene.by(label)}: {'; '.join(told)}; {end}"
    values: dict[str, Any] = {"limiter": limiter, "shares": shares, "algorithm": scene.algorithms.get(label)}
    yield Insight(check=scene.check, title="binding link", text=text, values=values)


def _binding(scene: _Scene, shares: Mapping[str, float]) -> str:
    """The link that is nearest to its line rate; where none is near, the slow path of which NCCL told."""
    nearest = max(shares, key=lambda name: shares[name])
    if shares[nearest] >= _BINDS:
        return nearest
    if scene.nodes > 1 and scene.links.network == "tcp":
        return "the network (TCP sockets)"
    return "PCIe and host memory (transport SHM)" if "SHM" in scene.links.carriers else "unknown"


def _plan(scene: _Scene, link: str, value: float, known: Known) -> str:
    """How much it is of what NCCL itself plans with on these links."""
    sku = known.sku(scene.gpu)
    spec = None if isinstance(sku, str) or link != _NVLINK else sku.spec.get("nvlink_nccl")
    return f", {value / spec.value:.0%} of the {spec.value:g} that NCCL plans with" if spec else ""


def _loads(scene: _Scene, label: str) -> dict[str, tuple[float, float]]:
    """Link → what it carries over the bus bandwidth, and its line rate in GB/s."""
    links, algorithm = scene.links, scene.algorithm(label)
    loads = {}
    if links.nvlink_gbps and scene.ranks > scene.nodes:
        loads[_NVLINK] = (nvlink_share(scene.operation, algorithm, scene.ranks), links.nvlink_gbps)
    share = node_share(scene.operation, algorithm, scene.ranks, scene.nodes) if scene.nodes > 1 else None
    if links.ports and links.network == "rdma" and share is not None:
        loads["network port"] = (share / links.ports.count, links.ports.gbps / 8)
    return loads


def _gate(scene: _Scene, metric: str, limit: Limit, known: Reference | str, busbw: Series) -> Iterator[Insight]:
    """The smallest fault that a gate sees: what may be missing while it is passed."""
    label = metric.partition(".")[2]
    reached = dict(zip(map(_label, busbw.x), busbw.y, strict=True)).get(label)
    best = known.value if isinstance(known, Reference) else reached
    if not best:
        return
    of = f"{known.of}" if isinstance(known, Reference) else "what was measured here"
    share = limit.value / best
    told, values = [f"{share:.0%} of the {format_value(best, 'GB/s')} of {of}"], {"share_of_expected": share}
    if scene.links.nvlinks and scene.nodes == 1 and share <= 1:
        missing = int(scene.links.nvlinks * (1 - share) + 1e-9)
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


def _label(size: float) -> str:
    """As checks.collective names a size in its metrics."""
    short = format_bytes(size)
    return f"{int(size)}B" if "." in short or parse_bytes(short) != int(size) else short
