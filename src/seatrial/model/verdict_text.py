"""The text of a verdict, made from its fields where it is shown: nothing reads it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seatrial.model.outcome import BasisKind, Reason
from seatrial.model.units import format_value
from seatrial.util.text import and_more

if TYPE_CHECKING:
    from seatrial.model.verdict import Basis, Verdict

LAX_THRESHOLD, STRICT_THRESHOLD = "LAX THRESHOLD", "BEYOND"
_LABELS = {BasisKind.PEERS: "median of", BasisKind.PHYSICAL_LIMIT: "limit of"}
_NAMED = 4  # subjects that a sentence names
# What each reason adds to the sentence; before it stands the value, where the verdict has one
_CLAUSES: Mapping[Reason, str] = {
    Reason.EXCLUDED: "left out by {detail}",
    Reason.UNKNOWN_CHECK: "this version of seatrial has no such check, so that nothing can judge it",
    Reason.NOT_MEASURED: "not measured",
    Reason.MEASUREMENT_FAILED: "{detail}",
    Reason.INCOMPLETE_COVERAGE: "{detail}",
    Reason.METRIC_MISSING: "{metric} was not measured{in_brackets}, so that nothing is known of this",
    Reason.METRIC_PARTLY_MISSING: "{metric} was not measured everywhere; not of {detail}",
    Reason.NOT_APPLICABLE: "{does_not_apply}",
    Reason.APPLIES_TO_PEERS_ONLY: "{metric} is not judged here: {detail}",
    Reason.RANKS_DISAGREE: "ranks report different values, so that {metric} is not evaluated: {detail}",
    Reason.NO_RULE: "measured, and no rule judges it",
    Reason.THRESHOLD_NOT_EVALUATED: "{check} is not held to {metric} {threshold}: {detail}",
    Reason.THRESHOLD_ON_OTHER_SIZE: "{check} {metric} is not judged: {detail}",
    Reason.TOO_FEW_PEERS: "; there are too few of one model to be compared with each other",
    Reason.NO_REFERENCE: ", and {detail}",
    Reason.NO_ABSOLUTE_REFERENCE: "; {detail}",
    Reason.NO_THRESHOLD: ", recorded and judged by nothing: {detail}",
    Reason.UNIT_MISMATCH: ", and the threshold is in {detail!r}",
    Reason.IMPOSSIBLE_THRESHOLD: ", and the threshold says nothing: {detail}",
    Reason.NEGATIVE_VALUE: ", which cannot be below 0: it was measured wrongly",
    Reason.ABOVE_PHYSICAL_LIMIT: ", which nothing here can reach: it was measured wrongly: {detail}",
    Reason.IMPLAUSIBLY_HIGH: ", which is more than can be believed",
    Reason.THRESHOLD_VIOLATED: "{expected}",
    Reason.BELOW_WARNING_THRESHOLD: "",
    Reason.WITHIN_CONFIDENCE_INTERVAL: ", which its own 95 % interval still reaches ({interval})",
    Reason.WITHIN_SAMPLE_RANGE: ", which the range of its samples, too few for an interval, still reaches ({interval})",
    Reason.BELOW_PEERS: ", and far under the others of this trial",
    Reason.ASYMMETRIC: ", and {opposite} in the opposite direction",
    Reason.ERROR_COUNTERS_INCREASED: "{detail} during this check, expected {normal}",
    Reason.COUNTERS_NOT_READ: "{detail}",
    Reason.COUNTERS_UNAVAILABLE: "error counters that may not be read, or are not there: {detail}",
    Reason.REPRODUCED: "; reproduced ({retry})",
    Reason.REPRODUCED_ON_OTHER_DEVICE: "; reproduced by the same rank ({retry}): it goes with the rank, not with the device",
    Reason.NOT_REPRODUCED: "; not reproduced ({retry}), worth looking at",
    Reason.FAILED_IN_RETRY_ONLY: "; {second_time}",
    Reason.NOT_RETRIED: "; not repeated",
    Reason.RETRY_FAILED: "; not repeated, though it was tried",
}


def summary(verdict: Verdict) -> str:
    """What was measured, what was expected, and what the second measurement says."""
    figure = ""
    if verdict.value is not None and Reason.ERROR_COUNTERS_INCREASED not in verdict.reasons:
        figure = f"{verdict.metric} is {format_value(verdict.value, verdict.unit)}"
    if verdict.ratio is not None:
        figure += f", {verdict.ratio:.1%} of {_reference(verdict)}"
    if not verdict.reasons:
        return figure or verdict.detail
    fields = _fields(verdict)
    return figure + "".join(_CLAUSES[reason].format_map(fields) for reason in verdict.reasons)


def basis_text(basis: Basis) -> str:
    """Who judges, by which value, and from where it is."""
    if basis.op or basis.kind in (BasisKind.TRIAL, BasisKind.RULE):
        text = _label(basis) + (f": {_threshold(basis)}" if basis.op else f": {basis.source}" if basis.source else "")
    else:
        value = f": {basis.expected:g} {basis.unit}" if basis.source and basis.expected is not None else ""
        text = f"{_label(basis)}{value}" + (f" ({basis.source})" if basis.source else "")
    limits = [f"fails under {basis.fail_below:.0%}"] if basis.fail_below is not None else []
    limits += [f"warns under {basis.warn_below:.0%}"] if basis.warn_below is not None else []
    limits += (
        [f"warns under {basis.asymmetry_limit:.0%} of the opposite direction"]
        if basis.asymmetry_limit is not None
        else []
    )
    text += f"; {', '.join(limits)}" if limits else ""
    text += f"; {LAX_THRESHOLD}: {basis.lax_reason}" if basis.lax_reason else ""
    return text + (
        f"; {STRICT_THRESHOLD} {basis.exceeds}: good hardware of this shape fails it" if basis.exceeds else ""
    )


def _label(basis: Basis) -> str:
    if basis.kind is BasisKind.RULE and basis.name:
        return basis.name
    return f"{_LABELS.get(basis.kind, basis.kind)} {basis.name}".rstrip()


def _threshold(basis: Basis) -> str:
    value = format_value(basis.expected or 0.0, basis.unit)
    return f"must be {value}" if basis.unit == "bool" else f"{basis.op} {value}"


def _reference(verdict: Verdict) -> str:
    """The value of which ``share`` is a share; of a value above a threshold, ``detail`` has it."""
    basis = verdict.basis
    if basis is None or basis.op or basis.expected is None:
        return verdict.detail
    of = "" if basis.kind is BasisKind.PEERS else "of "
    return f"the {format_value(basis.expected, basis.unit)} {of}{_label(basis)}"


def _fields(verdict: Verdict) -> dict[str, str]:
    """What the clauses name."""
    basis, retry, unit = verdict.basis, verdict.retry, verdict.unit
    fields = {"check": verdict.check, "metric": verdict.metric, "detail": verdict.detail}
    fields["does_not_apply"] = f"does not apply: {verdict.detail}" if verdict.metric else verdict.detail
    fields["in_brackets"] = f" ({verdict.detail})" if verdict.detail else ""
    threshold = _threshold(basis) if basis and basis.op else ""
    fields |= {
        "threshold": threshold,
        "expected": f", expected {threshold.removeprefix('must be ')}" if threshold else "",
    }
    fields["normal"] = f"at most {basis.expected:g} a minute" if basis and basis.expected else "none"
    if verdict.interval:
        fields["interval"] = " to ".join(format_value(end, unit) for end in verdict.interval)
    if verdict.opposite_value is not None and verdict.value is not None:
        share = verdict.value / verdict.opposite_value
        fields["opposite"] = f"{share:.1%} of the {format_value(verdict.opposite_value, unit)}"
    fields["second_time"] = "seen when it was measured a second time"
    if retry:
        first, second = format_value(retry.first_value, unit), format_value(retry.retry_value, unit)
        fields["retry"] = f"{first}, then {second}"
        if retry.retry_subject:
            fields["retry"] = f"{first} here, then {second} at {retry.retry_subject}"
        if retry.failed_only_in_retry:
            fields["retry"] += f"; instead {and_more(retry.failed_only_in_retry, _NAMED)} fell short"
        fields["second_time"] = f"the second time only ({fields['retry']}), worth looking at"
    return fields
