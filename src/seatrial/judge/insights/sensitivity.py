"""The smallest fault that each threshold detects: thresholds on bandwidth, and on comparisons of components."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import median
from typing import Any

from seatrial.checks.check import Checks
from seatrial.checks.declare import Comparison
from seatrial.config.schema import Config
from seatrial.hardware.links import HIERARCHICAL_ALGORITHMS, Links, network_to_busbw_ratio, nvlink_to_busbw_ratio
from seatrial.hardware.references import Reference, References
from seatrial.judge.insights.collective import NVLINK, Collective, build_collective
from seatrial.judge.plausibility import LOWER_BOUNDS, reference_key
from seatrial.model import Insight, Measurement, Rule, Threshold, format_value
from seatrial.model.rule import REFERENCE
from seatrial.util.grouping import grouped

# A threshold that needs less than this share of the ports' line rate hardly tests the network
_NETWORK_SHARE_TESTED = 0.7


def comparison_insights(measurements: Sequence[Measurement], checks: Checks, links: Links) -> Iterator[Insight]:
    """Yield the smallest fault that each applicable rule on a comparison detects, once for all nodes."""
    with_comparisons = {
        name: check for name, check in checks.items() if any(each.comparison for each in check.declared)
    }
    insights: dict[tuple[str, str], Insight] = {}
    for measurement in measurements:
        if measurement.check not in with_comparisons or not measurement.metrics:
            continue
        check, names = with_comparisons[measurement.check], {metric.name for metric in measurement.metrics}
        for rule in check.rules:
            declared = check.declaration(rule.metric)
            comparison = declared.comparison if declared else None
            applies = all(measurement.facts.get(fact) == value for fact, value in rule.when.facts.items())
            if comparison and rule.threshold and rule.metric in names and applies:
                shortfall = 1.0 if comparison.is_speedup else 1 - rule.threshold.value
                text = f"{rule.metric} {rule.threshold}: {_detectable(comparison, shortfall, links)}"
                values = {"undetected_shortfall": shortfall}
                insight = Insight(check=measurement.check, title="threshold", text=text, values=values)
                insights.setdefault((measurement.check, text), insight)
    yield from insights.values()


def _detectable(comparison: Comparison, shortfall: float, links: Links) -> str:
    """The smallest fault that a threshold on a comparison detects, and the faults that it does not detect."""
    if comparison.is_speedup:
        return f"detects that {comparison.part} is not in use, but not that it is slow"
    port = ""
    if comparison.inter_node and links.network == "rdma" and links.ports:
        gbps = links.ports.gbps
        port = f" (a port at {(1 - shortfall) * gbps:.0f} of {gbps:g} Gb/s if the others are saturated)"
    return (
        f"smallest detectable fault: {comparison.part} {shortfall:.0%} slower than the others{port}; uniform slowdowns "
        "are not detected"
    )


def threshold_insights(
    collective: Collective,
    facts: Mapping[str, Any],
    measured: Mapping[str, float],
    config: Config,
    checks: Checks,
    references: References,
) -> Iterator[Insight]:
    """Yield the smallest detectable fault of each lower bound on busbw; ``measured``: GB/s by metric."""
    rules = checks[collective.check].rules if collective.check in checks else ()
    thresholds = dict(_rule_thresholds(rules, measured, facts, references))
    if settings := config.checks.get(collective.check):
        for metric, threshold in settings.expect.items():
            by_rule = thresholds.get(metric)
            if by_rule is None or settings.override or threshold.value > by_rule.value:  # the stricter decides
                thresholds[metric] = threshold
    for metric, threshold in thresholds.items():
        if metric.startswith("busbw.") and threshold.op in LOWER_BOUNDS:
            applied = references.applicable(reference_key(metric, rules), facts)
            reference = applied[0] if applied else "no reference value"
            yield from _threshold_insight(collective, metric, threshold, reference, measured.get(metric))


def per_node_insights(
    measurements: Sequence[Measurement],
    config: Config,
    checks: Checks,
    references: References,
    links: Links,
) -> Iterator[Insight]:
    """Yield the insights on checks that measure each node separately, once per GPU model and number of GPUs."""
    names = {name for name, check in checks.items() if check.operation and check.per_node}
    groups = grouped(
        ((each.check, str(each.facts.get("gpu")), str(each.facts.get("world_size"))), each)
        for each in measurements
        if each.check in names and each.metrics
    )
    for (check, gpu, _), node_measurements in groups.items():
        measurement, sku = node_measurements[0], references.sku(gpu)
        # The number of NVLinks of this model. ``links`` has the number of the GPU with the lowest rate in the trial
        model_nvlinks = 0 if isinstance(sku, str) else sku.nvlinks
        node_links = replace(links, nvlinks=model_nvlinks) if links.nvlinks and model_nvlinks else links
        if collective := build_collective(measurement, checks[check].operation, {}, node_links, references):
            metrics = (metric for each in node_measurements for metric in each.metrics)
            values = grouped((each.name, each.value) for each in metrics if each.name.startswith("busbw."))
            medians = {name: median(of_nodes) for name, of_nodes in values.items()}
            yield from threshold_insights(collective, measurement.facts, medians, config, checks, references)


def _rule_thresholds(
    rules: Sequence[Rule], measured: Mapping[str, float], facts: Mapping[str, Any], references: References
) -> Iterator[tuple[str, Threshold]]:
    """Yield (metric, threshold) for each rule with a reference value. Below the threshold the rule FAILs."""
    for rule in rules:
        if not rule.reference or rule.metric not in measured:
            continue
        if applied := references.applicable(rule.reference, facts):
            required = max(reference.required_value(rule.share(REFERENCE) or 0.0) for reference in applied)
            yield rule.metric, Threshold(op=">=", value=float(f"{required:.4g}"), unit=applied[0].unit)


def _threshold_insight(
    collective: Collective, metric: str, threshold: Threshold, reference: Reference | str, measured: float | None
) -> Iterator[Insight]:
    """Yield one insight: the threshold as a share of the expected value, and the smallest detectable fault.

    The expected value is the reference value, else the measured one.
    """
    label = metric.partition(".")[2]
    expected = reference.value if isinstance(reference, Reference) else measured
    if not expected:
        return
    source = f"of {reference.label}" if isinstance(reference, Reference) else "measured in this trial"
    share = threshold.value / expected
    parts = [f"{share:.0%} of the {format_value(expected, 'GB/s')} {source}"]
    values = {"share_of_expected": share}
    if collective.nodes == 1 and share <= 1:
        parts.append(
            f"smallest detectable fault: {_nvlink_fault(collective, label, threshold.value, expected, values)}"
        )
    if collective.nodes > 1:
        parts.append(_port_load_text(collective, label, threshold.value, values))
    text = f"{metric} {threshold}: {'; '.join(parts)}"
    yield Insight(check=collective.check, title="threshold", text=text, values=dict(values))


def _nvlink_fault(
    collective: Collective, label: str, threshold: float, expected: float, values: dict[str, float]
) -> str:
    """The smallest number of inactive NVLinks with which a node fails; if NVLinks are unknown, the smallest slowdown.

    A node passes while its active NVLinks carry the traffic of the threshold, even if NVLink does not limit busbw.
    Adds ``undetected_nvlinks_down`` to ``values``.
    """
    share, links = threshold / expected, collective.links
    if not links.nvlinks or not links.nvlink_gb_s:
        return f"a slowdown of {1 - share:.0%}"
    algorithm = collective.intra_node_algorithm(label, expected)
    required = threshold * nvlink_to_busbw_ratio(collective.operation, algorithm, collective.ranks, collective.nodes)
    sufficient_share = min(share, required / collective.achievable_gb_s(NVLINK, links.nvlink_gb_s))
    undetected = int(links.nvlinks * (1 - sufficient_share) + 1e-9)  # 1e-9: more than the rounding error
    values["undetected_nvlinks_down"] = undetected
    nvls = " (with NVLS)" if algorithm == "NVLS" else ""
    return f"{undetected + 1} of a GPU's {links.nvlinks} NVLinks down{nvls}"


def _port_load_text(collective: Collective, label: str, threshold: float, values: dict[str, float]) -> str:
    """As text: the load of each port of a node when busbw is at the threshold. The slowest port limits busbw.

    Adds ``port_share_needed`` to ``values``.
    """
    ports, algorithm = collective.links.ports, collective.algorithm(label)
    ratio = network_to_busbw_ratio(collective.operation, algorithm, collective.ranks, collective.nodes)
    if ratio is None:
        return f"network load unknown: no model of the traffic of {collective.operation}"
    if not ports:
        return "network load unknown: the nodes do not have the same known RDMA ports"
    required_gbps = threshold * ratio / ports.count * 8  # Gb/s per port
    values["port_share_needed"] = required_gbps / ports.gbps
    derivation = (
        f"{threshold:g} GB/s × {ratio:.3g} ÷ {ports.count} ports = {required_gbps:.0f} of {ports.gbps:g} Gb/s per port"
    )
    algorithm_text = collective.algorithm_text(label)
    if required_gbps > ports.gbps:
        return f"{algorithm_text}: the threshold needs more than the line rate: {derivation}"
    passes_at = f"passes with ports at {required_gbps / ports.gbps:.0%} of their line rate"
    if required_gbps >= _NETWORK_SHARE_TESTED * ports.gbps:
        return f"{algorithm_text}: {derivation}; {passes_at}"
    advice = "; force NCCL_ALGO=Ring to test the network" if algorithm in HIERARCHICAL_ALGORITHMS else ""
    return f"{algorithm_text}, hardly tests the network: {derivation}; {passes_at}{advice}"
