"""The text of a verdict, made from its fields where it is shown: nothing reads it back."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

from seatrial.model.outcome import BasisKind, Reason
from seatrial.model.units import format_value
from seatrial.util.text import and_more

if TYPE_CHECKING:
    from seatrial.model.verdict import Basis, Verdict

LAX, BEYOND = "LAX THRESHOLD", "BEYOND"
_LABELS = {BasisKind.PEERS: "median of", BasisKind.MODEL: "limit of"}
_NAMED = 4  # subjects that a sentence names
# What each reason adds to the sentence; before it stands the value, where the verdict has one
_CLAUSES: Mapping[Reason, str] = {
    Reason.LEFT_OUT: "left out by {detail}",
    Reason.UNKNOWN_CHECK: "this version of seatrial has no such check, so that nothing can judge it",
    Reason.NOT_MEASURED: "not measured",
    Reason.MEASUREMENT_FAILED: "{detail}",
    Reason.INCOMPLETE: "{detail}",
    Reason.MISSING: "{metric} was not measured{in_brackets}, so that nothing is known of this",
    Reason.MISSING_SOMEWHERE: "{metric} was not measured everywhere; not of {detail}",
    Reason.DOES_NOT_APPLY: "{does_not_apply}",
    Reason.APPLIES_TO_PEER: "{metric} is not judged here: {detail}",
    Reason.RANKS_DISAGREE: "ranks report different values, so that {metric} is not evaluated: {detail}",
    Reason.NO_RULE: "measured, and no rule judges it",
    Reason.THRESHOLD_NOT_EVALUATED: "{check} is not held to {metric} {threshold}: {detail}",
    Reason.OTHER_SIZE: "{check} {metric} is not judged: {detail}",
    Reason.TOO_FEW_PEERS: "; there are too few of one model to be compared with each other",
    Reason.NO_REFERENCE: ", and {detail}",
    Reason.PEERS_ONLY: "; {detail}",
    Reason.RECORDED_ONLY: ", recorded and judged by nothing: {detail}",
    Reason.OTHER_UNIT: ", and the threshold is in {detail!r}",
    Reason.IMPOSSIBLE_THRESHOLD: ", and the threshold says nothing: {detail}",
    Reason.BELOW_ZERO: ", which cannot be below 0: it was measured wrongly",
    Reason.BEYOND_HARDWARE: ", which nothing here can reach: it was measured wrongly: {detail}",
    Reason.BEYOND_BELIEF: ", which is more than can be believed",
    Reason.THRESHOLD_VIOLATED: "{expected}",
    Reason.BELOW_WARNING: "",
    Reason.INTERVAL_REACHES: ", which its own 95 % interval still reaches ({interval})",
    Reason.SAMPLES_REACH: ", which the range of its samples, too few for an interval, still reaches ({interval})",
    Reason.BEHIND_PEERS: ", and far under the others of this trial",
    Reason.ASYMMETRIC: ", and {opposite} in the opposite direction",
    Reason.ERRORS_COUNTED: "{detail} during this check, expected {normal}",
    Reason.COUNTERS_UNREAD: "{detail}",
    Reason.COUNTERS_REFUSED: "error counters that may not be read, or are not there: {detail}",
    Reason.REPRODUCED: "; reproduced ({retry})",
    Reason.REPRODUCED_BY_RANK: "; reproduced by the same rank ({retry}): it goes with the rank, not with the device",
    Reason.NOT_REPRODUCED: "; not reproduced ({retry}), worth looking at",
    Reason.SECOND_TIME_ONLY: "; {second_time}",
    Reason.NOT_REPEATED: "; not repeated",
    Reason.RETRY_FAILED: "; not repeated, though it was tried",
}


def statement(verdict: Verdict) -> str:
    """What was measured, what was expected, and what the second measurement says."""
    figure = ""
    if verdict.value is not None and Reason.ERRORS_COUNTED not in verdict.reasons:
        figure = f"{verdict.metric} is {format_value(verdict.value, verdict.unit)}"
    if verdict.share is not None:
        figure += f", {verdict.share:.1%} of {_reference(verdict)}"
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
    limits += [f"warns under {basis.asymmetry:.0%} of the opposite direction"] if basis.asymmetry is not None else []
    text += f"; {', '.join(limits)}" if limits else ""
    text += f"; {LAX}: {basis.lax}" if basis.lax else ""
    return text + (f"; {BEYOND} {basis.beyond}: good hardware of this shape fails it" if basis.beyond else "")


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
    if verdict.opposite is not None and verdict.value is not None:
        share = verdict.value / verdict.opposite
        fields["opposite"] = f"{share:.1%} of the {format_value(verdict.opposite, unit)}"
    fields["second_time"] = "seen when it was measured a second time"
    if retry:
        first, second = format_value(retry.first, unit), format_value(retry.second, unit)
        fields["retry"] = f"{first}, then {second}"
        if retry.subject:
            fields["retry"] = f"{first} here, then {second} at {retry.subject}"
        if retry.instead:
            fields["retry"] += f"; instead {and_more(retry.instead, _NAMED)} fell short"
        fields["second_time"] = f"the second time only ({fields['retry']}), worth looking at"
    return fields
