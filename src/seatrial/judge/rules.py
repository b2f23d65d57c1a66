"""Rules × measurements → verdicts. Pure: the same record judged again, with the same rules, gives the same verdicts."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from functools import lru_cache

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.judge.baselines import MIXED, NOTHING, Fleet, Known, Reference
from seatrial.judge.lint import WEAK, flaw, key_of, passes
from seatrial.judge.wording import inapplicable
from seatrial.model import CLUSTER, HARDLY, Limit, Measurement, Metric, Outcome, Rule, Scope, Verdict, format_value
from seatrial.statistics import median_interval

# Of what the hardware is known to reach. The largest gain by software that we know of is NVLink SHARP's: from 370 to
# 480 GB/s busbw of all-reduce on eight H100 (NVIDIA/nccl#1455). What is beyond half as much again was measured wrongly,
# or the reference is wrong.
BELIEVABLE = 1.5
_NOBODY = Fleet("", ())
_NO_TROUBLE = (Outcome.PASS, Outcome.SKIP)
_SHOWN = 600  # characters of a fact in the evidence; the whole stands in the record


def judge_check(
    check: Check, measurements: Sequence[Measurement], expect: Mapping[str, Limit], trial: str, known: Known = NOTHING
) -> list[Verdict]:
    """Every verdict on one check. A threshold of the trial outranks the check's own rules on the same metric.

    Fails closed: a rule whose metric a place did not measure is an ERROR there, a check that no rule judged UNJUDGED.
    """
    if not measurements:
        return [Verdict(check=check.name, subject=CLUSTER, outcome=Outcome.ERROR, reason="not measured")]
    verdicts = list(_unmeasured(check.name, measurements))
    measured = [measurement for measurement in measurements if not measurement.skipped]
    groups = _groups(check.scope, measured)
    for rule in _effective(check.rules, expect, trial):
        fleets = {} if rule.expect else _fleets(rule, measured)
        for group in groups:
            verdicts += _apply(check.name, rule, group, trial if rule.metric in expect else "", known, fleets)
    if not verdicts:
        reason = "measured, and no rule judges it"
        verdicts = [Verdict(check=check.name, subject=CLUSTER, outcome=Outcome.UNJUDGED, reason=reason)]
    return verdicts


class Group:
    """Measurements that together must hold what a rule asks for, their facts as one, their metrics by name."""

    def __init__(self, measurements: Sequence[Measurement]) -> None:
        self.subject = measurements[0].subject if len(measurements) == 1 else CLUSTER
        self.failed = any(measurement.error for measurement in measurements)
        self.facts = measurements[0].facts
        if len(measurements) > 1:
            self.facts = {name: value for measurement in measurements for name, value in measurement.facts.items()}
        self.metrics: dict[str, list[Metric]] = {}
        for measurement in measurements:
            for metric in measurement.metrics:
                self.metrics.setdefault(metric.name, []).append(metric)


def _groups(scope: Scope, measured: Sequence[Measurement]) -> list[Group]:
    """All ranks of a collective together, else each place alone."""
    if scope is Scope.CLUSTER:
        return [Group(measured)] if measured else []
    return [Group([measurement]) for measurement in measured]


def _fleets(rule: Rule, measured: Sequence[Measurement]) -> dict[str, Fleet]:
    """All values of the rule's metric by GPU model: unlike GPUs are never compared."""
    values: dict[str, list[float]] = {}
    for measurement in measured:
        own = [metric.value for metric in measurement.metrics if metric.name == rule.metric]
        values.setdefault(_model(measurement.facts), []).extend(own)
    return {model: Fleet(model, tuple(found)) for model, found in values.items()}


def _model(facts: Mapping[str, JsonValue]) -> str:
    """NVML's name of the GPU; empty where the check told of none."""
    return str(facts.get("gpu") or "")


def _unmeasured(check: str, measurements: Sequence[Measurement]) -> Iterator[Verdict]:
    for measurement in measurements:
        subject = measurement.subject
        if measurement.error:
            yield Verdict(check=check, subject=subject, outcome=Outcome.ERROR, reason=measurement.error)
        elif measurement.skipped:
            yield Verdict(check=check, subject=subject, outcome=Outcome.SKIP, reason=measurement.skipped)


def _effective(rules: Sequence[Rule], expect: Mapping[str, Limit], trial: str) -> list[Rule]:
    own = {rule.metric: rule for rule in rules}
    why, remedy = f"the trial {trial} asks for it", ""
    trial_rules = [
        Rule(
            metric=metric,
            expect=limit,
            baseline=key_of(metric, tuple(rules)) or None,
            shows=own[metric].shows if metric in own else (),
            why=own[metric].why if metric in own else why,
            remedy=own[metric].remedy if metric in own else remedy,
        )
        for metric, limit in expect.items()
    ]
    return [rule for rule in rules if rule.metric not in expect] + trial_rules


def _apply(
    check: str, rule: Rule, group: Group, trial: str, known: Known, fleets: Mapping[str, Fleet]
) -> Iterator[Verdict]:
    facts = group.facts
    if rule.where and (outside := [name for name, value in rule.where.items() if facts.get(name, value) != value]):
        reason = inapplicable(rule.where, outside, facts)
        yield Verdict(check=check, subject=group.subject, metric=rule.metric, outcome=Outcome.SKIP, reason=reason)
        return
    metrics = group.metrics.get(rule.metric, ())
    if not metrics and not group.failed:  # an error has been told already
        reason = f"{rule.metric} was not measured, so that nothing is known of this: {rule.why}"
        yield Verdict(check=check, subject=group.subject, metric=rule.metric, outcome=Outcome.ERROR, reason=reason)
    fleet = fleets.get(_model(facts), _NOBODY) if fleets else _NOBODY
    for metric in metrics:
        yield _verdict(check, rule, metric, facts, trial, known, fleet)


def _verdict(
    check: str, rule: Rule, metric: Metric, facts: Mapping[str, JsonValue], trial: str, known: Known, fleet: Fleet
) -> Verdict:
    value = format_value(metric.value, metric.unit)
    outcome, reason, judged_by = _compare(rule, metric, value, facts, trial, known, fleet)
    bad = outcome not in _NO_TROUBLE
    return Verdict.made(
        check=check,
        subject=metric.subject,
        metric=metric.name,
        outcome=outcome,
        reason=f"{reason}: {rule.why}" if bad and rule.why else reason,
        evidence=_evidence(metric, value) + (_shown(rule, facts) if bad else ""),
        remedy=rule.remedy if bad else "",
        judged_by=judged_by,
    )


def _compare(
    rule: Rule,
    metric: Metric,
    value: str,
    facts: Mapping[str, JsonValue],
    trial: str,
    known: Known,
    fleet: Fleet,
) -> tuple[Outcome, str, str]:
    if rule.expect is None:
        found = known.find(rule.baseline or metric.name, facts, fleet, metric.unit)
        if isinstance(found, str):
            return Outcome.UNJUDGED, f"{metric.name} is {value}, and {found}", ""
        return _against(found, rule, metric, value, fleet)
    if rule.expect.unit and rule.expect.unit != metric.unit:
        return Outcome.UNJUDGED, f"{metric.name} is {value}, and the threshold is in {rule.expect.unit!r}", ""
    limit = _limit(rule.expect.op, rule.expect.value, metric.unit)
    judged_by = f"trial {trial}: {limit}" if trial else f"rule: {limit}"
    if trial and (wrong := flaw(rule.expect, metric.unit, rule.baseline or "", facts, known)):
        return Outcome.ERROR, f"{metric.name} is {value}, and the threshold says nothing: {wrong}", judged_by
    if trial:
        judged_by += _sense(rule, rule.expect, metric, facts, known)
    if rule.expect.holds(metric.value):
        return Outcome.PASS, f"{metric.name} is {value}", judged_by
    reason = f"{metric.name} is {value}, expected {limit}"
    interval = median_interval(metric.samples)
    if interval and any(rule.expect.holds(bound) for bound in interval):
        return (
            Outcome.WARN,
            f"{reason}, which its own 95 % interval still reaches ({_range(interval, metric)})",
            judged_by,
        )
    return rule.breach, reason, judged_by


def _sense(rule: Rule, limit: Limit, metric: Metric, facts: Mapping[str, JsonValue], known: Known) -> str:
    """What a threshold of the trial is worth beside what is known: one far under that hardly tests anything.

    Where nothing is known of this figure, what a GPU that is known has just reached is the least that can be expected
    of it. Of a CPU, and of a model that is unknown, nothing is expected.
    """
    published = known.published(rule.baseline, facts) if rule.baseline else ""
    if limit.op not in (">", ">="):
        return ""
    if isinstance(published, Reference) and published.unit == metric.unit:
        best, of = published.value, f"the {format_value(published.value, published.unit)} of {published.of}"
    elif any(isinstance(known.sku(gpu), str) for gpu in str(facts.get("gpu") or "").split(MIXED)):
        return ""
    else:
        best, of = metric.value, f"the {format_value(metric.value, metric.unit)} that was measured here"
    share = limit.value / best if best > 0 else 1.0
    if share < WEAK:
        gets_past = passes(share, rule.baseline or "", str(facts.get("gpu") or ""), known)
        return f"; {HARDLY}: {100 * share:.2g}% of {of}: {gets_past}"
    good = isinstance(published, Reference) and share > 1
    return f"; BEYOND {of}: good hardware of this shape fails it" if good else ""


def _against(known: Reference, rule: Rule, metric: Metric, value: str, fleet: Fleet) -> tuple[Outcome, str, str]:
    share = metric.value / known.value
    least = rule.fail_below if known.floor is None else known.floor / known.value
    reason = (
        f"{metric.name} is {value}, {share:.1%} of the {format_value(known.value, known.unit)} that {known.of} gives"
    )
    judged_by = (
        f"{known.of}: {known.value:g} {known.unit} ({known.source}); "
        f"fails under {least:.0%}, warns under {rule.warn_below:.0%}"
    )
    if known.deviation is not None and (share >= least or not fleet.outlying(metric.value)):
        return Outcome.UNJUDGED, f"{reason}; {known.source}", judged_by
    if share > BELIEVABLE:
        return Outcome.UNJUDGED, f"{reason}, which is more than can be believed of either", judged_by
    if share >= max(rule.warn_below, least):
        if fleet.outlying(metric.value):
            return Outcome.WARN, f"{reason}, and far under the others of this trial", judged_by
        return Outcome.PASS, reason, judged_by
    if share >= least:
        return Outcome.WARN, reason, judged_by
    interval = median_interval(metric.samples)
    if interval and interval[1] >= least * known.value:
        reason += f", which its own 95 % interval does not exclude ({_range(interval, metric)})"
        return Outcome.WARN, reason, judged_by
    return Outcome.FAIL, reason, judged_by


def _range(interval: tuple[float, float], metric: Metric) -> str:
    return " to ".join(format_value(bound, metric.unit) for bound in interval)


@lru_cache  # the same for thousands of subjects
def _limit(op: str, value: float, unit: str) -> str:
    text = format_value(value, unit)
    return text if unit == "bool" else f"{op} {text}"


def _shown(rule: Rule, facts: Mapping[str, JsonValue]) -> str:
    """The facts that the rule shows, as they were recorded, each cut to a length that a person reads."""
    texts = {name: json.dumps(facts[name], ensure_ascii=False) for name in rule.shows if facts.get(name)}
    return "".join(f"; {name}: {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}" for name, text in texts.items())


def _evidence(metric: Metric, value: str) -> str:
    text = f"{metric.name} = {value} on {metric.subject}"
    if len(metric.samples) > 1:
        low, high = (format_value(bound, metric.unit) for bound in (min(metric.samples), max(metric.samples)))
        text += f", {len(metric.samples)} samples from {low} to {high}"
    return text
