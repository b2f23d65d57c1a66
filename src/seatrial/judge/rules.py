"""Evaluates the rules of a check on its measurements. No I/O: equal inputs give equal verdicts."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from functools import cached_property, partial

from pydantic import JsonValue

from seatrial.checks.check import Check
from seatrial.checks.declare import is_possible, possible_values
from seatrial.hardware.links import COLLECTIVE
from seatrial.hardware.references import NO_REFERENCES, References
from seatrial.hardware.training_flops import missing_work, training_facts
from seatrial.judge.groups import (
    SHAPE_FACTS,
    Facts,
    MeasurementGroup,
    PeerGroups,
    fact_text,
    gpu_model,
    invalid_common_facts,
    measurement_groups,
)
from seatrial.judge.limits import RuleLimits
from seatrial.judge.plausibility import metric_shape, reference_key, weakened_rule
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
_NO_RULE = "measured, but no rule evaluates it"
_WITHOUT_REFERENCE = frozenset({Reason.NO_REFERENCE, Reason.NO_THRESHOLD})


def judge_check(
    check: Check,
    measurements: Sequence[Measurement],
    expect: Mapping[str, Threshold],
    trial: str,
    references: References = NO_REFERENCES,
    *,
    override: bool = False,
    options: Mapping[str, JsonValue] | None = None,
) -> list[Verdict]:
    """All verdicts on one check: on failed measurements, by its own rules, then by the trial's thresholds (``expect``).

    With ``override`` the thresholds replace the rules on the same metrics, except where they would pass broken
    hardware. If a rule lacks a reference value and a threshold judges its metric, the verdict of the rule is omitted.
    A metric that a rule needs is an ERROR on each subject that did not measure it. A check without a verdict is
    UNJUDGED. ``trial`` is the name of the trial, ``options`` are the options that the trial sets.
    """
    if not measurements:
        return [Verdict(check.name, CLUSTER, Outcome.ERROR, reasons=(Reason.NOT_MEASURED,))]
    instead = {  # size that the network was too slow for → size that is judged instead
        each.metric.rpartition(".")[2]: each.instead.rpartition(".")[2]
        for measurement in measurements
        for each in measurement.absent
        if each.instead
    }
    declared_rules = tuple(_at_measured_size(rule, instead) for rule in check.rules)
    check_rules = [
        rule
        for rule in declared_rules
        if not (override and rule.metric in expect)
        or weakened_rule(expect[rule.metric], "", rule.metric, declared_rules)
    ]
    all_rules = [*check_rules, *_trial_rules(declared_rules, expect, trial)]
    names = {name for rule in all_rules for name in (rule.metric, *rule.other_metrics)}
    groups = measurement_groups(check, [each for each in measurements if not each.skipped], names)
    with_peers = {rule.metric for rule in all_rules if rule.reference or not rule.threshold}
    peers = {name: PeerGroups(name, groups) for name in with_peers}
    evaluations = []
    for rule in all_rules:
        rule_trial = "" if rule in check_rules else trial
        limits = RuleLimits(check, rule, rule_trial, references, peers.get(rule.metric), override=override)
        other_size = _threshold_on_other_size(rule, expect, trial)
        evaluations.append(
            _RuleEvaluation(check, limits, groups, other_size, _changed_options(rule, check, options or {}))
        )
    fact_names = tuple(
        dict.fromkeys((*SHAPE_FACTS, check.model_fact, *(name for rule in all_rules for name in rule.when.facts)))
    )
    kinds: dict[Hashable, int] = {}  # facts of a group that rules depend on → number of the kind of group
    for group in groups:  # groups are the outer loop, since it is faster to read each of thousands of groups once
        kind = kinds.setdefault((group.failed, group.ranks_and_nodes, group.fact_values(fact_names)), len(kinds))
        for evaluation in evaluations:
            evaluation.add(group, kind)
    verdicts = list(_failed_and_skipped(check.name, measurements))
    for size, judged_size in instead.items():
        detail = f"the network is too slow to time {size}; {judged_size} is judged instead"
        not_timed = dict.fromkeys(rule.metric for rule in check.rules if rule.metric.endswith(f".{size}"))
        skipped = partial(Verdict, check.name, CLUSTER, Outcome.SKIP, reasons=(Reason.NOT_APPLICABLE,), detail=detail)
        verdicts += [skipped(metric=metric) for metric in not_timed]
    verdicts += (verdict for evaluation in evaluations for verdict in evaluation.verdicts)
    if expect:  # where a metric is missing, a rule and a threshold on it give the same verdict
        verdicts = [verdict for verdict in dict.fromkeys(verdicts) if not _is_only_missing_reference(verdict, expect)]
    return verdicts or [Verdict(check.name, CLUSTER, Outcome.UNJUDGED, reasons=(Reason.NO_RULE,), detail=_NO_RULE)]


def _at_measured_size(rule: Rule, instead: Mapping[str, str]) -> Rule:
    """The rule; if the network was too slow for its size, the rule for the size that is judged instead."""
    quantity, _, size = rule.metric.rpartition(".")
    if not (judged_size := instead.get(size)):
        return rule
    reference = rule.reference and f"{rule.reference.removesuffix(size)}{judged_size}"
    return rule.model_copy(update={"metric": f"{quantity}.{judged_size}", "reference": reference})


def _trial_rules(rules: Sequence[Rule], expect: Mapping[str, Threshold], trial: str) -> Iterator[Rule]:
    """A rule for each threshold of the trial, with meaning, fix and evidence of the check's rule on the metric."""
    by_metric = {rule.metric: rule for rule in rules}
    for metric, threshold in expect.items():
        key, own = reference_key(metric, tuple(rules)), by_metric.get(metric)
        family = metric.partition(".")[0]
        same_family = (rule for rule in rules if rule.reference and rule.metric.partition(".")[0] == family)
        like = own or (next(same_family) if key else None)
        opposite = [limit for limit in own.limits if limit.base == OPPOSITE] if own else []
        yield Rule(
            metric=metric,
            limits=(Limit(**dict(threshold)), *opposite),
            reference=key,
            reference_when=like.when.facts if like else {},
            meaning=own.meaning if own else f"threshold set by trial {trial}",
            fix=own.fix if own else "",
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


def _changed_options(rule: Rule, check: Check, options: Mapping[str, JsonValue]) -> str:
    """The options that the trial changes although the rule needs their default values, as text; empty if none."""
    defaults = {name: check.options.model_fields[name].default for name in rule.when.default_options}
    changed = [name for name, default in defaults.items() if options.get(name) not in (None, [], default)]
    return f"the trial changes {' and '.join(changed)}" if changed else ""


def _failed_and_skipped(check: str, measurements: Sequence[Measurement]) -> Iterator[Verdict]:
    """An ERROR for each measurement with an error or an invalid fact, and a SKIP for each that was skipped."""
    for measurement in measurements:
        found = [(Outcome.ERROR, Reason.FACT_INVALID, text) for text in invalid_common_facts(measurement.facts)]
        if measurement.error:
            found.append((Outcome.ERROR, Reason.MEASUREMENT_FAILED, measurement.error))
        elif measurement.skipped:
            found.append((Outcome.SKIP, Reason.NOT_APPLICABLE, measurement.skipped))
        for outcome, reason, detail in found:
            yield Verdict(check, measurement.subject, outcome, reasons=(reason,), detail=detail)


def _is_only_missing_reference(verdict: Verdict, expect: Mapping[str, Threshold]) -> bool:
    """Whether a verdict only says that there is no reference value, while a trial's threshold judges the metric."""
    return (
        verdict.metric in expect
        and verdict.outcome in (Outcome.UNJUDGED, Outcome.SKIP)
        and not _WITHOUT_REFERENCE.isdisjoint(verdict.reasons)
    )


class _RuleEvaluation:
    """The ``verdicts`` of one rule on all measurement groups."""

    def __init__(
        self,
        check: Check,
        limits: RuleLimits,
        groups: Sequence[MeasurementGroup],
        other_size: tuple[str, Basis] | None,
        changed_options: str,
    ) -> None:
        self._check, self._rule, self._limits, self._groups = check, limits.rule, limits, groups
        self._other_size, self._changed_options = other_size, changed_options
        self._conditions = {**self._rule.when.facts, **self._rule.reference_when}
        self._bases = [limit.base for limit in self._rule.limits]
        needs_work = self._bases and training_facts(self._rule.metric)
        self._needs_shape = bool(self._rule.reference or self._rule.only_warns_by_peers or needs_work)
        self._shared_facts = (*self._conditions, *(SHAPE_FACTS if self._needs_shape else ()))
        self._evaluated_kinds: set[int] = set()  # kinds of groups whose facts do not exclude the evaluation
        self.verdicts: list[Verdict] = []

    def add(self, group: MeasurementGroup, kind: int) -> None:
        """Evaluate the rule for one group. Groups of the same ``kind`` agree in all facts that rules depend on."""
        name = self._rule.metric
        if self._changed_options:
            self._add_verdict(group.subject, Outcome.SKIP, Reason.NOT_APPLICABLE, self._changed_options)
            return
        if kind not in self._evaluated_kinds or group.has_several_ranks:
            if self._is_excluded(group):
                return
            self._evaluated_kinds.add(kind)
        metrics, absent = group.metrics.get(name, ()), group.absent(name)
        if not metrics and not group.failed and not absent:  # an error has its own verdict
            self._add_missing_metric(group, "")
        self._add_absent(group, absent)
        if (metrics or absent) and (missing := group.missing_subjects(name)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.METRIC_PARTLY_MISSING, missing)
        if len(metrics) > 1 and (contradiction := _contradicting_values(metrics)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.PLAN_MISMATCH, contradiction)
        if metrics and (invalid := missing_work(name, self._bases, group.facts)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.FACT_INVALID, invalid)
        self.verdicts += self._limits.verdicts(group, metrics)

    def _add_verdict(self, subject: str, outcome: Outcome, reason: Reason, detail: str) -> None:
        self.verdicts.append(Verdict(self._check.name, subject, outcome, self._rule.metric, (reason,), detail))

    def _is_excluded(self, group: MeasurementGroup) -> bool:
        """Whether the facts of the group exclude the evaluation of the rule; adds the verdict that says why.

        SKIP if the rule does not apply. ERROR if it applies to a peer, if ranks disagree, or if a fact is invalid. No
        verdict if the rule is for another number of nodes.
        """
        when, facts = self._rule.when.facts, group.facts
        if group.has_several_ranks and (disagreement := group.rank_disagreement(self._shared_facts)):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.FACT_INVALID, disagreement)
            return True
        if invalid := self._invalid_fact(group):
            self._add_verdict(group.subject, Outcome.ERROR, Reason.FACT_INVALID, invalid)
            return True
        if when.items() <= facts.items() or not (mismatched := _mismatched(when, facts)):
            return not self._rule.when.includes(facts.get("nodes"))
        name = mismatched[0]
        reason = f"{name.replace('_', ' ')} is {facts[name]}, required: {when[name]}"
        self._add_not_applicable(group, group.subject, reason, Outcome.SKIP)
        return True

    def _add_not_applicable(self, group: MeasurementGroup, subject: str, reason: str, outcome: Outcome) -> None:
        """Add ``outcome``; an ERROR if the rule applies to an equal GPU."""
        if peer := self._applicable_peer(group):
            detail = f"{reason}, but the rule applies to {peer}"
            self._add_verdict(subject, Outcome.ERROR, Reason.FACT_INVALID, detail)
        else:
            code = Reason.NOT_APPLICABLE if outcome is Outcome.SKIP else Reason.FACT_INVALID
            self._add_verdict(subject, outcome, code, reason)

    def _applicable_peer(self, group: MeasurementGroup) -> str:
        """A subject with the same device model as ``group`` to which the rule applies; empty if there is none.

        If ``group`` has no GPU model, its GPU may be lost, so any subject with a GPU is a peer. There is no peer if the
        metric varies by device, such as one of optional NVLink bridges. Checks of nodes have no peers, since nodes may
        differ.
        """
        declared = self._check.declaration(self._rule.metric)
        if not group.is_per_gpu or (declared and declared.varies_by_device):
            return ""
        model = _device_model(group.facts)
        if model in self._subject_by_model or gpu_model(group.facts):
            return self._subject_by_model.get(model, "")
        return next((subject for (gpu, _), subject in self._subject_by_model.items() if gpu), "")

    @cached_property
    def _subject_by_model(self) -> dict[tuple[str, str], str]:
        """Device model → a subject with a value to which the rule applies."""
        return {
            _device_model(group.facts): group.subject
            for group in reversed(self._groups)
            if self._rule.metric in group.metrics and not _mismatched(self._rule.when.facts, group.facts)
        }

    def _invalid_fact(self, group: MeasurementGroup) -> str:
        """The first missing or impossible fact that the rule depends on, as text; empty if all are valid.

        A missing fact is valid if the check failed, or if another fact makes the rule not applicable.
        """
        facts = group.facts
        if not self._conditions.items() <= facts.items():
            for required in (self._rule.when.facts, self._rule.reference_when):
                mismatched = _mismatched(required, facts)
                missing = [] if mismatched or group.failed else [name for name in required if name not in facts]
                if invalid := [name for name in mismatched if not is_possible(name, facts[name])] + missing:
                    return fact_text(invalid[0], facts, possible_values(invalid[0]))
            if _mismatched(self._conditions, facts):
                return ""
        return self._invalid_shape(group) if self._needs_shape and not group.failed else ""

    def _invalid_shape(self, group: MeasurementGroup) -> str:
        """The first shape fact (gpu, world_size, nodes) with an invalid value, as text; empty if all are valid.

        Shape facts select a reference value. For a collective, they must be the numbers of measured ranks and nodes.
        """
        lookup = self._limits.lookup
        if group.invalid_shape or lookup.bounded_by != COLLECTIVE or not any(group.ranks_and_nodes):
            return group.invalid_shape
        world_size, nodes = metric_shape(self._check, lookup, *group.ranks_and_nodes)
        expected = {"world_size": world_size, "nodes": nodes}
        wrong = next((name for name, count in expected.items() if group.facts[name] != count), "")
        return fact_text(wrong, group.facts, f"{expected[wrong]}, as measured") if wrong else ""

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
            unreadable = each.why is Why.UNREADABLE or (self._limits.trial and not is_measured)
            if group.failed and (not_requested or unreadable):
                continue  # an error has its own verdict
            if each.why is Why.UNREADABLE and each_subject and group.per[self._rule.metric] not in (None, "other node"):
                continue
            if not_requested:
                self._add_missing_metric(group, each.reason)
            elif unreadable:
                self._add_verdict(subject, Outcome.ERROR, Reason.METRIC_MISSING, each.reason)
            else:
                outcome = Outcome.UNJUDGED if each.why is Why.NOT_PERMITTED else Outcome.SKIP
                self._add_not_applicable(group, subject, each.reason, outcome)

    def _add_missing_metric(self, group: MeasurementGroup, not_requested: str) -> None:
        """Add an ERROR; a SKIP if the options omit this size and the trial has a threshold on another size."""
        rule, subject = self._rule, group.subject
        if not_requested and self._other_size:
            metric, basis = self._other_size
            detail, reasons = f"{not_requested}; the threshold is on {metric}", (Reason.THRESHOLD_ON_OTHER_SIZE,)
            verdict = Verdict(self._check.name, subject, Outcome.SKIP, rule.metric, reasons, detail, basis=basis)
        else:
            more = "; the trial has no threshold on another size of this metric" if not_requested else ""
            detail, missing, meaning = not_requested + more, (Reason.METRIC_MISSING,), rule.meaning
            verdict = Verdict(self._check.name, subject, Outcome.ERROR, rule.metric, missing, detail, meaning=meaning)
        self.verdicts.append(verdict)


def _mismatched(required: Mapping[str, str], facts: Facts) -> list[str]:
    """The names of the facts that differ from the values in ``required``; missing facts do not count."""
    return [name for name, value in required.items() if facts.get(name, value) != value]


def _device_model(facts: Facts) -> tuple[str, str]:
    """(GPU model, CPU model); the CPU model is empty if there is a GPU."""
    gpu = gpu_model(facts)
    return gpu, "" if gpu else str(facts.get("cpu") or "")


def _contradicting_values(metrics: Sequence[Metric]) -> str:
    """The subjects with several different values of one metric, as text; empty if there are none."""
    values = {metric.subject: metric.value for metric in metrics}
    if len(values) == len(metrics):
        return ""
    several = [metric.subject for metric in metrics if metric.value != values[metric.subject]]
    return f"several different values of {', '.join(several)}" if several else ""
