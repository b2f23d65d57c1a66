"""Validation of thresholds and baseline values, and the detection of lax ones.

A threshold is rejected, for example, if it exceeds the hardware limit, has a wrong unit or a wrong comparison operator.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from seatrial.checks.check import Check, Checks
from seatrial.config.expect import declared_unit
from seatrial.config.schema import Config
from seatrial.hardware.bounds import MetricLookup, hardware_bound
from seatrial.hardware.links import COLLECTIVE, Links
from seatrial.hardware.references import MODEL_SEPARATOR, REFERENCE_TOLERANCE, Reference, References, skus
from seatrial.judge import site_baseline
from seatrial.judge.groups import Facts
from seatrial.model import (
    Baseline,
    BasisKind,
    Metric,
    Outcome,
    ReferenceValue,
    Rule,
    Threshold,
    UsageError,
    format_value,
)
from seatrial.model.benchmark import Bound

LAX_RATIO = 0.4  # a threshold below this share of the expected value is lax
# If threshold / expected value is below this ratio or above its inverse, the threshold is probably in another unit,
# like the 2333 MB/s that a diagnostic suite shipped for the memory of an H200.
_UNIT_ERROR_RATIO = 0.01
TIME_UNITS = ("s", "ms", "us")
_SIGNED_UNITS = ("%", "nats", "°C")  # metrics in these units may be negative, such as a drift
LOWER_BOUNDS = (">", ">=")


def metric_lookup(check: Check, metric: str, key: str) -> MetricLookup:
    """Where to find the reference value and the bound of ``metric``; ``key``: its key in the SKU data, or empty."""
    declared = check.declaration(metric)
    bound = declared.bound if declared else ""
    return MetricLookup(key or metric, metric, bound, check.operation if key else "")


def metric_lookups(checks: Checks) -> dict[str, MetricLookup]:
    """Reference key → how to find its reference value and bound, for all rules of ``checks``."""
    rules = ((check, rule) for check in checks.values() for rule in check.rules)
    return {
        rule.reference: metric_lookup(check, rule.metric, rule.reference) for check, rule in rules if rule.reference
    }


def reference_key(metric: str, rules: tuple[Rule, ...]) -> str:
    """The reference key of ``metric``: from its rule, or derived from a rule on another size; empty without one."""
    family = metric.partition(".")[0]
    for rule in rules:
        if rule.reference and rule.metric == metric:
            return rule.reference
    for rule in rules:
        if rule.reference and rule.reference.endswith(f".{rule.metric}") and rule.metric.startswith(f"{family}."):
            return rule.reference.removesuffix(rule.metric) + metric
    return ""


def threshold_error(threshold: Threshold, unit: str, lookup: MetricLookup, facts: Facts, references: References) -> str:
    """Why a threshold of a trial is invalid, with the derivation; empty if it is valid."""
    text, is_lower_bound = _text(threshold, unit), threshold.op in LOWER_BOUNDS
    if threshold.value < 0 and unit not in _SIGNED_UNITS:
        return f"{text} is {'always' if is_lower_bound else 'never'} true: the metric is never negative"
    if "/s" in unit and not is_lower_bound:
        return f"{text}: a rate needs a lower bound, use > or >="
    if unit in TIME_UNITS and is_lower_bound:
        return f"{text}: a duration needs an upper bound, use < or <="
    if "/s" in unit and threshold.value == 0 and threshold.op == ">=":
        return f"{text} is always true: a rate is never negative"
    if not is_lower_bound:
        return ""
    bound = bound_in_unit(lookup, unit, facts, references)
    if bound and threshold.value > bound.value:
        return f"{text} is above the hardware limit: {bound.derivation}"
    reference = reference_in_unit(lookup, unit, facts, references)
    ratio = threshold.value / reference.value if reference else 1.0
    if reference is None or _UNIT_ERROR_RATIO <= ratio <= 1 / _UNIT_ERROR_RATIO:
        return ""
    ratio_text = f"1/{1 / max(ratio, 1e-9):,.0f} of" if ratio < 1 else f"{ratio:,.0f} times"
    return f"{text} is {ratio_text} {reference_text(reference)}: check the unit"


def above_reference(threshold: Threshold, unit: str, lookup: MetricLookup, facts: Facts, references: References) -> str:
    """Why a threshold is too high for good hardware; empty if it is not, or without a reference value.

    Training metrics are exempt, since they depend on settings that a trial may change.
    """
    applied = references.applicable(lookup.reference_key, facts) if lookup.bounded_by else ()
    applied = tuple(reference for reference in applied if reference.kind is not BasisKind.FABRIC_MODEL)
    if threshold.op not in LOWER_BOUNDS or not applied or applied[0].unit != unit:
        return ""
    reference = max(applied, key=lambda reference: reference.value)
    if threshold.value <= REFERENCE_TOLERANCE * reference.value:
        return ""
    return (
        f"{_text(threshold, unit)} would reject good hardware: {reference_text(reference)} ({reference.source}) is "
        "lower; if your hardware reaches more, learn a baseline: seatrial baseline learn"
    )


def _text(threshold: Threshold, unit: str) -> str:
    return f"{threshold.op} {format_value(threshold.value, unit)}"


def bound_in_unit(lookup: MetricLookup, unit: str, facts: Facts, references: References) -> Bound | None:
    """The hardware limit in ``unit``, if known."""
    bound = hardware_bound(lookup, facts, references)
    return bound if bound and bound.unit == unit else None


def reference_in_unit(lookup: MetricLookup, unit: str, facts: Facts, references: References) -> Reference | None:
    """The reference value in ``unit``, if known."""
    reference = references.site_or_sku_reference(lookup.reference_key, facts)
    return reference if isinstance(reference, Reference) and reference.unit == unit else None


def reference_text(reference: Reference) -> str:
    """The value and origin of a reference, such as ``the 400 GB/s of SKU NVIDIA H200``."""
    preposition = "" if reference.kind is BasisKind.FABRIC_MODEL else "of "
    return f"the {format_value(reference.value, reference.unit)} {preposition}{reference.label}"


def relative_strictness(threshold: Threshold, check_threshold: Threshold | None) -> float:
    """The strictness of a trial's threshold relative to the check's own threshold: 0 to 1.

    1: at least as strict, or not comparable. 0: the threshold passes values that the check always fails, or compares in
    the opposite direction. Between them: the ratio of both values.
    """
    if check_threshold is None or (check_threshold.unit and threshold.unit and check_threshold.unit != threshold.unit):
        return 1.0
    required = check_threshold.value
    if check_threshold.op == "==":
        values = (0.0, 1.0) if check_threshold.unit == "bool" else (required + 1, required - 1)
        bad_values = [value for value in values if value != required and value >= 0]
        return 0.0 if any(threshold.is_met_by(value) for value in bad_values) else 1.0
    if _opposite_comparison(threshold, check_threshold):
        return 0.0
    if check_threshold.op in ("<", "<="):
        numerator, denominator = required, threshold.value
    else:
        numerator, denominator = threshold.value, required
    if numerator >= denominator:
        return 1.0
    return max(0.0, numerator / denominator) if denominator > 0 else 0.0


def _opposite_comparison(a: Threshold, b: Threshold) -> bool:
    return "==" not in (a.op, b.op) and a.op[0] != b.op[0]


def contradicted_rule(threshold: Threshold, unit: str, metric: str, rules: Sequence[Rule]) -> str:
    """Why a trial's threshold contradicts the check's own threshold on the metric; empty if some value meets both."""
    required = next((rule.threshold for rule in rules if rule.metric == metric and rule.threshold), None)
    if required is None or not threshold.excludes(required):
        return ""
    text = f"no value meets both {_text(threshold, unit)} and the check's own {required}"
    return f"{text}; override: true replaces the check's rule"


def weakened_rule(threshold: Threshold, unit: str, metric: str, rules: Sequence[Rule]) -> str:
    """Why a trial's threshold must not override the check's own: it would pass broken hardware; else empty."""
    rule = next((rule for rule in rules if rule.metric == metric and rule.threshold), None)
    if not rule or not (required := rule.threshold) or required.outcome is not Outcome.FAIL:
        return ""
    strictness = relative_strictness(threshold, required)
    # A trial may allow more than 0 of what should be 0, such as thermal throttling: the threshold is lax, but valid
    if required.op == "==":
        passes_broken = strictness == 0
    else:
        passes_broken = _opposite_comparison(threshold, required) or 0 < strictness < _UNIT_ERROR_RATIO
    text = f"passes values that the check fails (the check requires {required}): {rule.meaning}"
    return f"{_text(threshold, unit)} {text}" if passes_broken else ""


def threshold_errors(config: Config, checks: Checks, gpu: str, gpus: int, references: References) -> Iterator[str]:
    """The invalid thresholds of a trial on nodes with ``gpus`` GPUs of model ``gpu``; an empty model is unknown."""
    for name, settings in config.checks.items():
        if (check := checks.get(name)) is None:
            continue
        for metric, threshold in settings.expect.items():
            lookup = metric_lookup(check, metric, reference_key(metric, check.rules))
            unit = declared_unit(metric, check.units) or threshold.unit
            communicator_nodes = 1 if check.per_node else config.cluster.nodes
            ranks, nodes = metric_shape(check, lookup, gpus * communicator_nodes, communicator_nodes)
            facts: dict[str, JsonValue] = {"gpu": gpu, "world_size": ranks, "nodes": nodes}
            facts |= check.facts_from_options(check.options.model_validate(settings.options))
            error = (
                threshold_error(threshold, unit, lookup, facts, references)
                or above_reference(threshold, unit, lookup, facts, references)
                or (weakened_rule if settings.override else contradicted_rule)(threshold, unit, metric, check.rules)
            )
            if error:
                yield f"checks.{name}.expect.{metric}: {error}"


def metric_shape(check: Check, lookup: MetricLookup, ranks: int, nodes: int) -> tuple[int, int]:
    """The number of ranks and nodes that a metric refers to, as checks record them.

    ``ranks`` and ``nodes`` are those of the communicator, which with ``per_node`` has the ranks of one node.
    """
    if lookup.bounded_by != COLLECTIVE:
        return 1, 1  # a metric of one device
    return (2 if any(each.per == "pair" for each in check.declared) else ranks), nodes


def validate_thresholds(config: Config, checks: Checks, gpus: Sequence[str], site: Baseline | None) -> None:
    """Raises UsageError with all invalid thresholds of a trial and all invalid values of the site's baseline.

    ``gpus`` are the NVML names of the GPUs of a node. If it is empty, thresholds are not compared with SKU data here,
    but when the trial is evaluated.
    """
    references = References(site, skus())
    errors = [error] if site and (error := site_baseline.gpu_model_error(site, gpus)) else []
    errors += [*threshold_errors(config, checks, MODEL_SEPARATOR.join(sorted(set(gpus))), len(gpus), references)]
    errors += baseline_errors(site, references, metric_lookups(checks)) if site else []
    if errors:
        raise UsageError("; ".join(errors))


def validate_baseline(site: Baseline, checks: Checks) -> None:
    """Raises UsageError with all invalid values of a baseline."""
    if errors := list(baseline_errors(site, References(None, skus()), metric_lookups(checks))):
        raise UsageError("; ".join(errors))


def baseline_errors(baseline: Baseline, references: References, lookups: Mapping[str, MetricLookup]) -> Iterator[str]:
    """The values of a site's baseline that are above the hardware limit, lax, or without a network class."""
    for key, values in baseline.expected.items():
        lookup = lookups.get(key, MetricLookup(key))
        for value in values:
            errors = _value_errors(value, lookup, references)
            yield from (f"baseline {baseline.name}: {key}: {error}" for error in errors)


def _value_errors(value: ReferenceValue, lookup: MetricLookup, references: References) -> Iterator[str]:
    """Why a value of a site's baseline is impossible, too lax, in a wrong unit, or without a network class."""
    facts: dict[str, JsonValue] = {"gpu": value.gpu, "world_size": value.gpus, "nodes": value.nodes}
    text, highest = format_value(value.value, value.unit), max(value.value, value.required or 0)
    bound = bound_in_unit(lookup, value.unit, facts, references)
    if bound and highest > bound.value:
        yield f"{format_value(highest, value.unit)} is above the hardware limit: {bound.derivation}"
    if value.required is not None and value.required < LAX_RATIO * value.value:
        required, ratio = format_value(value.required, value.unit), value.required / value.value
        yield f"required {required} is {ratio:.2g} of the value {text}; expected at least {LAX_RATIO:g}"
    if value.nodes > 1 and not value.fabric:
        yield f"{text} is for {value.nodes} nodes, but fabric is missing: set a network class such as roce-8x400"
    expected = _expected_value(lookup, value.unit, facts, replace(references, links=Links.of_fabric(value.fabric)))
    if expected and value.value < _UNIT_ERROR_RATIO * expected[0]:
        yield f"{text} is 1/{expected[0] / value.value:,.0f} of {expected[1]}: check the unit"


def lax_reference(reference: Reference, lookup: MetricLookup, facts: Facts, references: References) -> str:
    """Why a site's reference value is lax: far below the expected value for its hardware; empty if it is not.

    If the reference has a ``required`` value, this value is compared instead, since lower values FAIL.
    """
    if reference.kind is not BasisKind.SITE:
        return ""
    expected = _expected_value(lookup, reference.unit, facts, references.without_site)
    return _lax_text((reference.required or reference.value) / expected[0], expected[1]) if expected else ""


def _lax_text(ratio: float, expected: str) -> str:
    return "" if ratio >= LAX_RATIO else f"{100 * ratio:.2g}% of {expected}: {undetected_slowdown(ratio)}"


def _expected_value(lookup: MetricLookup, unit: str, facts: Facts, references: References) -> tuple[float, str] | None:
    """The value that good hardware reaches at least approximately, and its name with its origin; None if unknown.

    It is the reference value in ``unit``, or without one on one node the hardware limit.
    """
    known = references.site_or_sku_reference(lookup.reference_key, facts)
    if isinstance(known, Reference):
        return (known.value, reference_text(known)) if known.unit == unit else None
    if facts.get("nodes") != 1 or not lookup.bounded_by:  # the speed of training is far below its bound
        return None
    bound = bound_in_unit(lookup, unit, facts, references)
    return (bound.value, f"the hardware limit ({bound.derivation})") if bound else None


def threshold_notes(
    threshold: Threshold,
    metric: Metric,
    check_threshold: Threshold | None,
    reference: Reference | None,
    *,
    is_only: bool,
    is_unknown_model: bool,
) -> tuple[str, str]:
    """Why a trial's threshold is lax, and the reference value that it exceeds; empty if it is neither.

    It is compared with the check's own threshold, then with the reference value, and without one with the measured
    value, except on CPUs and on GPU models without SKU data. Only a threshold that replaces the check's is lax.
    """
    unit, value = metric.unit, metric.value
    measured = format_value(value, unit)
    if is_only and relative_strictness(threshold, check_threshold) < LAX_RATIO:
        return f"the check requires {check_threshold}", ""
    if threshold.op not in LOWER_BOUNDS:
        is_lax = threshold.op != "==" and unit in TIME_UNITS and value < LAX_RATIO * threshold.value
        if not is_lax or not is_only or is_unknown_model:
            return "", ""
        factor = threshold.value / max(value, 1e-9)
        return f"{measured} was measured; a {factor:,.3g}x slowdown would pass", ""
    if is_unknown_model and not reference:
        return "", ""
    best, best_text = (reference.value, reference_text(reference)) if reference else (value, f"the measured {measured}")
    ratio = threshold.value / best if best > 0 else 1.0
    if is_only and (lax := _lax_text(ratio, best_text)):
        return lax, ""
    return "", best_text if reference and ratio > 1 else ""


def undetected_slowdown(ratio: float) -> str:
    """The slowdown that a threshold at ``ratio`` of the expected value does not detect, as text."""
    if ratio <= 0:
        return "any slowdown would pass"
    return f"a {1 / ratio:,.0f}x slowdown would pass" if ratio < 0.1 else f"a {1 / ratio:.2g}x slowdown would pass"
