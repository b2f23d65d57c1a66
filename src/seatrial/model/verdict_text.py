"""The text of a verdict, made from the fields of the verdict when it is shown. No code parses this text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seatrial.model.outcome import BasisKind, Reason
from seatrial.model.units import format_value

if TYPE_CHECKING:
    from seatrial.model.verdict import Basis, Verdict

LAX_THRESHOLD, STRICT_THRESHOLD = "LAX THRESHOLD", "STRICT THRESHOLD"
# Kind of a basis → the words before its name, as in "median of 8 GPUs"; for other kinds the kind, as in "SKU H200"
_BASIS_LABELS = {
    BasisKind.PEERS: "median of",
    BasisKind.PHYSICAL_LIMIT: "limit of",
    BasisKind.RUN: "work at",
    BasisKind.FABRIC_MODEL: "bound of",
    BasisKind.OWN_MEDIAN: "median of its own windows",
}
# Text for each reason; it is appended to the text of the value, if the verdict has a value
_REASON_TEXTS: Mapping[Reason, str] = {
    Reason.EXCLUDED: "excluded by {detail}",
    Reason.UNKNOWN_CHECK: "this version of seatrial does not have this check; not evaluated",
    Reason.NOT_MEASURED: "not measured",
    Reason.MEASUREMENT_FAILED: "{detail}",
    Reason.INCOMPLETE_COVERAGE: "{detail}",
    Reason.PLAN_MISMATCH: "{detail}",
    Reason.METRIC_MISSING: "{metric} was not measured{in_brackets}",
    Reason.METRIC_PARTLY_MISSING: "{metric} is incomplete: {detail}",
    Reason.NOT_APPLICABLE: "{not_applicable}",
    Reason.APPLIES_TO_PEERS_ONLY: "{metric} not evaluated: {detail}",
    Reason.RANKS_DISAGREE: "{metric} not evaluated: ranks report different values of {detail}",
    Reason.FACT_INVALID: "{not_evaluated}{detail}",
    Reason.FACT_UNREADABLE: "{not_evaluated}{detail}",
    Reason.NO_RULE: "measured, but no rule evaluates it",
    Reason.THRESHOLD_NOT_EVALUATED: "{check}: threshold {metric} {threshold} not evaluated: {detail}",
    Reason.THRESHOLD_ON_OTHER_SIZE: "{check}: {metric} not evaluated: {detail}",
    Reason.TOO_FEW_PEERS: "; too few devices of the same model to compare",
    Reason.NO_REFERENCE: "; {detail}",
    Reason.NO_ABSOLUTE_REFERENCE: "; {detail}",
    Reason.NO_THRESHOLD: ", recorded without a threshold: {detail}",
    Reason.ALGORITHM_UNKNOWN: "; {detail}",
    Reason.BASELINE_OF_THIS_RUN: "; the only reference value was learned from this run: learn it from other runs",
    Reason.BASELINE_OF_FEW_RUNS: "; {detail}",
    Reason.UNIT_MISMATCH: "; unit mismatch: expected {detail!r}",
    Reason.IMPOSSIBLE_THRESHOLD: "; invalid threshold: {detail}",
    Reason.NEGATIVE_VALUE: "; measurement error: the value cannot be negative",
    Reason.OUTSIDE_PLAUSIBLE_RANGE: "; measurement error: expected {detail}",
    Reason.ABOVE_PHYSICAL_LIMIT: "; measurement error: above the physical limit: {detail}",
    Reason.IMPLAUSIBLY_HIGH: "; implausibly high: check the measurement and the reference value",
    Reason.THRESHOLD_VIOLATED: "{expected}",
    Reason.BELOW_WARNING_THRESHOLD: "",
    Reason.WITHIN_CONFIDENCE_INTERVAL: "; threshold within the 95 % confidence interval ({interval})",
    Reason.WITHIN_SAMPLE_RANGE: "; threshold within the sample range ({interval}; too few for an interval)",
    Reason.MANY_SAMPLES_BEYOND: "; significantly more than 10 % of the samples are over 5 % beyond the threshold",
    Reason.INCONCLUSIVE: "; inconclusive",
    Reason.SLOW_WINDOWS: "; slow windows: {detail}",
    Reason.BELOW_PEERS: "; low outlier among its peers in this trial",
    Reason.ASYMMETRIC: "; {opposite} in the opposite direction",
    Reason.FABRIC_MISMATCH: "{detail}",
    Reason.ERROR_COUNTERS_INCREASED: "{detail} during this check, expected {expected_rate}",
    Reason.COUNTERS_NOT_READ: "{detail}",
    Reason.COUNTERS_UNAVAILABLE: "error counters not available: {detail}",
    Reason.REPRODUCED: "; reproduced ({retry})",
    Reason.REPRODUCED_ON_OTHER_DEVICE: "; reproduced by the same rank on another device ({retry}): "
    "the fault follows the rank, not the device",
    Reason.NOT_REPRODUCED: "; not reproduced ({retry})",
    Reason.FAILED_IN_RETRY_ONLY: "; failed only in the retry{retry_in_brackets}",
    Reason.MOVED: "; the fault moves between devices of the node ({retry})",
    Reason.NO_THIRD_MEASUREMENT: "; bad in one of two measurements ({retry}), not measured a third time",
    Reason.NOT_RETRIED: "; not retried",
    Reason.RETRY_FAILED: "; the retry could not be measured",
}


def summary(verdict: Verdict) -> str:
    """The measured value, the expected value and the result of the retry, as one sentence."""
    value_text = ""
    if verdict.value is not None and Reason.ERROR_COUNTERS_INCREASED not in verdict.reasons:
        value_text = f"{verdict.metric} is {format_value(verdict.value, verdict.unit)}"
    if verdict.ratio is not None:
        value_text += f", {verdict.ratio:.1%} of {_reference(verdict)}"
    if not verdict.reasons:
        return value_text or verdict.detail
    fields = _template_fields(verdict)
    return value_text + "".join(_REASON_TEXTS[reason].format_map(fields) for reason in verdict.reasons)


def basis_text(basis: Basis) -> str:
    """The kind and name of a basis, its expected value and source, and the limits applied to it."""
    if basis.op or basis.kind in (BasisKind.TRIAL, BasisKind.RULE):
        threshold_or_source = _threshold(basis) if basis.op else basis.source
        text = _label(basis) + (f": {threshold_or_source}" if threshold_or_source else "")
    else:
        value = f": {basis.expected:g} {basis.unit}" if basis.source and basis.expected is not None else ""
        text = f"{_label(basis)}{value}" + (f" ({basis.source})" if basis.source else "")
    limits = []
    if basis.fail_below is not None:
        label = "slow windows are those" if basis.kind is BasisKind.OWN_MEDIAN else "FAIL"
        limits.append(f"{label} below {basis.fail_below:.0%}")
    if basis.warn_below is not None:
        limits.append(f"WARN below {basis.warn_below:.0%}")
    if basis.asymmetry_limit is not None:
        limits.append(f"WARN below {basis.asymmetry_limit:.0%} of the opposite direction")
    text += f"; {basis.arithmetic}" if basis.arithmetic else ""
    text += f"; {', '.join(limits)}" if limits else ""
    text += f"; {LAX_THRESHOLD}: {basis.lax_reason}" if basis.lax_reason else ""
    return text + (f"; {STRICT_THRESHOLD}: above {basis.exceeds}" if basis.exceeds else "")


def _label(basis: Basis) -> str:
    if basis.kind is BasisKind.RULE:
        return basis.name or "rule of the check"
    return f"{_BASIS_LABELS.get(basis.kind, basis.kind)} {basis.name}".rstrip()


def _threshold(basis: Basis) -> str:
    value = format_value(basis.expected or 0.0, basis.unit)
    return f"must be {value}" if basis.unit == "bool" else f"{basis.op} {value}"


def _expected(basis: Basis) -> str:
    """The condition of a violated threshold, appended to the value.

    An exact number reads "must be": "8 GPUs, expected 0 GPUs" could be read as the number of missing GPUs.
    """
    value = format_value(basis.expected or 0.0, basis.unit)
    if basis.unit == "bool":
        return f", expected {value}"
    return f", must be {value}" if basis.op == "==" else f", expected {basis.op} {value}"


def _reference(verdict: Verdict) -> str:
    """The value that ``ratio`` refers to; ``detail`` names it for verdicts with a threshold."""
    basis = verdict.basis
    if basis is None or basis.op or basis.expected is None:
        return verdict.detail
    preposition = "" if basis.kind in _BASIS_LABELS else "of "
    return f"the {format_value(basis.expected, basis.unit)} {preposition}{_label(basis)}"


def _template_fields(verdict: Verdict) -> dict[str, str]:
    """The values of the fields in ``_REASON_TEXTS``."""
    basis, retry, unit = verdict.basis, verdict.retry, verdict.unit
    threshold = _threshold(basis) if basis and basis.op else ""
    fields = {
        "check": verdict.check,
        "metric": verdict.metric,
        "detail": verdict.detail,
        "in_brackets": f" ({verdict.detail})" if verdict.detail else "",
        "not_applicable": f"not applicable: {verdict.detail}" if verdict.metric else verdict.detail,
        "not_evaluated": f"{verdict.metric} not evaluated: " if verdict.metric else "",
        "threshold": threshold,
        "expected": _expected(basis) if basis and basis.op else "",
        "expected_rate": f"at most {basis.expected:g} per minute" if basis and basis.expected else "none",
        "retry_in_brackets": "",
    }
    if verdict.interval:
        fields["interval"] = " to ".join(format_value(bound, unit) for bound in verdict.interval)
    if verdict.opposite_value is not None and verdict.value is not None:
        ratio = verdict.value / verdict.opposite_value
        fields["opposite"] = f"{ratio:.1%} of the {format_value(verdict.opposite_value, unit)}"
    if retry:
        first, second = format_value(retry.first_value, unit), format_value(retry.retry_value, unit)
        values_text = f"{first}, then {second}" + (f" on {retry.retry_subject}" if retry.retry_subject else "")
        if retry.third_value is not None:
            values_text += f", then {format_value(retry.third_value, unit)}"
        fields |= {"retry": values_text, "retry_in_brackets": f" ({values_text})"}
    return fields
