"""Rules × measurements → verdicts. Pure: the same record judged again, with the same rules, gives the same verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.hardware.references import NOTHING, Known
from seatrial.judge.applicability import Alike, inapplicable, outside
from seatrial.judge.groups import SHAPE, Group, fleets_of, groups_of, opposite
from seatrial.judge.plausibility import gives_up, key_of
from seatrial.judge.thresholds import NO_TROUBLE, Standards, evidence_of
from seatrial.model import (
    CLUSTER,
    LEFT_OUT,
    WITHHELD,
    Basis,
    BasisKind,
    Limit,
    Measurement,
    Metric,
    Outcome,
    Reason,
    Rule,
    Verdict,
)


def judge_check(
    check: Check, measurements: Sequence[Measurement], expect: Mapping[str, Limit], trial: str, known: Known = NOTHING
) -> list[Verdict]:
    """Every verdict on one check. A threshold of the trial outranks the check's own rules on the same metric, but for
    one that passes what the check calls broken: on load it is refused, and in a record both judge.

    Fails closed: a rule whose metric a place did not measure is an ERROR there, a check that no rule judged UNJUDGED.
    """
    if not measurements:
        return [Verdict(check.name, CLUSTER, Outcome.ERROR, reasons=(Reason.NOT_MEASURED,))]
    verdicts: list[Verdict] = []
    for one in measurements:
        if one.error:
            failed = (Reason.MEASUREMENT_FAILED,)
            verdicts.append(Verdict(check.name, one.subject, Outcome.ERROR, reasons=failed, detail=one.error))
        elif one.skipped:
            skipped = (Reason.DOES_NOT_APPLY,)
            verdicts.append(Verdict(check.name, one.subject, Outcome.SKIP, reasons=skipped, detail=one.skipped))
    measured = [measurement for measurement in measurements if not measurement.skipped]
    kept = [
        one
        for one in check.rules
        if one.metric not in expect or gives_up(expect[one.metric], "", one.metric, check.rules)
    ]
    rules = [*kept, *_trial_rules(check.rules, expect, trial)]
    groups = groups_of(check, measured, {rule.metric for rule in rules})
    of_fleets = fleets_of([rule.metric for rule in rules if rule.baseline or not rule.expect], measured)
    rulings = []
    for rule in rules:
        standards = Standards(check, rule, "" if rule in kept else trial, known, of_fleets.get(rule.metric))
        rulings.append(
            _Ruling(check.name, rule, Alike(groups, rule.where), standards, _other_size(rule, expect, trial))
        )
    for group in groups:  # in this order, since of thousands of places one is at hand and the others are not
        for ruling in rulings:
            ruling.judge(group)
    verdicts += (verdict for ruling in rulings for verdict in ruling.verdicts)
    return verdicts or [Verdict(check.name, CLUSTER, Outcome.UNJUDGED, reasons=(Reason.NO_RULE,))]


def _trial_rules(rules: Sequence[Rule], expect: Mapping[str, Limit], trial: str) -> Iterator[Rule]:
    """A rule for each threshold of the trial, with what the check's own rule says of a bad value."""
    by_metric = {rule.metric: rule for rule in rules}
    for metric, limit in expect.items():
        baseline = key_of(metric, tuple(rules)) or None
        if (own := by_metric.get(metric)) is None:
            why = f"the trial {trial} asks for it"
            yield Rule(metric=metric, expect=limit, baseline=baseline, signed=True, why=why, fix="")
            continue
        yield Rule(
            metric=metric,
            expect=limit,
            baseline=baseline,
            like=own.where,
            shows=own.shows,
            mirrored=own.mirrored,
            own=own.expect,
            signed=own.signed,
            why=own.why,
            fix=own.fix,
        )


def _other_size(rule: Rule, expect: Mapping[str, Limit], trial: str) -> tuple[str, Basis] | None:
    """The trial's threshold on the same figure at another size, such as ``busbw.1GiB`` for ``busbw.8GiB``."""
    family = rule.metric.rpartition(".")[0]
    for metric, limit in expect.items():
        if family and metric != rule.metric and metric.rpartition(".")[0] == family:
            return metric, Basis(BasisKind.TRIAL, trial, limit.value, limit.unit, limit.op)
    return None


class _Ruling:
    """What one rule says of all groups: ``verdicts``."""

    def __init__(
        self, check: str, rule: Rule, alike: Alike, standards: Standards, other_size: tuple[str, Basis] | None
    ) -> None:
        self._check, self._rule, self._alike, self._standards = check, rule, alike, standards
        self._other_size = other_size
        self._asked = (*rule.where, *SHAPE) if rule.baseline else tuple(rule.where)
        self.verdicts: list[Verdict] = []

    def judge(self, group: Group) -> None:
        """Judge one more group."""
        rule, name = self._rule, self._rule.metric
        if (rule.where or group.many) and self._is_outside(group):
            return
        metrics = group.metrics.get(name, ())
        if not metrics and not group.failed:  # an error has been told already
            self._missing(group)
        elif metrics and group.given[name]:
            if absent := group.absent(name):
                self._add(group.subject, Outcome.ERROR, Reason.MISSING_SOMEWHERE, absent)
            for place, why in group.excused(name).items():
                self._add(place, Outcome.SKIP, Reason.DOES_NOT_APPLY, why)
        verdicts = [self._standards.verdict(group, metric) for metric in metrics]
        self.verdicts += _asymmetric(rule, metrics, verdicts) if rule.mirrored else verdicts

    def _add(self, subject: str, outcome: Outcome, reason: Reason, detail: str) -> None:
        self.verdicts.append(Verdict(self._check, subject, outcome, self._rule.metric, (reason,), detail))

    def _is_outside(self, group: Group) -> bool:
        """Whether the rule does not apply to a group; the verdict says whether it should."""
        where, facts = self._rule.where, group.facts
        if group.many and (unlike := group.contradiction(self._asked)):
            self._add(group.subject, Outcome.ERROR, Reason.RANKS_DISAGREE, unlike)
            return True
        if where.items() <= facts.items() or not (otherwise := outside(where, facts)):
            return False
        why = inapplicable(where, otherwise, facts)
        if like := self._alike.to(group, otherwise):  # what applies to one device applies to its like
            detail = f"{why}; it applies to {like}, and nothing says why not here"
            self._add(group.subject, Outcome.ERROR, Reason.APPLIES_TO_PEER, detail)
        else:
            self._add(group.subject, Outcome.SKIP, Reason.DOES_NOT_APPLY, why)
        return True

    def _missing(self, group: Group) -> None:
        """Not measured: an ERROR, but for a size that the trial does not ask for and has a threshold in place of."""
        rule = self._rule
        left_out, withheld = (_fact_on(group.facts.get(fact), rule.metric) for fact in (LEFT_OUT, WITHHELD))
        if left_out and self._other_size:
            metric, basis = self._other_size
            detail, reasons = f"{left_out}, and it has a threshold on {metric}", (Reason.OTHER_SIZE,)
            verdict = Verdict(self._check, group.subject, Outcome.SKIP, rule.metric, reasons, detail, basis=basis)
        else:
            detail, reasons = (
                f"{left_out}, with a threshold on none of them" if left_out else withheld,
                (Reason.MISSING,),
            )
            verdict = Verdict(self._check, group.subject, Outcome.ERROR, rule.metric, reasons, detail, why=rule.why)
        self.verdicts.append(verdict)


def _fact_on(reasons: JsonValue, metric: str) -> str:
    return str(reasons.get(metric, "")) if isinstance(reasons, Mapping) else ""


def _asymmetric(rule: Rule, metrics: Sequence[Metric], verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """The verdicts on ``metrics``, each of one direction of a pair, beside the opposite direction."""
    values = {metric.subject: metric.value for metric in metrics}
    for metric, verdict in zip(metrics, verdicts, strict=True):
        other = values.get(opposite(metric.subject), 0.0)
        if metric.value >= rule.mirrored * other:
            yield verdict
            continue
        good = verdict.outcome in NO_TROUBLE
        yield replace(
            verdict,
            outcome=Outcome.WARN if good else verdict.outcome,
            reasons=(*verdict.reasons, Reason.ASYMMETRIC),
            opposite=other,
            basis=replace(verdict.basis, asymmetry=rule.mirrored) if verdict.basis else None,
            why=rule.why,
            evidence=evidence_of(metric) if good else verdict.evidence,
            fix=rule.fix,
        )
