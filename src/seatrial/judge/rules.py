"""Evaluates the rules of a check on its measurements. No I/O: equal inputs give equal verdicts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.hardware.references import NO_REFERENCES, References
from seatrial.judge.applicability import (
    PeerApplicability,
    invalid_fact,
    invalid_shape,
    mismatched_facts,
    unmet_condition,
)
from seatrial.judge.groups import (
    SHAPE_FACTS,
    MeasurementGroup,
    invalid_common_facts,
    measurement_groups,
    opposite_direction,
    peer_groups,
)
from seatrial.judge.plausibility import metric_lookup, reference_key, weakened_rule
from seatrial.judge.rule_evaluators import RuleEvaluators
from seatrial.judge.thresholds import PASS_OR_SKIP, measured_evidence
from seatrial.model import (
    CLUSTER,
    Absent,
    Basis,
    BasisKind,
    Measurement,
    Metric,
    Outcome,
    Reason,
    Rule,
    Threshold,
    Verdict,
    Why,
)
from seatrial.model.rule import OPPOSITE, Limit

# Reasons of verdicts for which there is no absolute reference value
_WITHOUT_REFERENCE = frozenset({Reason.NO_REFERENCE, Reason.NO_ABSOLUTE_REFERENCE, Reason.NO_THRESHOLD})


def judge_check(
    check: Check,
    measurements: Sequence[Measurement],
    expect: Mapping[str, Threshold],
    trial: str,
    references: References = NO_REFERENCES,
    *,
    override: bool = False,
    options: Mapping[str, JsonValue] | None = None,
    rules: Sequence[Rule] | None = None,
) -> list[Verdict]:
    """All verdicts on one check: on failed measurements, by its own rules, then by the trial's thresholds (``expect``).

    With ``override`` the thresholds replace the rules on the same metrics, except where they would pass broken
    hardware. If a rule lacks a reference value and a threshold judges its metric, the verdict of the rule is omitted.
    A metric that a rule needs is an ERROR on each subject that did not measure it. A check without a verdict is
    UNJUDGED. ``trial`` is the name of the trial, ``options`` are the options that the trial sets. ``rules``: instead of
    those of the check.
    """
    if not measurements:
        return [Verdict(check.name, CLUSTER, Outcome.ERROR, reasons=(Reason.NOT_MEASURED,))]
    judged_sizes = _judged_instead(measurements)
    verdicts = [*_failed_and_skipped(check.name, measurements), *_sizes_not_timed(check, judged_sizes)]
    own_rules = check.rules if rules is None else rules
    measured = [measurement for measurement in measurements if not measurement.skipped]
    declared_rules = tuple(_at_measured_size(rule, judged_sizes) for rule in own_rules)
    check_rules = [
        rule
        for rule in declared_rules
        if not (override and rule.metric in expect)
        or weakened_rule(expect[rule.metric], "", rule.metric, declared_rules)
    ]
    all_rules = [*check_rules, *_trial_rules(declared_rules, expect, trial)]
    names = {rule.metric for rule in all_rules} | {rule.single.single_metric for rule in all_rules if rule.single}
    groups = measurement_groups(check, measured, names)
    peers = peer_groups([rule.metric for rule in all_rules if rule.reference or not rule.threshold], groups)
    evaluations = []
    for rule in all_rules:
        rule_trial = "" if rule in check_rules else trial
        evaluators = RuleEvaluators(
            check, own_rules, rule, rule_trial, references, peers.get(rule.metric), override=override
        )
        declared = check.declaration(rule.metric)
        applicability = PeerApplicability(groups, rule, varies_by_device=bool(declared and declared.varies_by_device))
        other_size = _threshold_on_other_size(rule, expect, trial)
        changed = _changed_options(rule, check, options or {})
        evaluations.append(_RuleEvaluation(check, rule, rule_trial, applicability, evaluators, other_size, changed))
    fact_names = tuple(
        dict.fromkeys((*SHAPE_FACTS, check.model_fact, *(name for rule in all_rules for name in rule.when.facts)))
    )
    kinds: dict[Hashable, int] = {}  # facts of a group that rules depend on → number of the kind of group
    for group in groups:  # groups are the outer loop, since it is faster to read each of thousands of groups once
        kind = kinds.setdefault((group.failed, group.ranks_and_nodes, group.fact_values(fact_names)), len(kinds))
        for evaluation in evaluations:
            evaluation.add(group, kind)
    verdicts += (verdict for evaluation in evaluations for verdict in evaluation.verdicts)
    if expect:  # where a metric is missing, a rule and a threshold on it give the same verdict
        verdicts = [verdict for verdict in dict.fromkeys(verdicts) if not _is_only_missing_reference(verdict, expect)]
    return verdicts or [Verdict(check.name, CLUSTER, Outcome.UNJUDGED, reasons=(Reason.NO_RULE,))]


def _failed_and_skipped(check: str, measurements: Sequence[Measurement]) -> Iterator[Verdict]:
    """An ERROR for each measurement with an error or an invalid fact, and a SKIP for each that was skipped."""
    for measurement in measurements:
        subject = measurement.subject
        if measurement.error:
            reasons = (Reason.MEASUREMENT_FAILED,)
            yield Verdict(check, subject, Outcome.ERROR, reasons=reasons, detail=measurement.error)
        elif measurement.skipped:
            reasons = (Reason.NOT_APPLICABLE,)
            yield Verdict(check, subject, Outcome.SKIP, reasons=reasons, detail=measurement.skipped)
        for text in invalid_common_facts(measurement.facts):
            yield _invalid_fact_error(check, subject, "", text)


def _at_measured_size(rule: Rule, judged_sizes: Mapping[str, str]) -> Rule:
    """The rule; if the network was too slow for its size, the rule for the size that is judged instead."""
    quantity, _, size = rule.metric.rpartition(".")
    if not (judged_size := judged_sizes.get(size)):
        return rule
    reference = rule.reference and f"{rule.reference.removesuffix(size)}{judged_size}"
    return rule.model_copy(update={"metric": f"{quantity}.{judged_size}", "reference": reference})


def _sizes_not_timed(check: Check, judged_sizes: Mapping[str, str]) -> Iterator[Verdict]:
    """A SKIP for each rule on a size that was not timed, since the network is too slow for this size."""
    for size, judged_size in judged_sizes.items():
        for metric in dict.fromkeys(rule.metric for rule in check.rules if rule.metric.endswith(f".{size}")):
            detail = f"the network is too slow to time {size}; {judged_size} is judged instead"
            yield Verdict(check.name, CLUSTER, Outcome.SKIP, metric, (Reason.NOT_APPLICABLE,), detail)


def _judged_instead(measurements: Sequence[Measurement]) -> Mapping[str, str]:
    """Size that was not timed → size that is judged instead."""
    absent = (each for measurement in measurements for each in measurement.absent if each.instead)
    return {each.metric.rpartition(".")[2]: each.instead.rpartition(".")[2] for each in absent}


def _trial_rules(rules: Sequence[Rule], expect: Mapping[str, Threshold], trial: str) -> Iterator[Rule]:
    """A rule for each threshold of the trial, with meaning, fix and evidence of the check's rule on the metric."""
    by_metric = {rule.metric: rule for rule in rules}
    for metric, threshold in expect.items():
        key = reference_key(metric, tuple(rules))
        if (check_rule := by_metric.get(metric)) is None:
            same_family = (rule for rule in rules if rule.reference and _family(rule.metric) == _family(metric))
            yield Rule(
                metric=metric,
                limits=(_of_trial(threshold),),
                reference=key,
                reference_when=next(same_family).when.facts if key else {},
                meaning=f"threshold set by trial {trial}",
                fix="",
            )
            continue
        yield Rule(
            metric=metric,
            limits=(_of_trial(threshold), *(limit for limit in check_rule.limits if limit.base == OPPOSITE)),
            reference=key,
            reference_when=check_rule.when.facts,
            meaning=check_rule.meaning,
            fix=check_rule.fix,
        )


def _of_trial(threshold: Threshold) -> Limit:
    return Limit(**dict(threshold))


def _family(metric: str) -> str:
    """The metric without its size: ``busbw`` for ``busbw.1GiB``."""
    return metric.partition(".")[0]


def _changed_options(rule: Rule, check: Check, options: Mapping[str, JsonValue]) -> str:
    """The options that the trial changes although the rule needs their default values, as text; empty if none."""
    defaults = {name: check.options.model_fields[name].default for name in rule.when.default_options}
    changed = [name for name, default in defaults.items() if options.get(name) not in (None, [], default)]
    return f"the trial changes {' and '.join(changed)}" if changed else ""


def _is_only_missing_reference(verdict: Verdict, expect: Mapping[str, Threshold]) -> bool:
    """Whether a verdict only says that there is no reference value, while a trial's threshold judges the metric."""
    return (
        verdict.metric in expect
        and verdict.outcome in (Outcome.UNJUDGED, Outcome.SKIP)
        and not _WITHOUT_REFERENCE.isdisjoint(verdict.reasons)
    )


def _threshold_on_other_size(rule: Rule, expect: Mapping[str, Threshold], trial: str) -> tuple[str, Basis] | None:
    """The first metric at another size that has a threshold of the trial, and the basis with this threshold.

    For a rule on ``busbw.8GiB`` the metric can be ``busbw.1GiB``. None if there is no such threshold.
    """
    family = rule.metric.rpartition(".")[0]
    for metric, threshold in expect.items():
        if family and metric != rule.metric and metric.rpartition(".")[0] == family:
            return metric, Basis(BasisKind.TRIAL, trial, threshold.value, threshold.unit, threshold.op)
    return None


class _RuleEvaluation:
    """The ``verdicts`` of one rule on all measurement groups. ``trial``: the name of the trial that sets the rule."""

    def __init__(
        self,
        check: Check,
        rule: Rule,
        trial: str,
        applicability: PeerApplicability,
        evaluators: RuleEvaluators,
        other_size: tuple[str, Basis] | None,
        changed_options: str,
    ) -> None:
        self._check, self._rule, self._trial = check, rule, trial
        self._applicability, self._evaluators = applicability, evaluators
        self._other_size, self._changed_options = other_size, changed_options
        self._conditions = {**rule.when.facts, **rule.reference_when}
        self._needs_shape = bool(rule.reference) or rule.only_warns_by_peers
        self._shared_facts = (*self._conditions, *(SHAPE_FACTS if self._needs_shape else ()))
        self._lookup = metric_lookup(check, rule.metric, rule.reference)
        self._evaluated_kinds: set[int] = set()  # kinds of groups whose facts do not exclude the evaluation
        self.verdicts: list[Verdict] = []

    def add(self, group: MeasurementGroup, kind: int) -> None:
        """Evaluate the rule for one group. Groups of the same ``kind`` agree in all facts that rules depend on."""
        rule, name = self._rule, self._rule.metric
        if self._changed_options:
            self._add_verdict(group.subject, Outcome.SKIP, Reason.NOT_APPLICABLE, self._changed_options)
            return
        if kind not in self._evaluated_kinds or group.has_several_ranks:
            if self._is_excluded(group):
                return
            self._evaluated_kinds.add(kind)
        metrics = group.metrics.get(name, ())
        absent = group.absent(name)
        if not metrics and not group.failed and not absent:  # an error has its own verdict
            self._add_missing_metric(group, "")
        self._add_absent(group, absent)
        if (metrics or absent) and (missing := group.missing_subjects(name)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.METRIC_PARTLY_MISSING, missing)
        if len(metrics) > 1 and (contradiction := _contradicting_values(metrics)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.PLAN_MISMATCH, contradiction)
        verdicts = [self._evaluators.verdict(group, metric) for metric in metrics]
        self.verdicts += _with_asymmetry(rule, metrics, verdicts)

    def _add_verdict(self, subject: str, outcome: Outcome, reason: Reason, detail: str) -> None:
        self.verdicts.append(Verdict(self._check.name, subject, outcome, self._rule.metric, (reason,), detail))

    def _is_excluded(self, group: MeasurementGroup) -> bool:
        """Whether the facts of the group exclude the evaluation of the rule; adds the verdict that says why.

        SKIP if the rule does not apply. ERROR if it applies to a peer, if ranks disagree, or if a fact is invalid. No
        verdict if the rule is for another number of nodes.
        """
        when, facts = self._rule.when.facts, group.facts
        if group.has_several_ranks and (disagreement := group.rank_disagreement(self._shared_facts)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.RANKS_DISAGREE, disagreement)
            return True
        if invalid := self._invalid_fact(group):
            self.verdicts.append(_invalid_fact_error(self._check.name, group.subject, self._rule.metric, invalid))
            return True
        if when.items() <= facts.items() or not (mismatched := mismatched_facts(when, facts)):
            return not self._rule.when.includes(facts.get("nodes"))
        name = mismatched[0]
        reason = unmet_condition(name, when[name], str(facts[name]))
        if peer := self._applicability.applicable_peer(group):
            detail = f"{reason}, but the rule applies to {peer}"
            self._add_verdict(group.subject, Outcome.ERROR, Reason.APPLIES_TO_PEERS_ONLY, detail)
        else:
            self._add_verdict(group.subject, Outcome.SKIP, Reason.NOT_APPLICABLE, reason)
        return True

    def _invalid_fact(self, group: MeasurementGroup) -> str:
        """The first missing or undeclared fact that the rule depends on, as text; empty if all are valid."""
        if not self._conditions.items() <= group.facts.items():
            invalid = invalid_fact(self._rule.when.facts, group) or invalid_fact(self._rule.reference_when, group)
            if invalid or mismatched_facts(self._conditions, group.facts):
                return invalid
        return invalid_shape(self._check, self._lookup, group) if self._needs_shape else ""

    def _add_absent(self, group: MeasurementGroup, absent: Mapping[str, Absent]) -> None:
        """Add a verdict on each subject without a value; one for the group if all have the same reason.

        A threshold of the trial on a metric that no subject has is an ERROR. Subjects that must have a value and could
        not be read are named by the ERROR of the group.
        """
        is_measured = self._rule.metric in group.metrics
        if not is_measured and len({(each.why, each.reason) for each in absent.values()}) == 1:
            absent = {"": next(iter(absent.values()))} if not group.missing_subjects(self._rule.metric) else absent
        for each_subject, each in absent.items():
            subject = each_subject or group.subject
            not_requested = each.why is Why.NOT_REQUESTED or each.instead
            unreadable = each.why is Why.UNREADABLE or (self._trial and not is_measured)
            if group.failed and (not_requested or unreadable):
                continue  # an error has its own verdict
            if each.why is Why.UNREADABLE and each_subject and group.per[self._rule.metric]:
                continue
            if not_requested:
                self._add_missing_metric(group, each.reason)
            elif unreadable:
                self._add_verdict(subject, Outcome.ERROR, Reason.METRIC_MISSING, each.reason)
            elif peer := self._applicability.applicable_peer(group):
                detail = f"{each.reason}, but the rule applies to {peer}"
                self._add_verdict(subject, Outcome.ERROR, Reason.APPLIES_TO_PEERS_ONLY, detail)
            elif each.why is Why.NOT_PERMITTED:
                self._add_verdict(subject, Outcome.UNJUDGED, Reason.FACT_UNREADABLE, each.reason)
            else:
                self._add_verdict(subject, Outcome.SKIP, Reason.NOT_APPLICABLE, each.reason)

    def _add_missing_metric(self, group: MeasurementGroup, not_requested: str) -> None:
        """Add an ERROR; a SKIP if the options omit this size and the trial has a threshold on another size."""
        rule, subject = self._rule, group.subject
        if not_requested and self._other_size:
            metric, basis = self._other_size
            detail, reasons = f"{not_requested}; the threshold is on {metric}", (Reason.THRESHOLD_ON_OTHER_SIZE,)
            verdict = Verdict(self._check.name, subject, Outcome.SKIP, rule.metric, reasons, detail, basis=basis)
        else:
            more = "; the trial has no threshold on another size of this metric" if not_requested else ""
            detail, reasons = f"{not_requested}{more}", (Reason.METRIC_MISSING,)
            verdict = Verdict(
                self._check.name, subject, Outcome.ERROR, rule.metric, reasons, detail, meaning=rule.meaning
            )
        self.verdicts.append(verdict)


def _invalid_fact_error(check: str, subject: str, metric: str, detail: str) -> Verdict:
    fix = (
        f"run the check again: `seatrial run TRIAL --only {check}`; records of earlier versions can lack a fact. "
        "If it is missing or invalid in a new record too, report a defect of seatrial"
    )
    return Verdict(check, subject, Outcome.ERROR, metric, (Reason.FACT_INVALID,), detail, fix=fix)


def _contradicting_values(metrics: Sequence[Metric]) -> str:
    """The subjects with several different values of one metric, as text; empty if there are none."""
    values = {metric.subject: metric.value for metric in metrics}
    if len(values) == len(metrics):
        return ""
    several = [metric.subject for metric in metrics if metric.value != values[metric.subject]]
    return f"several different values of {', '.join(several)}" if several else ""


def _with_asymmetry(rule: Rule, metrics: Sequence[Metric], verdicts: Sequence[Verdict]) -> Iterator[Verdict]:
    """The verdicts on pairs. PASS or SKIP becomes WARN below a share of the opposite direction's value."""
    if (share := rule.share(OPPOSITE, Outcome.WARN)) is None:
        yield from verdicts
        return
    values = {metric.subject: metric.value for metric in metrics}
    for metric, verdict in zip(metrics, verdicts, strict=True):
        opposite_value = values.get(opposite_direction(metric.subject), 0.0)
        if metric.value >= share * opposite_value:
            yield verdict
            continue
        was_good = verdict.outcome in PASS_OR_SKIP
        yield replace(
            verdict,
            outcome=Outcome.WARN if was_good else verdict.outcome,
            reasons=(*verdict.reasons, Reason.ASYMMETRIC),
            opposite_value=opposite_value,
            basis=replace(verdict.basis, asymmetry_limit=share) if verdict.basis else None,
            meaning=rule.meaning,
            evidence=measured_evidence(metric) if was_good else verdict.evidence,
            fix=rule.fix,
        )
