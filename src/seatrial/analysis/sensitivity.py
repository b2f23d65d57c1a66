"""The smallest fault that each gate sees: a figure held to what is known or asked for, or parts held to each other."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from seatrial.analysis.collective import NVLINK, Collective, collective_from
from seatrial.checks.base import Check, Comparison
from seatrial.config.schema import Config
from seatrial.hardware.links import HIERARCHICAL_ALGORITHMS, Links, network_to_busbw_ratio, nvlink_to_busbw_ratio
from seatrial.hardware.references import Reference, References
from seatrial.judge.plausibility import reference_key
from seatrial.model import Insight, Measurement, Rule, Threshold, format_value

# A gate that a network at this share of its line rate passes is no test of the network
_HARDLY_NETWORK = 0.7
_LEAST = (">", ">=")


def comparison_insights(
    measurements: Sequence[Measurement], checks: Mapping[str, Check], links: Links
) -> Iterator[Insight]:
    """One for each such rule that applied, however many nodes it applied to: what may be missing while it is passed."""
    watched = {name: check for name, check in checks.items() if check.comparisons}
    found: dict[tuple[str, str], Insight] = {}
    for one in (one for one in measurements if one.check in watched and one.metrics):
        check, names = watched[one.check], {metric.name for metric in one.metrics}
        for rule in check.rules:
            comparison = check.comparisons.get(rule.metric)
            applies = all(one.facts.get(fact) == value for fact, value in rule.applies_if.items())
            if comparison and rule.expect and rule.metric in names and applies:
                missing = 1.0 if comparison.is_speedup else 1 - rule.expect.value
                text = f"{rule.metric} {rule.expect}: {_detectable(comparison, missing, links)}"
                insight = Insight(check=one.check, title="gate", text=text, values={"undetected_shortfall": missing})
                found.setdefault((one.check, text), insight)
    yield from found.values()


def _detectable(comparison: Comparison, missing: float, links: Links) -> str:
    """The smallest fault that a threshold on a comparison detects, and what it does not."""
    if comparison.is_speedup:
        return f"it sees {comparison.part} missing, not slow"
    port = ""
    if comparison.inter_node and links.network == "rdma" and links.ports:
        gbps = links.ports.gbps
        port = f", one at {(1 - missing) * gbps:.0f} of {gbps:g} Gb/s where the others fill theirs"
    return (
        f"the least that it sees is {comparison.part} {missing:.0%} slower than the others{port}; it does not see what "
        "slows all of them alike"
    )


def threshold_insights(
    scene: Collective,
    facts: Mapping[str, Any],
    reached: Mapping[str, float],
    config: Config,
    checks: Mapping[str, Check],
    known: References,
) -> Iterator[Insight]:
    """Of each threshold, a rule's or the trial's, on a busbw that was measured; ``reached``: GB/s by metric."""
    rules = checks[scene.check].rules if scene.check in checks else ()
    asked = config.checks[scene.check].expect if scene.check in config.checks else {}
    limits = {**dict(_baselines(rules, reached, facts, known)), **asked}
    for metric, limit in limits.items():
        if metric.startswith("busbw.") and limit.op in _LEAST:
            best = known.site_or_sku_reference(reference_key(metric, rules), facts)
            yield from _gate(scene, metric, limit, best, reached.get(metric))


def per_node_insights(
    measurements: Sequence[Measurement], config: Config, checks: Mapping[str, Check], known: References, links: Links
) -> Iterator[Insight]:
    """Of what is measured in each node by itself: once for each model of GPU and number of them, not for each node."""
    alike: dict[tuple[str, ...], list[Measurement]] = {}
    names = {name for name, check in checks.items() if check.operation and check.per_node}
    for one in (one for one in measurements if one.check in names and one.metrics):
        alike.setdefault((one.check, str(one.facts.get("gpu")), str(one.facts.get("world_size"))), []).append(one)
    for (check, gpu, _), nodes in alike.items():
        facts, sku = nodes[0].facts, known.sku(gpu)
        whole = 0 if isinstance(sku, str) else sku.nvlinks  # of the model, also where a GPU of another has fewer
        own = replace(links, nvlinks=whole) if links.nvlinks and whole else links
        if found := collective_from(nodes[0], checks[check].operation, {}, own, known):
            yield from threshold_insights(found, facts, _medians(nodes), config, checks, known)


def _medians(nodes: Sequence[Measurement]) -> dict[str, float]:
    values: dict[str, list[float]] = {}
    for metric in (metric for node in nodes for metric in node.metrics if metric.name.startswith("busbw.")):
        values.setdefault(metric.name, []).append(metric.value)
    return {name: median(own) for name, own in values.items()}


def _baselines(
    rules: Sequence[Rule], reached: Mapping[str, float], facts: Mapping[str, Any], known: References
) -> Iterator[tuple[str, Threshold]]:
    """What rules on known figures ask of what was measured: under it they fail."""
    for rule in (rule for rule in rules if rule.reference and rule.metric in reached):
        best = known.site_or_sku_reference(rule.reference or "", facts)
        if isinstance(best, Reference):
            least = best.required or rule.fail_below * best.value
            yield rule.metric, Threshold(op=">=", value=float(f"{least:.4g}"), unit=best.unit)


def _gate(
    scene: Collective, metric: str, limit: Threshold, known: Reference | str, reached: float | None
) -> Iterator[Insight]:
    """The smallest fault that a gate sees: what may be missing while it is passed."""
    label = metric.partition(".")[2]
    best = known.value if isinstance(known, Reference) else reached
    if not best:
        return
    of = f"{known.label}" if isinstance(known, Reference) else "what was measured here"
    share = limit.value / best
    parts, values = [f"{share:.0%} of the {format_value(best, 'GB/s')} of {of}"], {"share_of_expected": share}
    if scene.nodes == 1 and share <= 1:
        parts.append(f"the least that it sees is {_links(scene, label, limit.value, best, values)}")
    if scene.nodes > 1:
        parts.append(_network(scene, label, limit.value, values))
    yield Insight(check=scene.check, title="gate", text=f"{metric} {limit}: {'; '.join(parts)}", values=dict(values))


def _links(scene: Collective, label: str, gate: float, best: float, values: dict[str, float]) -> str:
    """How many NVLinks may be down while a node passes: those that are left may carry what passes, also where more of
    them would not be faster. Where no NVLinks are known, what share may be missing.
    """
    share, links = gate / best, scene.links
    if not links.nvlinks or not links.nvlink_gbps:
        return f"{1 - share:.0%} missing"
    algorithm = scene.intra_node_algorithm(label, best)
    needed = gate * nvlink_to_busbw_ratio(scene.operation, algorithm, scene.ranks, scene.nodes)
    enough = min(share, needed / scene.achievable_gbps(NVLINK, links.nvlink_gbps))
    missing = int(links.nvlinks * (1 - enough) + 1e-9)
    values["undetected_nvlinks_down"] = missing
    summed = " where the switches sum" if algorithm == "NVLS" else ""
    return f"{missing + 1} of a GPU's {links.nvlinks} NVLinks down{summed}"


def _network(scene: Collective, label: str, gate: float, values: dict[str, float]) -> str:
    """What the ports of a node carry at the gate: the slowest of them sets the pace of all."""
    ports, algorithm = scene.links.ports, scene.algorithm(label)
    share = network_to_busbw_ratio(scene.operation, algorithm, scene.ranks, scene.nodes)
    if not ports or share is None:
        return "what it asks of the network is not known: no ports were discovered on all nodes alike"
    needed = gate * share / ports.count * 8
    values["port_share_needed"] = needed / ports.gbps
    arithmetic = f"{gate:g} GB/s × {share:.3g} ÷ {ports.count} ports = {needed:.0f} of {ports.gbps:g} Gb/s a port"
    how = scene.algorithm_text(label)
    if needed > ports.gbps:
        return f"{how} more than the network can carry: {arithmetic}"
    lost = f"with every port, or one of them, at {needed / ports.gbps:.0%} of its line rate it is passed"
    advice = "; force NCCL_ALGO=Ring to test the network" if algorithm in HIERARCHICAL_ALGORITHMS else ""
    hardly = "it hardly tests the network: " if needed < _HARDLY_NETWORK * ports.gbps else ""
    return f"{how} {hardly}{arithmetic}; {lost}{advice if hardly else ''}"
