"""Evaluate the rules of a check on its measurements. No I/O: equal inputs give equal verdicts."""

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
    references: References = NO_REFERENCES,
) -> list[Verdict]:
    """All verdicts on one check; the trial's thresholds (``expect``) replace the check's rules on the same metrics.

    If a trial's threshold would pass broken hardware, the check's rule applies, too. A metric that a rule needs and a
    subject did not measure is an ERROR; a check without any evaluated rule is UNJUDGED.
    """
    if not measurements:
        return [Verdict(check.name, CLUSTER, Outcome.ERROR, reasons=(Reason.NOT_MEASURED,))]
    verdicts: list[Verdict] = []
    for measurement in measurements:
        subject = measurement.subject
        if measurement.error:
            reasons = (Reason.MEASUREMENT_FAILED,)
            verdicts.append(Verdict(check.name, subject, Outcome.ERROR, reasons=reasons, detail=measurement.error))
        elif measurement.skipped:
            reasons = (Reason.NOT_APPLICABLE,)
            verdicts.append(Verdict(check.name, subject, Outcome.SKIP, reasons=reasons, detail=measurement.skipped))
    measured = [measurement for measurement in measurements if not measurement.skipped]
    check_rules = [
        rule
        for rule in check.rules
        if rule.metric not in expect or weakened_rule(expect[rule.metric], "", rule.metric, check.rules)
    ]
    rules = [*check_rules, *_trial_rules(check.rules, expect, trial)]
    names = {name for rule in rules for name in (rule.metric, rule.single_metric) if name}
    groups = measurement_groups(check, measured, names)
    peers = peer_groups([rule.metric for rule in rules if rule.reference or not rule.expect], measured)
    evaluations = []
    for rule in rules:
        source = "" if rule in check_rules else trial
        evaluators = RuleEvaluators(check, rule, source, references, peers.get(rule.metric))
        applicability = PeerApplicability(groups, rule.applies_if)
        other_size = _threshold_on_other_size(rule, expect, trial)
        evaluations.append(_RuleEvaluation(check.name, rule, applicability, evaluators, other_size))
    for group in groups:  # the outer loop, to access the data of each of thousands of groups once
        for evaluation in evaluations:
            evaluation.add(group)
    verdicts += (verdict for evaluation in evaluations for verdict in evaluation.verdicts)
    return verdicts or [Verdict(check.name, CLUSTER, Outcome.UNJUDGED, reasons=(Reason.NO_RULE,))]


def _trial_rules(rules: Sequence[Rule], expect: Mapping[str, Threshold], trial: str) -> Iterator[Rule]:
    """A rule for each threshold of the trial, with meaning, fix and evidence of the check's rule on the metric."""
    by_metric = {rule.metric: rule for rule in rules}
    for metric, threshold in expect.items():
        key = reference_key(metric, tuple(rules)) or None
        if (check_rule := by_metric.get(metric)) is None:
            meaning = f"threshold set by trial {trial}"
            yield Rule(metric=metric, expect=threshold, reference=key, may_be_negative=True, meaning=meaning, fix="")
            continue
        yield Rule(
            metric=metric,
            expect=threshold,
            reference=key,
            reference_if=check_rule.applies_if,
            evidence_facts=check_rule.evidence_facts,
            asymmetry_limit=check_rule.asymmetry_limit,
            check_threshold=check_rule.expect,
            may_be_negative=check_rule.may_be_negative,
            meaning=check_rule.meaning,
            fix=check_rule.fix,
        )


def _threshold_on_other_size(rule: Rule, expect: Mapping[str, Threshold], trial: str) -> tuple[str, Basis] | None:
    """The trial's threshold on the same metric at another size, such as ``busbw.1GiB`` for ``busbw.8GiB``."""
    family = rule.metric.rpartition(".")[0]
    for metric, threshold in expect.items():
        if family and metric != rule.metric and metric.rpartition(".")[0] == family:
            return metric, Basis(BasisKind.TRIAL, trial, threshold.value, threshold.unit, threshold.op)
    return None


class _RuleEvaluation:
    """The ``verdicts`` of one rule on all measurement groups."""

    def __init__(
        self,
        check: str,
        rule: Rule,
        applicability: PeerApplicability,
        evaluators: RuleEvaluators,
        other_size: tuple[str, Basis] | None,
    ) -> None:
        self._check, self._rule, self._applicability, self._evaluators = check, rule, applicability, evaluators
        self._other_size = other_size
        self._shared_facts = (*rule.applies_if, *SHAPE_FACTS) if rule.reference else tuple(rule.applies_if)
        self.verdicts: list[Verdict] = []

    def add(self, group: MeasurementGroup) -> None:
        """Evaluate the rule for one group."""
        rule, name = self._rule, self._rule.metric
        if (rule.applies_if or group.has_several_ranks) and self._not_applicable(group):
            return
        metrics = group.metrics.get(name, ())
        if not metrics and not group.failed:  # an error has its own verdict
            self._add_missing_metric(group)
        elif metrics and group.required_per[name]:
            if missing := group.missing_subjects(name):
                self._add_verdict(group.subject, Outcome.ERROR, Reason.METRIC_PARTLY_MISSING, missing)
            for subject, reason in group.exempt_subjects(name).items():
                self._add_verdict(subject, Outcome.SKIP, Reason.NOT_APPLICABLE, reason)
        verdicts = [self._evaluators.verdict(group, metric) for metric in metrics]
        self.verdicts += _with_asymmetry(rule, metrics, verdicts) if rule.asymmetry_limit else verdicts

    def _add_verdict(self, subject: str, outcome: Outcome, reason: Reason, detail: str) -> None:
        self.verdicts.append(Verdict(self._check, subject, outcome, self._rule.metric, (reason,), detail))

    def _not_applicable(self, group: MeasurementGroup) -> bool:
        """Add SKIP if the rule does not apply to the group, ERROR if it should or ranks disagree; return if added."""
        applies_if, facts = self._rule.applies_if, group.facts
        if group.has_several_ranks and (disagreement := group.rank_disagreement(self._shared_facts)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.RANKS_DISAGREE, disagreement)
            return True
        if applies_if.items() <= facts.items() or not (mismatched := mismatched_facts(applies_if, facts)):
            return False
        reason = not_applicable_reason(applies_if, mismatched, facts)
        if peer := self._applicability.applicable_peer(group, mismatched):
            detail = f"{reason}, but the rule applies to {peer}"
            self._add_verdict(group.subject, Outcome.ERROR, Reason.APPLIES_TO_PEERS_ONLY, detail)
        else:
            self._add_verdict(group.subject, Outcome.SKIP, Reason.NOT_APPLICABLE, reason)
        return True

    def _add_missing_metric(self, group: MeasurementGroup) -> None:
        """Add an ERROR; add a SKIP if the options omit this size and the trial has a threshold on another size."""
        rule, subject = self._rule, group.subject
        not_requested = _reason_in_fact(group.facts.get(NOT_REQUESTED), rule.metric)
        if not_requested and self._other_size:
            metric, basis = self._other_size
            detail, reasons = f"{not_requested}; the threshold is on {metric}", (Reason.THRESHOLD_ON_OTHER_SIZE,)
            verdict = Verdict(self._check, subject, Outcome.SKIP, rule.metric, reasons, detail, basis=basis)
        else:
            detail, reasons = _reason_in_fact(group.facts.get(NOT_REPORTED), rule.metric), (Reason.METRIC_MISSING,)
            if not_requested:
                detail = f"{not_requested}; the trial has no threshold on another size of this metric"
            verdict = Verdict(self._check, subject, Outcome.ERROR, rule.metric, reasons, detail, meaning=rule.meaning)
        self.verdicts.append(verdict)


def _reason_in_fact(reasons: JsonValue, metric: str) -> str:
    return str(reasons.get(metric, "")) if isinstance(reasons, Mapping) else ""


def _with_asymmetry(rule: Rule, metrics: Sequence[Metric], verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """The verdicts on pairs; PASS or SKIP becomes WARN below ``asymmetry_limit`` × the opposite direction's value."""
    values = {metric.subject: metric.value for metric in metrics}
    for metric, verdict in zip(metrics, verdicts, strict=True):
        opposite_value = values.get(opposite_direction(metric.subject), 0.0)
        if metric.value >= rule.asymmetry_limit * opposite_value:
            yield verdict
            continue
        was_good = verdict.outcome in PASS_OR_SKIP
        yield replace(
            verdict,
            outcome=Outcome.WARN if was_good else verdict.outcome,
            reasons=(*verdict.reasons, Reason.ASYMMETRIC),
            opposite_value=opposite_value,
            basis=replace(verdict.basis, asymmetry_limit=rule.asymmetry_limit) if verdict.basis else None,
            meaning=rule.meaning,
            evidence=measured_evidence(metric) if was_good else verdict.evidence,
            fix=rule.fix,
        )
