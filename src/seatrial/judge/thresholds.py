"""Evaluation of one rule: thresholds, reference values, peers, and the plausibility of the measured value. Pure."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import NamedTuple

from pydantic import JsonValue

from seatrial.hardware.bounds import Bound, MetricLookup, hardware_bound
from seatrial.hardware.references import MODEL_SEPARATOR, NO_PEERS, PeerGroup, Reference, References
from seatrial.judge.plausibility import (
    LAX_RATIO,
    TIME_UNITS,
    above_reference,
    lax_reference,
    reference_text,
    relative_strictness,
    threshold_error,
    undetected_slowdown,
)
from seatrial.judge.samples import slow_windows, violation
from seatrial.model import (
    WORST_FIRST,
    Basis,
    BasisKind,
    Metric,
    Outcome,
    PlausibleRange,
    Reason,
    Rule,
    Threshold,
    Verdict,
    format_value,
    plausible_range,
)
from seatrial.model.rule import BOUND, PEERS, REFERENCE, Limit

# A value above this multiple of the reference value is a measurement error, or the reference value is wrong. The
# largest known gain by software is NVLink SHARP's: from 370 to 480 GB/s busbw of all-reduce on eight H100
# (NVIDIA/nccl#1455).
MAX_PLAUSIBLE_RATIO = 1.5
# The same for a bound of the network. Above it, a port rate was misread, or NCCL used an algorithm that is not in its
# log; SHARP reaches 480 GB/s where rings are bounded by 400.
MAX_RATIO_OF_BOUND = 1.25
# A metric without a published value gets a PASS only if its baseline value was learned from at least this many runs.
# One bad run among three does not determine their median.
MIN_BASELINE_RUNS = 3
_LEARN_FROM_OTHERS = f"seatrial baseline learn RUN… with at least {MIN_BASELINE_RUNS} other runs of this hardware"
PASS_OR_SKIP = (Outcome.PASS, Outcome.SKIP)
_PASS, _SKIP = PASS_OR_SKIP  # looked up once, since enum member access is slow
_FAIL_OR_ERROR = (Outcome.FAIL, Outcome.ERROR)
_NEVER_NEGATIVE = ("B", "s", "ms", "us", "count")  # units; rates are not negative either, see metric.signed
_LOWER_BOUNDS = (">", ">=")
_MAX_FACT_CHARS = 600  # a longer fact is truncated in the evidence; the record has the whole fact


@dataclass
class RuleEvaluator:
    """Evaluates one rule of ``check``, for metrics in ``unit`` and for the device model, ranks and nodes in ``facts``.

    ``trial``: name of the trial if the rule is a threshold of the trial; empty for a rule of the check.
    ``may_exceed_100``, ``signed``, ``reference_optional``: see declare.metric. ``is_only_threshold``: no rule of the
    check is evaluated on the metric, since the check has none or the trial overrides it. ``check_threshold``: the
    threshold of the check on the metric, if any.
    """

    check: str
    rule: Rule
    unit: str
    facts: Mapping[str, JsonValue]
    trial: str
    references: References
    peers: PeerGroup
    node_peers: PeerGroup
    lookup: MetricLookup
    may_exceed_100: bool
    signed: bool
    reference_optional: bool
    is_only_threshold: bool
    check_threshold: Threshold | None

    def verdict(self, metric: Metric) -> Verdict:
        """The verdict on ``metric``; RuleEvaluators adds the rule's meaning, evidence and fix."""
        value = metric.value
        if value > self._limit and self._bound:
            return above_physical_limit(self.check, metric, self._bound)
        if value < 0:
            rule, never_negative = self.rule, "/s" in metric.unit or metric.unit in _NEVER_NEGATIVE
            if never_negative or (rule.threshold and not self.signed and rule.threshold.is_met_by(value)):
                return self.make(metric, Outcome.ERROR, Reason.NEGATIVE_VALUE)
        if (abs(value) if self.signed else value) not in self._plausible_range:
            detail = f"{self._plausible_range} {metric.unit}".rstrip()
            return self.make(metric, Outcome.ERROR, Reason.OUTSIDE_PLAUSIBLE_RANGE, detail=detail)
        verdict = self._evaluate(metric)
        if verdict.outcome in _FAIL_OR_ERROR:
            return verdict
        below_peers = self._below_peers(metric) if self.rule.share(PEERS) else None
        judge_windows = metric.samples and not self.references.cpu_only  # the limits come from GPU nodes
        worse = below_peers or (slow_windows(self.check, metric) if judge_windows else None)
        return worse if worse and WORST_FIRST.index(worse.outcome) <= WORST_FIRST.index(verdict.outcome) else verdict

    def make(
        self,
        metric: Metric,
        outcome: Outcome,
        *reasons: Reason,
        basis: Basis | None = None,
        ratio: float | None = None,
        detail: str = "",
        interval: tuple[float, float] | None = None,
    ) -> Verdict:
        """A verdict on ``metric``."""
        return Verdict(
            self.check,
            metric.subject,
            outcome,
            metric.name,
            reasons,
            detail,
            metric.value,
            metric.unit,
            basis,
            ratio,
            interval=interval,
        )

    @cached_property
    def _plausible_range(self) -> PlausibleRange:
        return plausible_range(self.unit, self.may_exceed_100)

    @cached_property
    def _limit(self) -> float:
        return self._bound.value if self._bound else math.inf

    @cached_property
    def _bound(self) -> Bound | None:
        """The hardware bound of the metric; None for training metrics, which ``values_above_peak`` evaluates.

        Also None for several nodes: NCCL may use an algorithm that no model covers and that sends less data.
        """
        if not self.lookup.bounded_by or self.facts.get("nodes") not in (None, 1):
            return None
        bound = hardware_bound(self.lookup, self.facts, self.references)
        return bound if bound and bound.unit == self.unit else None

    @cached_property
    def _evaluate(self) -> Callable[[Metric], Verdict]:
        rule = self.rule
        if rule.threshold is not None:
            return _ThresholdEvaluator(self, rule.threshold).verdict
        if rule.only_warns_by_peers:
            return self._compare_with_peers
        if (share := rule.share(BOUND)) is not None:
            return self._comparison_with_peak(share)
        peers = NO_PEERS if self.reference_optional else self.peers
        reference = self.references.find(self.lookup.reference_key, self.facts, peers, self.unit)
        if isinstance(reference, Reference):
            if reference.unit != self.unit:
                return lambda metric: self.make(metric, Outcome.UNJUDGED, Reason.UNIT_MISMATCH, detail=reference.unit)
            is_site = reference.kind is BasisKind.SITE
            return (_SiteEvaluator(self) if is_site else _ReferenceEvaluator(self, reference)).verdict
        if self.reference_optional and not self.has_unknown_model:
            return lambda metric: self.make(metric, Outcome.SKIP, Reason.NO_THRESHOLD, detail=reference)
        return lambda metric: self.make(metric, Outcome.UNJUDGED, Reason.NO_REFERENCE, detail=reference)

    @cached_property
    def has_unknown_model(self) -> bool:
        """Whether one of the device models has no SKU data."""
        models = str(self.facts.get("gpu") or "").split(MODEL_SEPARATOR)
        return any(isinstance(self.references.sku(model), str) for model in models)

    def _comparison_with_peak(self, share: float) -> Callable[[Metric], Verdict]:
        """FAIL below a share of the GPU's peak speed for this training; SKIP if the peak is unknown."""
        peak = hardware_bound(self.lookup, self.facts, self.references)
        if peak is None or peak.unit != self.unit:
            detail = "the peak speed of this training on this GPU model is unknown"
            return lambda metric: self.make(metric, Outcome.SKIP, Reason.NO_THRESHOLD, detail=detail)
        kind, source = BasisKind.PHYSICAL_LIMIT, peak.derivation
        basis = Basis(kind, "the hardware", peak.value, peak.unit, source=source, fail_below=share)

        def compare(metric: Metric) -> Verdict:
            ratio = metric.value / peak.value
            if ratio >= share:
                return self.make(metric, _PASS, basis=basis, ratio=ratio)
            return self.make(metric, Outcome.FAIL, Reason.THRESHOLD_VIOLATED, basis=basis, ratio=ratio)

        return compare

    def _compare_with_peers(self, metric: Metric) -> Verdict:
        """WARN for a low outlier of the peer group; a uniform slowdown of the group is not detected."""
        if not self.peers.gives_reference:
            return self.make(metric, Outcome.SKIP, Reason.TOO_FEW_PEERS)
        basis = self._peers_basis
        ratio = metric.value / self.peers.median
        if ratio < (basis.warn_below or 0.0) and self.peers.is_low_outlier(metric.value):
            return self.make(metric, Outcome.WARN, Reason.BELOW_WARNING_THRESHOLD, basis=basis, ratio=ratio)
        return self.make(metric, _PASS, basis=basis, ratio=ratio)

    def _below_peers(self, metric: Metric) -> Verdict | None:
        """The verdict on a metric below the limit of its peers, on its node or on all nodes; else None.

        Noise that all GPUs of a node share, such as the temperature of the room, does not affect the comparison on the
        node.
        """
        for peers, limit in self._peer_limits:
            if metric.value < limit:
                name = f"{len(peers.values)} subjects on {peers.model}" + (f" in {peers.node}" if peers.node else "")
                share = self.rule.share(PEERS)
                basis = Basis(BasisKind.PEERS, name, peers.median, self.unit, fail_below=share)
                outcome, reasons, interval = violation(metric, limit, limit.__le__)  # met if limit <= value
                ratio = metric.value / peers.median
                return self.make(metric, outcome, *reasons, basis=basis, ratio=ratio, interval=interval)
        return None

    @cached_property
    def _peer_limits(self) -> list[tuple[PeerGroup, float]]:
        """The peers on the node and on all nodes, each with the value below which the rule fails."""
        share = self.rule.share(PEERS) or 0.0
        return [(peers, share * peers.median) for peers in (self.node_peers, self.peers) if peers.gives_reference]

    @cached_property
    def _peers_basis(self) -> Basis:
        name = f"{len(self.peers.values)} subjects on {self.peers.model}"
        return Basis(
            BasisKind.PEERS, name, self.peers.median, self.unit, warn_below=self.rule.share(PEERS, Outcome.WARN)
        )


class _ReferenceEvaluator:
    """Comparison with one reference: a baseline or SKU value, the bound of the network, or the median of the peers."""

    def __init__(self, evaluator: RuleEvaluator, reference: Reference) -> None:
        rule = evaluator.rule
        self._check, self._make, self._peers = evaluator.check, evaluator.make, evaluator.peers
        self._reference = reference
        self._with_ring = evaluator.references.with_ring(evaluator.lookup.reference_key, evaluator.facts, reference)
        self._fail_below = reference.required_value(rule.share(REFERENCE) or 0.0) / reference.value
        warn_below = (
            rule.share(REFERENCE, Outcome.WARN) or 0.0 if reference.warn_below is None else reference.warn_below
        )
        self._warn_below = max(warn_below, self._fail_below)
        is_bound = reference.kind is BasisKind.FABRIC_MODEL
        self._max_ratio = MAX_RATIO_OF_BOUND if is_bound else MAX_PLAUSIBLE_RATIO
        self._basis = Basis(
            reference.kind,
            reference.name,
            reference.value,
            reference.unit,
            source=reference.source,
            fail_below=self._fail_below,
            warn_below=warn_below,
            arithmetic=reference.arithmetic,
            lax_reason=lax_reference(reference, evaluator.lookup, evaluator.facts, evaluator.references),
        )

    def verdict(self, metric: Metric) -> Verdict:
        reference, fail_below, basis = self._reference, self._fail_below, self._basis
        ratio = metric.value / reference.value
        below_peers = (Reason.BELOW_PEERS,) if self._peers.is_low_outlier(metric.value) else ()
        if reference.kind is BasisKind.PEERS and (ratio >= fail_below or not below_peers):
            reasons = (*below_peers, Reason.NO_ABSOLUTE_REFERENCE)
            return self._make(metric, Outcome.UNJUDGED, *reasons, basis=basis, ratio=ratio, detail=reference.source)
        if ratio > self._max_ratio:
            return self._make(metric, Outcome.UNJUDGED, Reason.IMPLAUSIBLY_HIGH, basis=basis, ratio=ratio)
        if ratio >= self._warn_below:
            if below_peers:
                return self._make(metric, Outcome.WARN, *below_peers, basis=basis, ratio=ratio)
            return Verdict(
                self._check, metric.subject, _PASS, metric.name, (), "", metric.value, metric.unit, basis, ratio
            )
        if ratio >= fail_below:
            return self._make(metric, Outcome.WARN, Reason.BELOW_WARNING_THRESHOLD, basis=basis, ratio=ratio)
        required = fail_below * reference.value
        outcome, reasons, interval = violation(metric, required, lambda value: value >= required)
        if outcome is Outcome.FAIL and (ring := self._with_ring) and metric.value >= ring.required_value(fail_below):
            texts = [f"{metric.value / each.value:.1%} of {reference_text(each)}" for each in (reference, ring)]
            detail = f"NCCL's algorithm or the rate of the ports is unknown: {', but '.join(texts)}"
            return self._make(metric, Outcome.UNJUDGED, Reason.ALGORITHM_UNKNOWN, basis=basis, detail=detail)
        return self._make(metric, outcome, *reasons, basis=basis, ratio=ratio, interval=interval)


class _SiteEvaluator:
    """Comparison with the site's baseline, and with the published value unless the baseline overrides it.

    If a baseline learned from the judged run, or from few runs, is the only limit, the metric does not PASS.
    """

    def __init__(self, evaluator: RuleEvaluator) -> None:
        references = evaluator.references
        applied = references.applicable(evaluator.lookup.reference_key, evaluator.facts)
        self._site, self._includes_run = applied[0], references.site_includes_run
        self._comparisons = [_ReferenceEvaluator(evaluator, reference) for reference in applied]

    def verdict(self, metric: Metric) -> Verdict:
        """The verdict of the comparison; if there is also a published value, the worse of the two verdicts."""
        verdicts = [comparison.verdict(metric) for comparison in self._comparisons]
        if len(verdicts) > 1:
            return min(verdicts, key=lambda verdict: (WORST_FIRST.index(verdict.outcome), verdict.ratio or 0.0))
        (verdict,) = verdicts
        if self._includes_run and verdict.outcome in (_PASS, Outcome.WARN):
            reasons = (*verdict.reasons, Reason.BASELINE_OF_THIS_RUN)
            return replace(verdict, outcome=Outcome.UNJUDGED, reasons=reasons, fix=_LEARN_FROM_OTHERS)
        if self._site.runs < MIN_BASELINE_RUNS and verdict.outcome is _PASS:
            detail = f"the baseline has this value from {self._site.runs} of {MIN_BASELINE_RUNS} runs that a PASS needs"
            reasons = (Reason.BASELINE_OF_FEW_RUNS,)
            return replace(verdict, outcome=Outcome.WARN, reasons=reasons, detail=detail, fix=_LEARN_FROM_OTHERS)
        return verdict


class _Strictness(NamedTuple):
    """Why the only threshold on a metric is lax, and the reference value that the threshold exceeds; empty if not."""

    lax_reason: str
    exceeds: str


_NORMAL_STRICTNESS = _Strictness("", "")


class _ThresholdEvaluator:
    """Comparison with a threshold of the check or of the trial; a threshold of the trial may be invalid."""

    def __init__(self, evaluator: RuleEvaluator, threshold: Limit) -> None:
        self._evaluator, self._make, self._threshold = evaluator, evaluator.make, threshold
        kind = BasisKind.TRIAL if evaluator.trial else BasisKind.RULE
        self._basis = Basis(kind, evaluator.trial, threshold.value, evaluator.unit, threshold.op)
        self._basis_by_strictness = {_NORMAL_STRICTNESS: self._basis}
        key = evaluator.rule.reference
        self._reference = evaluator.references.site_or_sku_reference(key, evaluator.facts) if key else ""

    def verdict(self, metric: Metric) -> Verdict:
        threshold, evaluator, basis = self._threshold, self._evaluator, self._basis
        if threshold.unit and threshold.unit != metric.unit:
            return self._make(metric, Outcome.UNJUDGED, Reason.UNIT_MISMATCH, detail=threshold.unit)
        if evaluator.trial:
            if self._error:
                return self._make(metric, Outcome.ERROR, Reason.IMPOSSIBLE_THRESHOLD, basis=basis, detail=self._error)
            basis = self._basis_with_strictness(metric)
        if threshold.is_met_by(metric.value):
            return self._threshold_met(metric, basis)
        if evaluator.trial and self._too_strict:
            impossible = (Reason.THRESHOLD_VIOLATED, Reason.IMPOSSIBLE_THRESHOLD)
            return self._make(metric, Outcome.ERROR, *impossible, basis=basis, detail=self._too_strict)
        outcome, reasons, interval = violation(metric, threshold.value, threshold.is_met_by, threshold.outcome)
        return self._make(metric, outcome, *reasons, basis=basis, interval=interval)

    @cached_property
    def _error(self) -> str:
        evaluator = self._evaluator
        return threshold_error(self._threshold, evaluator.unit, evaluator.lookup, evaluator.facts, evaluator.references)

    @cached_property
    def _too_strict(self) -> str:
        evaluator = self._evaluator
        return above_reference(self._threshold, evaluator.unit, evaluator.lookup, evaluator.facts, evaluator.references)

    def _threshold_met(self, metric: Metric, basis: Basis) -> Verdict:
        """PASS, unless the value is implausibly high or a low outlier of its peer group."""
        if self._evaluator.rule.reference and self._threshold.op in _LOWER_BOUNDS:
            reference = self._applicable_reference
            if reference and metric.value > MAX_PLAUSIBLE_RATIO * reference.value:
                ratio, detail = metric.value / reference.value, reference_text(reference)
                reason = Reason.IMPLAUSIBLY_HIGH
                return self._make(metric, Outcome.UNJUDGED, reason, basis=basis, ratio=ratio, detail=detail)
            if self._evaluator.peers.is_low_outlier(metric.value):
                return self._make(metric, Outcome.WARN, Reason.BELOW_PEERS, basis=basis)
        return Verdict(
            self._evaluator.check, metric.subject, _PASS, metric.name, (), "", metric.value, metric.unit, basis
        )

    @cached_property
    def _applicable_reference(self) -> Reference | None:
        """The site or SKU reference value; None if facts that it requires, such as training settings, differ."""
        evaluator, reference = self._evaluator, self._reference
        applies = evaluator.rule.reference_when.items() <= evaluator.facts.items()
        return reference if applies and isinstance(reference, Reference) and reference.unit == evaluator.unit else None

    def _basis_with_strictness(self, metric: Metric) -> Basis:
        """The basis, with a note if the threshold is lax or exceeds the reference value."""
        strictness = self._strictness(metric)
        if (basis := self._basis_by_strictness.get(strictness)) is None:
            basis = replace(self._basis, lax_reason=strictness.lax_reason, exceeds=strictness.exceeds)
            self._basis_by_strictness[strictness] = basis
        return basis

    def _strictness(self, metric: Metric) -> _Strictness:
        """The threshold compared with the check's own threshold, then with the reference value.

        Without a reference value the threshold is compared with the measured value, except on CPUs and on GPU models
        without SKU data.
        """
        threshold, reference, unit = self._threshold, self._reference, metric.unit
        measured = format_value(metric.value, unit)
        if self._evaluator.is_only_threshold and self._relative_strictness < LAX_RATIO:
            return _Strictness(f"the check requires {self._evaluator.check_threshold}", "")
        if threshold.op not in _LOWER_BOUNDS:
            is_lax = threshold.op != "==" and unit in TIME_UNITS and metric.value < LAX_RATIO * threshold.value
            if not is_lax or not self._evaluator.is_only_threshold or self._evaluator.has_unknown_model:
                return _NORMAL_STRICTNESS
            factor = threshold.value / max(metric.value, 1e-9)
            return _Strictness(f"{measured} was measured; a {factor:,.3g}x slowdown would pass", "")
        if isinstance(reference, Reference) and reference.unit == unit:
            best, best_text = reference.value, reference_text(reference)
        elif self._evaluator.has_unknown_model:
            return _NORMAL_STRICTNESS
        else:
            best, best_text = metric.value, f"the measured {measured}"
        ratio = threshold.value / best if best > 0 else 1.0
        if self._evaluator.is_only_threshold and ratio < LAX_RATIO:
            return _Strictness(f"{100 * ratio:.2g}% of {best_text}: {undetected_slowdown(ratio)}", "")
        return _Strictness("", best_text) if isinstance(reference, Reference) and ratio > 1 else _NORMAL_STRICTNESS

    @cached_property
    def _relative_strictness(self) -> float:
        return relative_strictness(self._threshold, self._evaluator.check_threshold)


def above_physical_limit(check: str, metric: Metric, bound: Bound) -> Verdict:
    """An ERROR for a metric above its hardware bound, which is a measurement error."""
    return Verdict(
        check=check,
        subject=metric.subject,
        outcome=Outcome.ERROR,
        metric=metric.name,
        reasons=(Reason.ABOVE_PHYSICAL_LIMIT,),
        detail=bound.derivation,
        value=metric.value,
        unit=metric.unit,
        basis=Basis(BasisKind.PHYSICAL_LIMIT, "the hardware", bound.value, bound.unit, "<="),
        evidence=measured_evidence(metric),
    )


def measured_evidence(metric: Metric) -> str:
    """The value of a metric and the range of its samples, as evidence of a verdict that is not PASS."""
    text, samples = f"{metric.name} = {format_value(metric.value, metric.unit)} on {metric.subject}", metric.samples
    if len(samples) < 2:
        return text
    low, high = format_value(min(samples), metric.unit), format_value(max(samples), metric.unit)
    return f"{text}, {len(samples)} samples from {low} to {high}"


def evidence_text(metric: Metric) -> str:
    """The evidence that the check gave with the value, as JSON of at most ``_MAX_FACT_CHARS`` characters each."""
    evidence = metric.evidence
    if evidence in (None, [], {}):
        return ""
    named = evidence if isinstance(evidence, dict) else {"": evidence}
    return "".join(
        f"; {name}: {_shortened(value)}" if name else f"; {_shortened(value)}" for name, value in named.items() if value
    )


def _shortened(value: JsonValue) -> str:
    text = json.dumps(value, ensure_ascii=False)
    return text if len(text) <= _MAX_FACT_CHARS else f"{text[:_MAX_FACT_CHARS]}…"
