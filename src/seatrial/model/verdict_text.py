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
# Text of a reason; it is appended to the text of the value, if the verdict has a value. Other reasons: the detail
_REASON_TEXTS: Mapping[Reason, str] = {
    Reason.EXCLUDED: "excluded by {detail}",
    Reason.NOT_MEASURED: "not measured",
    Reason.METRIC_MISSING: "{metric} was not measured{in_brackets}",
    Reason.METRIC_PARTLY_MISSING: "{metric} is incomplete: {detail}",
    Reason.NOT_APPLICABLE: "{not_applicable}{detail}",
    Reason.FACT_INVALID: "{not_evaluated}{detail}",
    Reason.THRESHOLD_NOT_EVALUATED: "{check}: threshold {metric} {threshold} not evaluated: {detail}",
    Reason.THRESHOLD_ON_OTHER_SIZE: "{check}: {metric} not evaluated: {detail}",
    Reason.TOO_FEW_PEERS: "; too few devices of the same model to compare",
    Reason.NO_THRESHOLD: ", recorded without a threshold: {detail}",
    Reason.UNIT_MISMATCH: "; unit mismatch: expected {detail!r}",
    Reason.IMPOSSIBLE_THRESHOLD: "; invalid threshold: {detail}",
    Reason.MEASUREMENT_ERROR: "; measurement error: {detail}",
    Reason.IMPLAUSIBLY_HIGH: "; implausibly high: check the measurement and the reference value",
    Reason.THRESHOLD_VIOLATED: "{expected}",
    Reason.BELOW_WARNING_THRESHOLD: "",
    Reason.INCONCLUSIVE: "; inconclusive: the samples ({interval}) reach the threshold",
    Reason.SLOW_WINDOWS: "; slow windows: {detail}",
    Reason.BELOW_PEERS: "; low outlier among its peers in this trial",
    Reason.ASYMMETRIC: "; {opposite} in the opposite direction",
    Reason.REPRODUCED: "; reproduced ({retry})",
    Reason.NOT_REPRODUCED: "; not reproduced ({retry})",
    Reason.NO_THIRD_MEASUREMENT: "; bad in one of two measurements ({retry}), not measured a third time",
    Reason.NOT_RETRIED: "; not retried",
}


def summary(verdict: Verdict) -> str:
    """The measured value, the expected value and the result of the retry, as one sentence."""
    value_text = ""
    if verdict.value is not None:
        value_text = f"{verdict.metric} is {format_value(verdict.value, verdict.unit)}"
    if verdict.ratio is not None:
        value_text += f", {verdict.ratio:.1%} of {_reference(verdict)}"
    if not verdict.reasons:
        return value_text or verdict.detail
    fields, detail = _template_fields(verdict), "; {detail}" if value_text else "{detail}"
    return value_text + "".join(_REASON_TEXTS.get(reason, detail).format_map(fields) for reason in verdict.reasons)


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
    fields = {
        "check": verdict.check,
        "metric": verdict.metric,
        "detail": verdict.detail,
        "in_brackets": f" ({verdict.detail})" if verdict.detail else "",
        "not_applicable": "not applicable: " if verdict.metric else "",
        "not_evaluated": f"{verdict.metric} not evaluated: " if verdict.metric else "",
        "threshold": _threshold(basis) if basis and basis.op else "",
        "expected": _expected(basis) if basis and basis.op else "",
    }
    if verdict.interval:
        fields["interval"] = " to ".join(format_value(bound, unit) for bound in verdict.interval)
    if verdict.opposite_value is not None and verdict.value is not None:
        ratio = verdict.value / verdict.opposite_value
        fields["opposite"] = f"{ratio:.1%} of the {format_value(verdict.opposite_value, unit)}"
    if retry:
        values = (retry.first_value, retry.retry_value, retry.third_value)
        fields["retry"] = ", then ".join(format_value(value, unit) for value in values if value is not None)
        if retry.retry_subject:
            fields["retry"] += f" on {retry.retry_subject}: not a fault of one device"
    return fields
