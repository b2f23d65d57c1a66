"""The evaluators of a rule: one for each device model, shape, unit and peer group. Pure.

Thousands of subjects share an evaluator, so that their reference value and threshold are looked up once.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace

from seatrial.checks.base import Check
from seatrial.hardware.references import NO_PEERS, PeerGroup, References
from seatrial.judge.groups import MeasurementGroup, PeerGroups
from seatrial.judge.plausibility import metric_lookup
from seatrial.judge.samples import violation
from seatrial.judge.thresholds import PASS_OR_SKIP, RuleEvaluator, evidence_text, measured_evidence
from seatrial.model import Basis, BasisKind, Metric, Outcome, Reason, Rule, Verdict
from seatrial.model.rule import PEERS

_PASS, _SKIP = PASS_OR_SKIP  # looked up once, since enum member access is slow
_FAIL_OR_ERROR = (Outcome.FAIL, Outcome.ERROR)
_TOO_HIGH = frozenset({Reason.IMPLAUSIBLY_HIGH, Reason.ABOVE_PHYSICAL_LIMIT})


class RuleEvaluators:
    """The evaluators of one rule, one for each device model, shape, unit and peer group."""

    def __init__(
        self,
        check: Check,
        own_rules: Sequence[Rule],
        rule: Rule,
        trial: str,
        references: References,
        peer_groups: PeerGroups | None,
        *,
        override: bool = False,
    ) -> None:
        self._check, self._rule, self._trial = check.name, rule, trial
        check_rules = [each for each in own_rules if each.metric == rule.metric]
        self._is_only_threshold = bool(trial) and (override or not check_rules)
        self._check_threshold = next((each.threshold for each in check_rules if each.threshold), None)
        declared = check.declaration(rule.metric)
        self._unit = declared.unit if declared else None
        self._references, self._peer_groups = references, peer_groups
        self._lookup = metric_lookup(check, rule.metric, rule.reference)
        self._may_exceed_100 = bool(declared and declared.may_exceed_100)
        self._signed = not check_rules or bool(declared and declared.signed)
        self._reference_optional = bool(declared and declared.reference_optional)
        self._evaluators: dict[tuple[object, ...], RuleEvaluator] = {}
        # Without a reference, a threshold of the check gives the same verdict on all subjects with the same value
        self._is_subject_independent = rule.threshold is not None and not rule.reference and not trial
        self._passed: dict[tuple[float, str], Verdict] = {}  # (value, unit) → its PASS
        self._last_key: tuple[MeasurementGroup, PeerGroup, PeerGroup, str] | None = None
        self._last_evaluator: RuleEvaluator
        self._limits_group: MeasurementGroup | None = None
        self._limits: dict[str, float] = {}

    def verdict(self, group: MeasurementGroup, metric: Metric) -> Verdict:
        """The verdict on a metric of ``group``."""
        value, unit = metric.value, metric.unit
        if unit != self._unit and self._unit is not None:
            detail, reasons = self._unit, (Reason.UNIT_MISMATCH,)
            return Verdict(self._check, metric.subject, Outcome.ERROR, metric.name, reasons, detail, value, unit)
        if self._is_subject_independent and not metric.samples and (same := self._passed.get((value, unit))):
            return Verdict(self._check, metric.subject, _PASS, metric.name, (), "", value, unit, same.basis)
        peers = node_peers = NO_PEERS
        if self._peer_groups:
            peers = self._peer_groups.peer_group(group.model, metric.subject)
            if self._rule.share(PEERS):
                node_peers = self._peer_groups.node_peer_group(group.model, metric.subject)
        key = group, peers, node_peers, metric.unit
        if key != self._last_key:  # successive subjects often have the same key, such as the pairs of a node
            self._last_key, self._last_evaluator = key, self._evaluator(group, peers, node_peers, metric.unit)
        verdict = self._last_evaluator.verdict(metric)
        if self._rule.single and verdict.outcome not in _FAIL_OR_ERROR:
            verdict = self._compare_with_single(group, metric, verdict)
        if verdict.outcome is _PASS:
            if self._is_subject_independent:
                self._passed[value, unit] = verdict
            return verdict
        if verdict.outcome is _SKIP or verdict.fix:
            return verdict
        rule, evidence = self._rule, measured_evidence(metric) + evidence_text(metric)
        # The rule's meaning is that of a bad value, and does not fit a value that is too high
        meaning = "" if _TOO_HIGH.intersection(verdict.reasons) else rule.meaning
        return replace(verdict, meaning=meaning, evidence=evidence, fix=rule.fix)

    def _compare_with_single(self, group: MeasurementGroup, metric: Metric, verdict: Verdict) -> Verdict:
        """A bad verdict if the value is far below that of one GPU at a time; else ``verdict``; a SKIP becomes PASS."""
        if group is not self._limits_group:
            self._limits_group, self._limits = group, self._concurrent_limits(group)
        limit = self._limits.get(metric.subject, 0.0)
        basis = Basis(BasisKind.RULE, "", limit, metric.unit, ">")
        if metric.value > limit:
            was_skipped = verdict.outcome is _SKIP
            return self._last_evaluator.make(metric, _PASS, basis=basis) if was_skipped else verdict
        outcome, reasons, interval = violation(metric, limit, lambda value: value > limit)
        return self._last_evaluator.make(metric, outcome, *reasons, basis=basis, interval=interval)

    def _concurrent_limits(self, group: MeasurementGroup) -> dict[str, float]:
        """GPU → the value that it must exceed while all GPUs of its node are measured concurrently.

        The limit is a share of the GPU's value of another metric / the number of GPUs on its node.
        """
        gpus = Counter(metric.subject.partition("/")[0] for metric in group.metrics[self._rule.metric])
        limit = self._rule.single
        assert limit is not None
        return {
            single.subject: limit.value * single.value / gpus[single.subject.partition("/")[0]]
            for single in group.metrics.get(limit.single_metric, ())
            if single.subject.partition("/")[0] in gpus
        }

    def _evaluator(self, group: MeasurementGroup, peers: PeerGroup, node_peers: PeerGroup, unit: str) -> RuleEvaluator:
        reference_applies = self._rule.reference_when.items() <= group.facts.items()
        key = (group.shape, reference_applies, peers.node, node_peers.node, unit)
        if key not in self._evaluators:
            self._evaluators[key] = RuleEvaluator(
                self._check,
                self._rule,
                unit,
                group.facts,
                self._trial,
                self._references,
                peers,
                node_peers,
                self._lookup,
                self._may_exceed_100,
                self._signed,
                self._reference_optional,
                self._is_only_threshold,
                self._check_threshold,
            )
        return self._evaluators[key]
