"""Thresholds that cannot be meant so: beyond the hardware, of another order than their unit's, or turned round.

And what of a threshold that can be meant so gets past it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.config.expect import declared_unit
from seatrial.config.schema import Config
from seatrial.hardware.bounds import COLLECTIVE, MetricLookup, hardware_bound
from seatrial.hardware.references import MODEL_SEPARATOR, Reference, References, skus
from seatrial.model import Baseline, BasisKind, Outcome, ReferenceValue, Rule, Threshold, UsageError, format_value

LAX_RATIO = 0.4  # of the expected value: a threshold under that hardly tests anything
# Under this share a threshold was written in another unit: MB/s for GB/s is a thousandth, as in a diagnostic suite that
# shipped 2333 MB/s for the memory of an H200. An honest gate of a hundredth is nobody's.
OTHER_UNIT = 0.01
# Two published figures of one shape differ by so much: 345 to 349 GB/s of two H200, 473 to 482 of eight. What asks for
# more than that beyond a known figure fails good hardware.
STRETCH = 1.05
TIME_UNITS = ("s", "ms", "us")
_SIGNED = ("%", "nats", "°C")  # a drift, what a loss lost


def metric_lookup(check: Check, metric: str, key: str) -> MetricLookup:
    """``key``: that of the SKU data; empty where no rule compares the metric with it."""
    bound = next((bound for family, bound in check.bounds.items() if fnmatchcase(metric, family)), "")
    return MetricLookup(key or metric, metric, bound, check.operation if key else "")


def metric_lookups(checks: Mapping[str, Check]) -> dict[str, MetricLookup]:
    """What each key of a baseline is of."""
    rules = ((check, rule) for check in checks.values() for rule in check.rules)
    return {
        rule.reference: metric_lookup(check, rule.metric, rule.reference) for check, rule in rules if rule.reference
    }


def reference_key(metric: str, rules: tuple[Rule, ...]) -> str:
    """The baseline key of a metric: its rule's, or for another size that of the same family. Empty: there is none."""
    family = metric.partition(".")[0]
    for rule in rules:
        if rule.reference and rule.metric == metric:
            return rule.reference
    for rule in rules:
        if rule.reference and rule.reference.endswith(f".{rule.metric}") and rule.metric.startswith(f"{family}."):
            return rule.reference.removesuffix(rule.metric) + metric
    return ""


def threshold_error(
    limit: Threshold, unit: str, figure: MetricLookup, facts: Mapping[str, JsonValue], known: References
) -> str:
    """Why a threshold of a trial cannot be meant so, with the arithmetic; empty where nothing speaks against it."""
    said = f"{limit.op} {format_value(limit.value, unit)}"
    asks_for_more = limit.op in (">", ">=")
    if limit.value < 0 and unit not in _SIGNED:
        return f"{said} holds {'whatever is measured' if asks_for_more else 'for nothing'}: this is never below 0"
    if "/s" in unit and not asks_for_more:
        return f"{said} passes what is slow and fails what is fast: a rate is to be high"
    if unit in TIME_UNITS and asks_for_more:
        return f"{said} passes what is slow and fails what is fast: a time is to be short"
    if "/s" in unit and limit.value == 0 and limit.op == ">=":
        return f"{said} holds whatever is measured: no rate is below 0"
    if not asks_for_more:
        return ""
    most = hardware_bound(figure, facts, known)
    if most and most.unit == unit and limit.value > most.value:
        return f"{said} is above what the hardware can do: {most.derivation}"
    expected = known.site_or_sku_reference(figure.reference_key, facts)
    if not isinstance(expected, Reference) or expected.unit != unit:
        return ""
    share, of = limit.value / expected.value, f"the {format_value(expected.value, unit)} of {expected.label}"
    if OTHER_UNIT <= share <= 1 / OTHER_UNIT:
        return ""
    much = f"1/{1 / max(share, 1e-9):,.0f} of" if share < 1 else f"{share:,.0f} times"
    return f"{said} is {much} {of}: is it meant in another unit?"


def above_reference(
    limit: Threshold, unit: str, figure: MetricLookup, facts: Mapping[str, JsonValue], known: References
) -> str:
    """Why good hardware fails a threshold that its limits do not speak against; empty where none is known to.

    Of trainings nothing is said: their figures depend on settings that a trial may change.
    """
    best = known.site_or_sku_reference(figure.reference_key, facts) if figure.bounded_by else ""
    if limit.op not in (">", ">=") or not isinstance(best, Reference) or best.unit != unit:
        return ""
    if limit.value <= STRETCH * best.value:
        return ""
    asked, good = (format_value(value, unit) for value in (limit.value, best.value))
    return (
        f"{limit.op} {asked} would reject good hardware, which reaches {good} in this shape "
        f"({best.label}: {best.source}); where yours reaches more, learn its baseline (seatrial baseline learn)"
    )


def relative_strictness(limit: Threshold, own: Threshold | None) -> float:
    """What a threshold of a trial asks for, as a share of what the check itself asks of the metric: 1 is all of it.

    0: it passes what the check calls broken, whatever the figure, or asks for the opposite.
    """
    if own is None or (own.unit and limit.unit and own.unit != limit.unit):
        return 1.0
    if own.op == "==":
        others = (0.0, 1.0) if own.unit == "bool" else (own.value + 1, own.value - 1)
        return 0.0 if any(limit.is_met_by(one) for one in others if one != own.value and one >= 0) else 1.0
    if _opposite(limit, own):
        return 0.0
    weaker, stronger = (own.value, limit.value) if own.op in ("<", "<=") else (limit.value, own.value)
    if weaker >= stronger:
        return 1.0
    return max(0.0, weaker / stronger) if stronger > 0 else 0.0


def _opposite(limit: Threshold, own: Threshold) -> bool:
    return "==" not in (limit.op, own.op) and limit.op[0] != own.op[0]


def weakened_rule(limit: Threshold, unit: str, metric: str, rules: Sequence[Rule]) -> str:
    """Why a threshold may not take the place of what the check itself asks: it passes what is broken."""
    rule = next((rule for rule in rules if rule.metric == metric and rule.expect), None)
    if not rule or not rule.expect or rule.outcome_if_violated is not Outcome.FAIL:
        return ""
    own, share = rule.expect, relative_strictness(limit, rule.expect)
    # of what may not be at all, a heat that slows the clocks, say, a trial may allow some: that is marked, not refused
    broken = share == 0 if own.op == "==" else _opposite(limit, own) or 0 < share < OTHER_UNIT
    said = f"{limit.op} {format_value(limit.value, unit)}"
    return f"{said} passes what the check itself fails, which asks for {own}: {rule.meaning}" if broken else ""


def threshold_errors(
    config: Config, checks: Mapping[str, Check], gpu: str, gpus: int, known: References
) -> Iterator[str]:
    """Every threshold of a trial that cannot be meant so, on ``gpus`` GPUs of a model a node; "" is unknown to us."""
    nodes = config.cluster.nodes
    for name, setting in config.checks.items():
        check = checks.get(name)
        for metric, limit in setting.expect.items() if check else ():
            assert check
            figure = metric_lookup(check, metric, reference_key(metric, check.rules))
            unit = declared_unit(metric, check.metrics) or limit.unit
            ranks, width = _shape(check, figure, gpus, nodes)
            facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": width}
            facts |= check.facts_from_options(check.options.model_validate(setting.options))
            wrong = threshold_error(limit, unit, figure, facts, known) or above_reference(
                limit, unit, figure, facts, known
            )
            if wrong := wrong or weakened_rule(limit, unit, metric, check.rules):
                yield f"checks.{name}.expect.{metric}: {wrong}"


def _shape(check: Check, figure: MetricLookup, gpus: int, nodes: int) -> tuple[int, int]:
    """Of how many ranks on how many nodes a figure is, as the checks record it."""
    if figure.bounded_by != COLLECTIVE:
        return 1, 1  # of a device
    if check.per_node:
        return (2 if "pair" in check.required_per.values() else gpus), 1
    return gpus * nodes, nodes


def validate_thresholds(
    config: Config, checks: Mapping[str, Check], gpus: Sequence[str], site: Baseline | None
) -> None:
    """Raises UsageError that shows every threshold, and every value of a site's baseline, that cannot be meant so.

    ``gpus`` are NVML's names of the GPUs of a node, none where they are not known: what their SKU speaks against is
    then found when the trial is judged.
    """
    known = References(site, skus())
    wrong = [*threshold_errors(config, checks, MODEL_SEPARATOR.join(sorted(set(gpus))), len(gpus), known)]
    wrong += baseline_errors(site, known, metric_lookups(checks)) if site else []
    if wrong:
        raise UsageError("; ".join(wrong))


def validate_baseline(site: Baseline, checks: Mapping[str, Check]) -> None:
    """Raises UsageError that shows every value of a baseline that the hardware cannot reach."""
    if wrong := list(baseline_errors(site, References(None, skus()), metric_lookups(checks))):
        raise UsageError("; ".join(wrong))


def baseline_errors(baseline: Baseline, known: References, figures: Mapping[str, MetricLookup]) -> Iterator[str]:
    """Every value of a site's baseline, and every floor, that is above what the hardware can do."""
    for key, values in baseline.expected.items():
        figure = figures.get(key, MetricLookup(key))
        for one in values:
            facts: dict[str, JsonValue] = {"gpu": one.gpu, "world_size": one.gpus, "nodes": one.nodes}
            most = hardware_bound(figure, facts, known)
            asked = max(one.value, one.required or 0)
            if most and most.unit == one.unit and asked > most.value:
                yield f"baseline {baseline.name}: {key} is {format_value(asked, one.unit)}: {most.derivation}"
            yield from (f"baseline {baseline.name}: {key}: {fault}" for fault in _too_lax(one, figure, facts, known))


def _too_lax(
    one: ReferenceValue, figure: MetricLookup, facts: Mapping[str, JsonValue], known: References
) -> Iterator[str]:
    """Why a value of a site cannot be meant so, or would let anything pass."""
    value = format_value(one.value, one.unit)
    if one.required is not None and one.required < LAX_RATIO * one.value:
        floor = format_value(one.required, one.unit)
        yield f"the floor {floor} is {one.required / one.value:.2g} of its {value}: under {LAX_RATIO:g} it tests nothing"
    if one.nodes > 1 and not one.fabric:
        yield f"{value} is of {one.nodes} nodes and says no fabric: over which network?"
    best = _yardstick(figure, one.unit, facts, replace(known, fabric=one.fabric, _cache={}))
    if best and one.value < OTHER_UNIT * best[0]:
        yield f"{value} is 1/{best[0] / one.value:,.0f} of {best[1]}: is it meant in another unit?"


def lax_reference(found: Reference, figure: MetricLookup, facts: Mapping[str, JsonValue], known: References) -> str:
    """Why a site's value tests little: it is far under what its hardware is known to reach. Empty where it is not.

    A floor under the value is what fails, and is weighed in its place.
    """
    if found.kind is not BasisKind.SITE:
        return ""
    best = _yardstick(figure, found.unit, facts, known.without_site)
    share = (found.required or found.value) / best[0] if best else 1.0
    if not best or share >= LAX_RATIO:
        return ""
    return f"{100 * share:.2g}% of {best[1]}: {undetected_slowdown(share)}"


def _yardstick(
    figure: MetricLookup, unit: str, facts: Mapping[str, JsonValue], known: References
) -> tuple[float, str] | None:
    """What the hardware is known to reach, or on one node its limit, and whose figure that is. None: nobody knows."""
    published = known.site_or_sku_reference(figure.reference_key, facts)
    if isinstance(published, Reference):
        reached = published.value, f"the {format_value(published.value, published.unit)} of {published.label}"
        return reached if published.unit == unit else None
    most = (
        hardware_bound(figure, facts, known) if facts.get("nodes") == 1 and figure.bounded_by else None
    )  # no training is near its
    return (most.value, f"what the hardware can do: {most.derivation}") if most and most.unit == unit else None


def undetected_slowdown(share: float) -> str:
    """The slowdown that gets past a threshold at ``share`` of what good hardware reaches."""
    if share <= 0:
        return "any slowdown would pass"
    return f"a {1 / share:,.0f}x slowdown would pass" if share < 0.1 else f"a {1 / share:.2g}x slowdown would pass"
