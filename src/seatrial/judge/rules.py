"""Rules × measurements → verdicts. Pure: the same record judged again, with the same rules, gives the same verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache
from typing import Any

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.judge.baselines import MIXED, NOTHING, Fleet, Known, Reference
from seatrial.judge.groups import NOBODY, Alike, Fleets, Group, fleets_of, groups_of, outside
from seatrial.judge.lint import TIMES, WEAK, beyond, bound, flaw, gives_up, key_of, laxness, passes, weakness
from seatrial.judge.wording import inapplicable, opposite
from seatrial.model import (
    CLUSTER,
    HARDLY,
    LEFT_OUT,
    WITHHELD,
    Limit,
    Measurement,
    Metric,
    Outcome,
    Rule,
    Verdict,
    format_value,
)
from seatrial.statistics import median_interval

# Of what the hardware is known to reach. The largest gain by software that we know of is NVLink SHARP's: from 370 to
# 480 GB/s busbw of all-reduce on eight H100 (NVIDIA/nccl#1455). What is beyond half as much again was measured wrongly,
# or the reference is wrong.
BELIEVABLE = 1.5
_RECORDED = "rule: where somebody knows what good hardware reaches"
# What a baseline of the check as a whole depends on: its ranks must be of one mind about it.
_SHAPE = ("gpu", "world_size", "nodes")
_NEVER_NEGATIVE = ("B", "s", "ms", "us", "count")  # and what is per second; of others a rule says so
_NO_TROUBLE = (Outcome.PASS, Outcome.SKIP)
_BEHIND = "far under the others of this trial"
_SHOWN = 600  # characters of a fact in the evidence; the whole stands in the record


def judge_check(
    check: Check, measurements: Sequence[Measurement], expect: Mapping[str, Limit], trial: str, known: Known = NOTHING
) -> list[Verdict]:
    """Every verdict on one check. A threshold of the trial outranks the check's own rules on the same metric, but for
    one that passes what the check calls broken: on load it is refused, and in a record both judge.

    Fails closed: a rule whose metric a place did not measure is an ERROR there, a check that no rule judged UNJUDGED.
    """
    if not measurements:
        return [Verdict(check=check.name, subject=CLUSTER, outcome=Outcome.ERROR, reason="not measured")]
    verdicts = list(_unmeasured(check.name, measurements))
    measured = [measurement for measurement in measurements if not measurement.skipped]
    groups = groups_of(check, measured)
    rules = _effective(check.rules, expect, trial)
    of_fleets = fleets_of([rule.metric for rule in rules if rule.baseline or not rule.expect], measured)
    for rule in rules:
        whose = "" if rule in check.rules else trial
        fleets = of_fleets.get(rule.metric)
        verdicts += _apply(check.name, rule, groups, whose, known, fleets, _instead(rule, expect))
    if not verdicts:
        reason = "measured, and no rule judges it"
        verdicts = [Verdict(check=check.name, subject=CLUSTER, outcome=Outcome.UNJUDGED, reason=reason)]
    return verdicts


def _unmeasured(check: str, measurements: Sequence[Measurement]) -> Iterator[Verdict]:
    for measurement in measurements:
        subject = measurement.subject
        if measurement.error:
            yield _valueless(check, subject, "", Outcome.ERROR, measurement.error)
        elif measurement.skipped:
            yield _valueless(check, subject, "", Outcome.SKIP, measurement.skipped)


def _valueless(check: str, subject: str, metric: str, outcome: Outcome, reason: str) -> Verdict:
    """A verdict where there is no value to judge."""
    return Verdict.made(
        check=check,
        subject=subject,
        metric=metric,
        outcome=outcome,
        reason=reason,
        evidence="",
        remedy="",
        judged_by="",
    )


def _effective(rules: Sequence[Rule], expect: Mapping[str, Limit], trial: str) -> list[Rule]:
    own = {rule.metric: rule for rule in rules}
    why, remedy = f"the trial {trial} asks for it", ""
    trial_rules = [
        Rule(
            metric=metric,
            expect=limit,
            baseline=key_of(metric, tuple(rules)) or None,
            like=own[metric].where if metric in own else {},
            shows=own[metric].shows if metric in own else (),
            mirrored=own[metric].mirrored if metric in own else 0.0,
            own=own[metric].expect if metric in own else None,
            signed=metric not in own or own[metric].signed,
            why=own[metric].why if metric in own else why,
            remedy=own[metric].remedy if metric in own else remedy,
        )
        for metric, limit in expect.items()
    ]
    kept = [one for one in rules if one.metric not in expect or gives_up(expect[one.metric], "", one.metric, rules)]
    return kept + trial_rules


def _apply(
    check: str, rule: Rule, groups: Sequence[Group], trial: str, known: Known, fleets: Fleets | None, instead: str
) -> Iterator[Verdict]:
    """What one rule says of all groups: what is the same for thousands of them is asked of it once."""
    name, where = rule.metric, rule.where
    asked = (*where, *_SHAPE) if rule.baseline else tuple(where)
    alike = Alike(groups, where)
    # none of thousands has an error: a threshold of the check itself says the same of a value wherever it was measured
    fixed = rule.expect is not None and not rule.baseline and not trial
    said: dict[tuple[float, str], tuple[dict[str, Any], str]] = {}
    for group in groups:
        facts, subject = group.facts, group.subject
        if group.many and (unlike := group.contradiction(asked)):
            reason = f"the ranks are not of one mind, so that {name} is not to be judged: {unlike}"
            yield _valueless(check, subject, name, Outcome.ERROR, reason)
            continue
        if not where.items() <= facts.items() and (otherwise := outside(where, facts)):
            reason, like = inapplicable(where, otherwise, facts), alike.to(group, otherwise)
            if like:  # what applies to one device applies to its like
                reason = f"{name} is not judged here: {reason}; it applies to {like}, and nothing says why not here"
            yield _valueless(check, subject, name, Outcome.ERROR if like else Outcome.SKIP, reason)
            continue
        metrics = group.metrics.get(name, ())
        if not metrics and not group.failed:  # an error has been told already
            yield _missing(check, group, rule, instead)
        elif group.per and metrics and (absent := group.absent(name)):
            reason = f"{name} was not measured everywhere; not of {absent}"
            yield _valueless(check, subject, name, Outcome.ERROR, reason)
        orders = {metric.subject: metric.value for metric in metrics} if rule.mirrored else {}
        for metric in metrics:
            if fixed and not metric.samples and (same := said.get((metric.value, metric.unit))):
                yield Verdict.made(**same[0], subject=metric.subject, evidence=same[1] + metric.subject)
                continue
            fleet = fleets.of(facts, metric.subject) if fleets else NOBODY
            verdict = _verdict(check, rule, metric, facts, trial, known, fleet)
            yield _mirrored(verdict, rule, metric, orders) if orders else verdict
            if fixed and verdict.outcome is Outcome.PASS and not metric.samples:
                said[metric.value, metric.unit] = _anywhere(verdict)


def _anywhere(verdict: Verdict) -> tuple[dict[str, Any], str]:
    """What the same value gets elsewhere, and how the evidence begins."""
    fields = {name: value for name, value in verdict.__dict__.items() if name not in ("subject", "evidence")}
    return fields, verdict.evidence.removesuffix(verdict.subject)


def _mirrored(verdict: Verdict, rule: Rule, metric: Metric, orders: Mapping[str, float]) -> Verdict:
    """The verdict on one order of a pair, and what the other order says of it; ``orders``: value by subject."""
    reverse = opposite(metric.subject)
    other = orders.get(reverse, 0.0)
    if metric.value >= rule.mirrored * other:
        return verdict
    figure, colon, meaning = verdict.reason.partition(": ")
    words = f"{figure}, and {metric.value / other:.1%} of the {format_value(other, metric.unit)} of {reverse}"
    outcome = Outcome.WARN if verdict.outcome in _NO_TROUBLE else verdict.outcome
    reason = f"{words}{colon}{meaning}" if colon else f"{words}: {rule.why}"
    judged_by = f"{verdict.judged_by}; warns under {rule.mirrored:.0%} of the other order"
    changed = {"outcome": outcome, "reason": reason, "remedy": rule.remedy, "judged_by": judged_by}
    return verdict.model_copy(update=changed)


def _instead(rule: Rule, expect: Mapping[str, Limit]) -> str:
    """The trial's threshold on the same figure at another size, such as ``busbw.1GiB`` for ``busbw.8GiB``."""
    family = rule.metric.rpartition(".")[0]
    others = (metric for metric in expect if metric != rule.metric)
    return next((metric for metric in others if family and metric.rpartition(".")[0] == family), "")


def _missing(check: str, group: Group, rule: Rule, instead: str) -> Verdict:
    """Not measured: an ERROR, but for a size that the trial does not ask for and has a threshold in place of.

    Whoever accepts is told of that one: it names its judge.
    """
    left_out, withheld = (_reason(group.facts.get(fact), rule.metric) for fact in (LEFT_OUT, WITHHELD))
    if left_out and instead:
        reason = f"{check} {rule.metric} is not judged: {left_out}, and it has a threshold on {instead}"
        passed_over = _valueless(check, group.subject, rule.metric, Outcome.SKIP, reason)
        return passed_over.model_copy(update={"judged_by": "rule: where the trial measures this size"})
    why = f"{left_out}, with a threshold on none of them" if left_out else withheld
    said = f" ({why})" if why else ""
    reason = f"{rule.metric} was not measured{said}, so that nothing is known of this: {rule.why}"
    return _valueless(check, group.subject, rule.metric, Outcome.ERROR, reason)


def _reason(reasons: JsonValue, metric: str) -> str:
    return str(reasons.get(metric, "")) if isinstance(reasons, Mapping) else ""


def _verdict(
    check: str, rule: Rule, metric: Metric, facts: Mapping[str, JsonValue], trial: str, known: Known, fleet: Fleet
) -> Verdict:
    name, value = metric.name, format_value(metric.value, metric.unit)
    outcome, reason, judged_by = _compare(rule, metric, f"{name} is {value}", facts, trial, known, fleet)
    bad = outcome not in _NO_TROUBLE
    return Verdict.made(
        check=check,
        subject=metric.subject,
        metric=name,
        outcome=outcome,
        reason=f"{reason}: {rule.why}" if bad and rule.why else reason,
        evidence=_evidence(metric, value) + (_shown(rule, facts) if bad else ""),
        remedy=rule.remedy if bad else "",
        judged_by=judged_by,
    )


def _compare(
    rule: Rule,
    metric: Metric,
    figure: str,
    facts: Mapping[str, JsonValue],
    trial: str,
    known: Known,
    fleet: Fleet,
) -> tuple[Outcome, str, str]:
    """Outcome, reason and judge of what ``figure`` says in words."""
    if metric.value < 0 and _cannot_be(metric, rule):
        return Outcome.ERROR, f"{figure}, which cannot be below 0: it was measured wrongly", ""
    if rule.expect is not None:
        return _asked_for(rule, rule.expect, metric, figure, facts, trial, known, fleet)
    if rule.siblings:
        return _among(rule, metric, figure, fleet)
    key = rule.baseline or metric.name
    found = known.find(key, facts, NOBODY if rule.if_known else fleet, metric.unit)
    if isinstance(found, str):
        return _unknown(rule, figure, found)
    return _against(found, rule, metric, figure, fleet, weakness(found, key, facts, known))


def _asked_for(
    rule: Rule,
    limit: Limit,
    metric: Metric,
    figure: str,
    facts: Mapping[str, JsonValue],
    trial: str,
    known: Known,
    fleet: Fleet,
) -> tuple[Outcome, str, str]:
    """The same of a figure that has a threshold, which may itself be wrong where a trial gives it."""
    unit, key = metric.unit, rule.baseline or metric.name
    if limit.unit and limit.unit != unit:
        return Outcome.UNJUDGED, f"{figure}, and the threshold is in {limit.unit!r}", ""
    asked, judged_by = _asked(limit.op, limit.value, unit, trial)
    if trial and (wrong := flaw(limit, unit, key, facts, known)):
        return Outcome.ERROR, f"{figure}, and the threshold says nothing: {wrong}", judged_by
    if trial:
        judged_by += _sense(rule, limit, metric, facts, known)
    if limit.holds(metric.value):
        said = _held(rule, limit, metric, figure, facts, known, fleet) if rule.baseline else (Outcome.PASS, figure)
        return (*said, judged_by)
    reason = f"{figure}, expected {asked}"
    if trial and (wrong := beyond(limit, unit, key, facts, known)):
        return Outcome.ERROR, f"{reason}, and the threshold says nothing: {wrong}", judged_by
    interval, of_it = _interval(metric)
    if interval and any(limit.holds(end) for end in interval):
        return Outcome.WARN, f"{reason}, which {of_it} still reaches ({_range(interval, metric)})", judged_by
    return rule.breach, reason, judged_by


def _unknown(rule: Rule, figure: str, why: str) -> tuple[Outcome, str, str]:
    if rule.if_known:
        return Outcome.SKIP, f"{figure}, recorded and judged by nothing: {why}", _RECORDED
    return Outcome.UNJUDGED, f"{figure}, and {why}", ""


def _held(
    rule: Rule, limit: Limit, metric: Metric, figure: str, facts: Mapping[str, JsonValue], known: Known, fleet: Fleet
) -> tuple[Outcome, str]:
    """Of a figure that holds a limit: whether it can be believed, and whether its like are far better."""
    if too_good := _beyond(rule, limit, metric, facts, known):
        return Outcome.UNJUDGED, f"{figure}, {too_good}"
    if limit.op in (">", ">=") and fleet.outlying(metric.value):
        return Outcome.WARN, f"{figure}, and {_BEHIND}"
    return Outcome.PASS, figure


def _sense(rule: Rule, limit: Limit, metric: Metric, facts: Mapping[str, JsonValue], known: Known) -> str:
    """What a threshold of the trial is worth beside what is known: one far under that hardly tests anything.

    Where nothing is known of this figure, what a GPU that is known has just reached is the least that can be expected
    of it. Of a CPU, and of a model that is unknown, nothing is expected.
    """
    share = laxness(limit, rule.own)
    if share < WEAK:
        return f"; {HARDLY}: the check itself asks for {rule.own}"
    published = known.published(rule.baseline, facts) if rule.baseline else ""
    strange = any(isinstance(known.sku(gpu), str) for gpu in str(facts.get("gpu") or "").split(MIXED))
    if limit.op not in (">", ">="):
        return "" if strange else _slack(limit, metric)
    if isinstance(published, Reference) and published.unit == metric.unit:
        best, of = published.value, f"the {format_value(published.value, published.unit)} of {published.of}"
    elif strange:
        return ""
    else:
        best, of = metric.value, f"the {format_value(metric.value, metric.unit)} that was measured here"
    share = limit.value / best if best > 0 else 1.0
    if share < WEAK:
        gets_past = passes(share, rule.baseline or "", str(facts.get("gpu") or ""), known)
        return f"; {HARDLY}: {100 * share:.2g}% of {of}: {gets_past}"
    good = isinstance(published, Reference) and share > 1
    return f"; BEYOND {of}: good hardware of this shape fails it" if good else ""


def _slack(limit: Limit, metric: Metric) -> str:
    """The same of a time, of which nothing is known but what was measured here."""
    if metric.unit not in TIMES or limit.op == "==" or metric.value >= WEAK * limit.value:
        return ""
    took, times = format_value(metric.value, metric.unit), limit.value / max(metric.value, 1e-9)
    return f"; {HARDLY}: beside the {took} that was measured here, what is {times:,.3g} times slower passes"


def _beyond(rule: Rule, limit: Limit, metric: Metric, facts: Mapping[str, JsonValue], known: Known) -> str:
    """Why a figure that holds is too good to be true, beside what is published or else the hardware's own limit.

    Of a training with settings of its own, say, what is published tells nothing.
    """
    if not rule.baseline or limit.op not in (">", ">=") or not rule.like.items() <= facts.items():
        return ""
    published, most = known.published(rule.baseline, facts), bound(rule.baseline, facts, known)
    if isinstance(published, Reference):
        best, unit, of = published.value, published.unit, published.of
    elif most:
        best, unit, of = most.value, most.unit, most.arithmetic
    else:
        return ""
    if unit != metric.unit or metric.value <= BELIEVABLE * best:
        return ""
    return f"{metric.value / best:.1%} of {format_value(best, unit)}, which is more than can be believed: {of}"


def _against(
    known: Reference, rule: Rule, metric: Metric, figure: str, fleet: Fleet, mark: str
) -> tuple[Outcome, str, str]:
    """``mark``: what there is to say against the reference itself."""
    share = metric.value / known.value
    least = rule.fail_below if known.floor is None else known.floor / known.value
    given, judged_by = _terms(known, least, rule.warn_below)
    judged_by += mark
    reason = f"{figure}, {share:.1%} of {given}"
    if known.deviation is not None and (share >= least or not fleet.outlying(metric.value)):
        return Outcome.UNJUDGED, f"{reason}; {known.source}", judged_by
    if share > BELIEVABLE:
        return Outcome.UNJUDGED, f"{reason}, which is more than can be believed of either", judged_by
    if share >= max(rule.warn_below, least):
        if fleet.outlying(metric.value):
            return Outcome.WARN, f"{reason}, and {_BEHIND}", judged_by
        return Outcome.PASS, reason, judged_by
    if share >= least:
        return Outcome.WARN, reason, judged_by
    interval, of_it = _interval(metric)
    if interval and interval[1] >= least * known.value:
        return Outcome.WARN, f"{reason}, which {of_it} does not exclude ({_range(interval, metric)})", judged_by
    return Outcome.FAIL, reason, judged_by


def _among(rule: Rule, metric: Metric, figure: str, fleet: Fleet) -> tuple[Outcome, str, str]:
    """Beside its siblings alone: who is slower than the rest is seen, and whether all are slow is not asked."""
    if not fleet.known:
        return Outcome.SKIP, f"{figure}; there are too few of one model to be compared with each other", ""
    of, judged_by = _siblings(fleet.median, metric.unit, len(fleet.values), fleet.model, rule.warn_below)
    share = metric.value / fleet.median
    far = share < rule.warn_below and fleet.outlying(metric.value)
    return (Outcome.WARN if far else Outcome.PASS), f"{figure}, {share:.1%} of {of}", judged_by


def _cannot_be(below: Metric, rule: Rule) -> bool:
    """Whether a value ``below`` 0 was measured wrongly: by its unit, or since the rule would find it good."""
    never = "/s" in below.unit or below.unit in _NEVER_NEGATIVE
    return never or bool(rule.expect and not rule.signed and rule.expect.holds(below.value))


def _interval(metric: Metric) -> tuple[tuple[float, float] | None, str]:
    """What the samples leave open of a value, and its name; None where they say nothing of it.

    Too few for an interval leave open all that they show, and no more: the slower something is, the fewer samples of it
    there are, and what is slow in each of three is not good because they are three. Samples that the value is not
    among are of something else.
    """
    samples = metric.samples
    if len(samples) < 2 or not min(samples) <= metric.value <= max(samples):
        return None, ""
    if interval := median_interval(samples):
        return interval, "its own 95 % interval"
    return (min(samples), max(samples)), f"the range of its {len(samples)} samples, too few for an interval,"


def _range(interval: tuple[float, float], metric: Metric) -> str:
    return " to ".join(format_value(bound, metric.unit) for bound in interval)


@lru_cache  # here and below: the same words for thousands of subjects
def _terms(known: Reference, least: float, warn_below: float) -> tuple[str, str]:
    """What a reference gives, and how it judges."""
    return (
        f"the {format_value(known.value, known.unit)} that {known.of} gives",
        f"{known.of}: {known.value:g} {known.unit} ({known.source}); "
        f"fails under {least:.0%}, warns under {warn_below:.0%}",
    )


@lru_cache
def _siblings(median: float, unit: str, count: int, model: str, warn_below: float) -> tuple[str, str]:
    """What the others of a trial reach, and how that judges."""
    of = f"median of {count} subjects on {model}"
    return f"the {format_value(median, unit)} that is the {of}", f"{of}; warns under {warn_below:.0%}"


@lru_cache
def _asked(op: str, value: float, unit: str, trial: str) -> tuple[str, str]:
    """What a threshold asks for, and who does."""
    text = format_value(value, unit)
    limit = text if unit == "bool" else f"{op} {text}"
    return limit, f"trial {trial}: {limit}" if trial else f"rule: {limit}"


def _shown(rule: Rule, facts: Mapping[str, JsonValue]) -> str:
    """The facts that the rule shows, as they were recorded, each cut to a length that a person reads."""
    texts = {name: json.dumps(facts[name], ensure_ascii=False) for name in rule.shows if facts.get(name)}
    return "".join(f"; {name}: {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}" for name, text in texts.items())


def _evidence(metric: Metric, value: str) -> str:
    text, samples = f"{metric.name} = {value} on {metric.subject}", metric.samples
    if len(samples) > 1:
        low, high = format_value(min(samples), metric.unit), format_value(max(samples), metric.unit)
        text += f", {len(samples)} samples from {low} to {high}"
    return text
