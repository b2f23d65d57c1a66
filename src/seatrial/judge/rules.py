"""Rules × measurements → verdicts. Pure: the same record judged again, with the same rules, gives the same verdicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.hardware.references import NO_REFERENCES, References
from seatrial.judge.applicability import PeerApplicability, mismatched_facts, not_applicable_reason
from seatrial.judge.groups import SHAPE_FACTS, MeasurementGroup, measurement_groups, opposite_direction, peer_groups
from seatrial.judge.plausibility import reference_key, weakened_rule
from seatrial.judge.thresholds import PASS_OR_SKIP, RuleEvaluators, measured_evidence
from seatrial.model import (
    CLUSTER,
    NOT_REPORTED,
    NOT_REQUESTED,
    Basis,
    BasisKind,
    Measurement,
    Metric,
    Outcome,
    Reason,
    Rule,
    Threshold,
    Verdict,
)


def judge_check(
    check: Check,
    measurements: Sequence[Measurement],
    expect: Mapping[str, Threshold],
    trial: str,
    known: References = NO_REFERENCES,
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
            skipped = (Reason.NOT_APPLICABLE,)
            verdicts.append(Verdict(check.name, one.subject, Outcome.SKIP, reasons=skipped, detail=one.skipped))
    measured = [measurement for measurement in measurements if not measurement.skipped]
    kept = [
        one
        for one in check.rules
        if one.metric not in expect or weakened_rule(expect[one.metric], "", one.metric, check.rules)
    ]
    rules = [*kept, *_trial_rules(check.rules, expect, trial)]
    groups = measurement_groups(check, measured, {rule.metric for rule in rules})
    of_fleets = peer_groups([rule.metric for rule in rules if rule.reference or not rule.expect], measured)
    rulings = []
    for rule in rules:
        standards = RuleEvaluators(check, rule, "" if rule in kept else trial, known, of_fleets.get(rule.metric))
        rulings.append(
            _Ruling(
                check.name,
                rule,
                PeerApplicability(groups, rule.applies_if),
                standards,
                _other_size(rule, expect, trial),
            )
        )
    for group in groups:  # in this order, since of thousands of places one is at hand and the others are not
        for ruling in rulings:
            ruling.judge(group)
    verdicts += (verdict for ruling in rulings for verdict in ruling.verdicts)
    return verdicts or [Verdict(check.name, CLUSTER, Outcome.UNJUDGED, reasons=(Reason.NO_RULE,))]


def _trial_rules(rules: Sequence[Rule], expect: Mapping[str, Threshold], trial: str) -> Iterator[Rule]:
    """A rule for each threshold of the trial, with what the check's own rule says of a bad value."""
    by_metric = {rule.metric: rule for rule in rules}
    for metric, limit in expect.items():
        baseline = reference_key(metric, tuple(rules)) or None
        if (own := by_metric.get(metric)) is None:
            why = f"the trial {trial} asks for it"
            yield Rule(metric=metric, expect=limit, reference=baseline, may_be_negative=True, meaning=why, fix="")
            continue
        yield Rule(
            metric=metric,
            expect=limit,
            reference=baseline,
            reference_if=own.applies_if,
            evidence_facts=own.evidence_facts,
            asymmetry_limit=own.asymmetry_limit,
            check_threshold=own.expect,
            may_be_negative=own.may_be_negative,
            meaning=own.meaning,
            fix=own.fix,
        )


def _other_size(rule: Rule, expect: Mapping[str, Threshold], trial: str) -> tuple[str, Basis] | None:
    """The trial's threshold on the same figure at another size, such as ``busbw.1GiB`` for ``busbw.8GiB``."""
    family = rule.metric.rpartition(".")[0]
    for metric, limit in expect.items():
        if family and metric != rule.metric and metric.rpartition(".")[0] == family:
            return metric, Basis(BasisKind.TRIAL, trial, limit.value, limit.unit, limit.op)
    return None


class _Ruling:
    """What one rule says of all groups: ``verdicts``."""

    def __init__(
        self,
        check: str,
        rule: Rule,
        alike: PeerApplicability,
        standards: RuleEvaluators,
        other_size: tuple[str, Basis] | None,
    ) -> None:
        self._check, self._rule, self._alike, self._standards = check, rule, alike, standards
        self._other_size = other_size
        self._asked = (*rule.applies_if, *SHAPE_FACTS) if rule.reference else tuple(rule.applies_if)
        self.verdicts: list[Verdict] = []

    def judge(self, group: MeasurementGroup) -> None:
        """Judge one more group."""
        rule, name = self._rule, self._rule.metric
        if (rule.applies_if or group.has_several_ranks) and self._is_outside(group):
            return
        metrics = group.metrics.get(name, ())
        if not metrics and not group.failed:  # an error has been told already
            self._missing(group)
        elif metrics and group.required_per[name]:
            if absent := group.missing_subjects(name):
                self._add(group.subject, Outcome.ERROR, Reason.METRIC_PARTLY_MISSING, absent)
            for place, why in group.exempt_subjects(name).items():
                self._add(place, Outcome.SKIP, Reason.NOT_APPLICABLE, why)
        verdicts = [self._standards.verdict(group, metric) for metric in metrics]
        self.verdicts += _asymmetric(rule, metrics, verdicts) if rule.asymmetry_limit else verdicts

    def _add(self, subject: str, outcome: Outcome, reason: Reason, detail: str) -> None:
        self.verdicts.append(Verdict(self._check, subject, outcome, self._rule.metric, (reason,), detail))

    def _is_outside(self, group: MeasurementGroup) -> bool:
        """Whether the rule does not apply to a group; the verdict says whether it should."""
        where, facts = self._rule.applies_if, group.facts
        if group.has_several_ranks and (unlike := group.rank_disagreement(self._asked)):
            self._add(group.subject, Outcome.ERROR, Reason.RANKS_DISAGREE, unlike)
            return True
        if where.items() <= facts.items() or not (otherwise := mismatched_facts(where, facts)):
            return False
        why = not_applicable_reason(where, otherwise, facts)
        if like := self._alike.applicable_peer(group, otherwise):  # what applies to one device applies to its like
            detail = f"{why}; it applies to {like}, and nothing says why not here"
            self._add(group.subject, Outcome.ERROR, Reason.APPLIES_TO_PEERS_ONLY, detail)
        else:
            self._add(group.subject, Outcome.SKIP, Reason.NOT_APPLICABLE, why)
        return True

    def _missing(self, group: MeasurementGroup) -> None:
        """Not measured: an ERROR, but for a size that the trial does not ask for and has a threshold in place of."""
        rule = self._rule
        left_out, withheld = (_fact_on(group.facts.get(fact), rule.metric) for fact in (NOT_REQUESTED, NOT_REPORTED))
        if left_out and self._other_size:
            metric, basis = self._other_size
            detail, reasons = f"{left_out}, and it has a threshold on {metric}", (Reason.THRESHOLD_ON_OTHER_SIZE,)
            verdict = Verdict(self._check, group.subject, Outcome.SKIP, rule.metric, reasons, detail, basis=basis)
        else:
            detail, reasons = (
                f"{left_out}, with a threshold on none of them" if left_out else withheld,
                (Reason.METRIC_MISSING,),
            )
            verdict = Verdict(
                self._check, group.subject, Outcome.ERROR, rule.metric, reasons, detail, meaning=rule.meaning
            )
        self.verdicts.append(verdict)


def _fact_on(reasons: JsonValue, metric: str) -> str:
    return str(reasons.get(metric, "")) if isinstance(reasons, Mapping) else ""


def _asymmetric(rule: Rule, metrics: Sequence[Metric], verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """The verdicts on ``metrics``, each of one direction of a pair, beside the opposite direction."""
    values = {metric.subject: metric.value for metric in metrics}
    for metric, verdict in zip(metrics, verdicts, strict=True):
        other = values.get(opposite_direction(metric.subject), 0.0)
        if metric.value >= rule.asymmetry_limit * other:
            yield verdict
            continue
        good = verdict.outcome in PASS_OR_SKIP
        yield replace(
            verdict,
            outcome=Outcome.WARN if good else verdict.outcome,
            reasons=(*verdict.reasons, Reason.ASYMMETRIC),
            opposite_value=other,
            basis=replace(verdict.basis, asymmetry_limit=rule.asymmetry_limit) if verdict.basis else None,
            meaning=rule.meaning,
            evidence=measured_evidence(metric) if good else verdict.evidence,
            fix=rule.fix,
        )
