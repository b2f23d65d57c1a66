"""The limits of one rule on the values of a metric: all are evaluated, and the worst verdict counts. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from statistics import median

from pydantic import JsonValue

from seatrial.checks.check import Check
from seatrial.hardware.bounds import Bound, MetricLookup, hardware_bound, physical_base
from seatrial.hardware.references import MODEL_SEPARATOR, NO_PEERS, PeerGroup, Reference, References, Sku
from seatrial.hardware.training_flops import BOUNDED_METRICS, training_work
from seatrial.judge.groups import MeasurementGroup, PeerGroups, opposite_direction
from seatrial.judge.plausibility import (
    above_reference,
    lax_reference,
    metric_lookup,
    reference_text,
    threshold_error,
    threshold_notes,
)
from seatrial.judge.samples import slow_windows, violation, with_mean_speed
from seatrial.model import (
    WORST_FIRST,
    Basis,
    BasisKind,
    Measurement,
    Metric,
    Outcome,
    Reason,
    Rule,
    Verdict,
    format_value,
    plausible_range,
)
from seatrial.model.rule import ALL_REDUCE, BOUND, GEMM, OPPOSITE, PEERS, REFERENCE, STEP_TIME, Limit

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
# A training's share of the GEMM rate is known of few GPU models. On others a share below this part of it rejects: a GPU
# model with more FLOP/s per byte of memory bandwidth reaches less; 30 % less is an estimate
UNMEASURED_SHARE = 0.7
_LEARN_FROM_OTHERS = f"seatrial baseline learn RUN… with at least {MIN_BASELINE_RUNS} other runs of this hardware"
_FAIL, _ERROR, _UNJUDGED = Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED
_PASS, _SKIP, _WARN = Outcome.PASS, Outcome.SKIP, Outcome.WARN  # looked up once, since enum member access is slow
_RANK = {outcome: rank for rank, outcome in enumerate(WORST_FIRST)}
_DECIDED = (_FAIL, _ERROR, _PASS)  # a later limit with the same outcome changes nothing
_TOO_HIGH = frozenset({Reason.IMPLAUSIBLY_HIGH, Reason.ABOVE_PHYSICAL_LIMIT})
_NEVER_NEGATIVE = ("B", "s", "ms", "us", "count")  # units; rates are not negative either, see metric.signed
_MAX_FACT_CHARS = 600  # a longer fact is truncated in the evidence; the record has the whole fact
Comparison = Callable[[Metric], Verdict]


class RuleLimits:
    """The limits of one rule of ``check``, or of a threshold of the trial if ``trial`` has its name.

    Thousands of subjects share the limits of their device model, shape, unit and peer group. ``is_only_threshold``: no
    rule of the check is evaluated on the metric. ``check_threshold``: the number that the check requires, if any.
    """

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
        self.check, self.rule, self.trial, self.references = check.name, rule, trial, references
        check_rules = [each for each in own_rules if each.metric == rule.metric]
        self.is_only_threshold = bool(trial) and (override or not check_rules)
        self.check_threshold = next((each.threshold for each in check_rules if each.threshold), None)
        declared = check.declaration(rule.metric)
        self.lookup = metric_lookup(check, rule.metric, rule.reference)
        self.may_exceed_100 = bool(declared and declared.may_exceed_100)
        self.signed = not check_rules or bool(declared and declared.signed)
        self.reference_optional = bool(declared and declared.reference_optional)
        self._unit, self._peer_groups = declared.unit if declared else None, peer_groups
        self._opposite_share, self._by_peers = rule.share(OPPOSITE, _WARN), bool(rule.share(PEERS))
        self._opposite_failure = rule.share(OPPOSITE) or 0.0
        self._shared: dict[Hashable, _Limits] = {}
        # Without a reference, a threshold of the check gives the same verdict on all subjects with the same value
        self._same_for_all = rule.threshold is not None and not rule.reference and not trial
        self._passed: dict[tuple[float, str], Verdict] = {}  # (value, unit) → its PASS

    def verdicts(self, group: MeasurementGroup, metrics: Sequence[Metric]) -> Iterator[Verdict]:
        """The verdicts on the values of one group."""
        shape = group.shape, self.rule.reference_when.items() <= group.facts.items()
        single_limits = _limits_by_gpu(self.rule.single, group, metrics) if self.rule.single else None
        opposite = {metric.subject: metric.value for metric in metrics} if self._opposite_share else {}
        for metric in metrics:
            single = None if single_limits is None else single_limits.get(metric.subject, 0.0)
            verdict = self._verdict(group, shape, metric, single)
            if self._opposite_share:
                value = opposite.get(opposite_direction(metric.subject), 0.0)
                verdict = self._compared_with_opposite(metric, verdict, self._opposite_share, value)
            yield verdict

    def _verdict(self, group: MeasurementGroup, shape: Hashable, metric: Metric, single: float | None) -> Verdict:
        value, unit = metric.value, metric.unit
        if unit != self._unit and self._unit is not None:
            detail, reasons = self._unit, (Reason.UNIT_MISMATCH,)
            return Verdict(self.check, metric.subject, _ERROR, metric.name, reasons, detail, value, unit)
        if self._same_for_all and not metric.samples and (same := self._passed.get((value, unit))):
            return Verdict(self.check, metric.subject, _PASS, metric.name, (), "", value, unit, same.basis)
        verdict = self._limits(group, shape, metric).verdict(metric, single)
        if verdict.outcome is _PASS:
            if self._same_for_all:
                self._passed[value, unit] = verdict
            return verdict
        if verdict.outcome is _SKIP or verdict.fix:
            return verdict
        # The rule's meaning is that of a bad value, and does not fit a value that is too high
        meaning = "" if _TOO_HIGH.intersection(verdict.reasons) else self.rule.meaning
        evidence = measured_evidence(metric) + evidence_text(metric)
        return replace(verdict, meaning=meaning, evidence=evidence, fix=self.rule.fix)

    def _limits(self, group: MeasurementGroup, shape: Hashable, metric: Metric) -> _Limits:
        peers, to_reach = NO_PEERS, list[PeerGroup]()
        if self._peer_groups:
            peers = self._peer_groups.peer_group(group.model, metric.subject)
            if self._by_peers:
                to_reach = self._peer_groups.groups_to_reach(group.model, metric.subject)
        key = shape, peers.node, to_reach[0].node if to_reach else "", metric.unit
        if (limits := self._shared.get(key)) is None:
            step_times = [each.value for each in group.metrics.get(STEP_TIME, ())]
            limits = self._shared[key] = _Limits(self, group.facts, metric.unit, peers, to_reach, step_times)
        return limits

    def _compared_with_opposite(self, metric: Metric, verdict: Verdict, share: float, opposite: float) -> Verdict:
        """The verdict on a pair, or WARN or FAIL below a share of the opposite direction's value if that is worse."""
        if metric.value >= share * opposite:
            return verdict
        was_good = verdict.outcome in (_PASS, _SKIP)
        outcome = _WARN if metric.value >= self._opposite_failure * opposite else _FAIL
        return replace(
            verdict,
            outcome=outcome if was_good or _RANK[outcome] < _RANK[verdict.outcome] else verdict.outcome,
            reasons=(*verdict.reasons, Reason.ASYMMETRIC),
            opposite_value=opposite,
            basis=replace(verdict.basis, asymmetry_limit=share) if verdict.basis else None,
            meaning=self.rule.meaning,
            evidence=measured_evidence(metric) if was_good else verdict.evidence,
            fix=self.rule.fix,
        )


class _Limits:
    """The limits on values in ``unit`` of one device model, shape and peer group."""

    def __init__(
        self,
        of: RuleLimits,
        facts: Mapping[str, JsonValue],
        unit: str,
        peers: PeerGroup,
        peers_to_reach: Sequence[PeerGroup],
        step_times: Sequence[float],
    ) -> None:
        self._of, self._facts, self._unit, self._peers, self._rule = of, facts, unit, peers, of.rule
        self._plausible = plausible_range(unit, of.may_exceed_100)
        self._step_times = step_times
        self._bound = self._hardware_bound()
        self._highest = self._bound.value if self._bound else math.inf
        self._never_negative = "/s" in unit or unit in _NEVER_NEGATIVE
        self._bases: list[Basis] = []  # of all limits that apply to every value
        self._first, *self._more = self._absolute_limits()
        share = self._rule.share(PEERS) or 0.0
        self._among_peers = [self._peer_limit(each, share) for each in peers_to_reach if each.healthy]

    def verdict(self, metric: Metric, single_limit: float | None) -> Verdict:
        """The worst verdict of all limits; an ERROR if the value cannot be true."""
        if error := self._measurement_error(metric):
            return error
        decided = self._first(metric)
        for compare in self._more:
            decided = _worse(decided, compare(metric))
        if decided.outcome is not _FAIL and decided.outcome is not _ERROR:
            worse = None
            for compare_peers in self._among_peers:
                worse = worse or compare_peers(metric)
            if worse is None and metric.samples and not self._of.references.cpu_only:
                # the limits of windows come from GPU nodes
                on_average = self._slow_on_average(metric) if decided.outcome in (_PASS, _WARN) else None
                worse = on_average or slow_windows(self._of.check, metric)
            decided = _worse(decided, worse) if worse else decided
            if single_limit is not None:
                decided = _worse(decided, self._single(metric, single_limit))
        if not self._bases or (len(self._bases) == 1 and decided.basis in (None, self._bases[0])):
            return decided
        return replace(decided, other_limits=tuple(basis for basis in self._bases if basis is not decided.basis))

    def _slow_on_average(self, metric: Metric) -> Verdict | None:
        """A FAIL if the median of the windows is good, but their mean violates a limit; else None."""
        if (averaged := with_mean_speed(metric)) is None:
            return None
        for compare in (self._first, *self._more):
            verdict = compare(averaged)
            if verdict.outcome is _FAIL:
                detail = "their mean clearly violates the limit that their median meets"
                basis, ratio = verdict.basis, verdict.ratio
                return self._make(metric, _FAIL, Reason.SLOW_WINDOWS, basis=basis, ratio=ratio, detail=detail)
        return None

    def _measurement_error(self, metric: Metric) -> Verdict | None:
        value, signed, threshold = metric.value, self._of.signed, self._rule.threshold
        if value > self._highest and self._bound:
            return above_physical_limit(self._of.check, metric, self._bound)
        if value < 0 and (self._never_negative or (threshold and not signed and threshold.is_met_by(value))):
            return self._make(metric, _ERROR, Reason.NEGATIVE_VALUE)
        if (abs(value) if signed else value) not in self._plausible:
            detail = f"{self._plausible} {metric.unit}".rstrip()
            return self._make(metric, _ERROR, Reason.OUTSIDE_PLAUSIBLE_RANGE, detail=detail)
        return None

    def _hardware_bound(self) -> Bound | None:
        """The hardware bound of the metric; None for training metrics, which ``values_above_peak`` evaluates.

        Also None for several nodes: NCCL may use an algorithm that no model covers and that sends less data.
        """
        of = self._of
        if not of.lookup.bounded_by or self._facts.get("nodes") not in (None, 1):
            return None
        bound = hardware_bound(of.lookup, self._facts, of.references)
        return bound if bound and bound.unit == self._unit else None

    def _absolute_limits(self) -> Sequence[Comparison]:
        """The comparisons with the number, or with the reference, the GEMM rate and the peak of the rule.

        Without any of them: a comparison that says why there is none.
        """
        rule, of, unit = self._rule, self._of, self._unit
        if rule.threshold is not None:
            return [self._number(rule.threshold) if of.trial == "" else self._trial_number(rule.threshold)]
        if rule.only_warns_by_peers:
            return [self._outlier]
        by_gemm, by_all_reduce = self._gemm_share(), self._all_reduce_share()
        others = [each for each in (by_gemm, by_all_reduce) if each]
        reference: Reference | str = "the peak speed of this training on this GPU model is unknown"
        if rule.reference or rule.share(BOUND) is None:
            peers = NO_PEERS if of.reference_optional or others or self._physical else self._peers
            reference = of.references.find(of.lookup.reference_key, self._facts, peers, unit)
        if isinstance(reference, str):
            if not by_gemm and self._physical:
                return [self._peak(self._physical, rule.share(BOUND) or 0.0), *others]
            optional = (of.reference_optional and (not self._has_unknown_model or self._facts.get("nodes") != 1)) or (
                not rule.reference and rule.share(BOUND)
            )
            missing = (_SKIP, Reason.NO_THRESHOLD) if optional else (_UNJUDGED, Reason.NO_REFERENCE)
            return others or [self._always(*missing, reference)]
        if reference.unit != unit:
            return [self._always(_UNJUDGED, Reason.UNIT_MISMATCH, reference.unit), *others]
        if reference.kind is BasisKind.SITE:
            return [self._site(of.references.applicable(of.lookup.reference_key, self._facts)), *others]
        return [self._reference(reference), *others]

    @cached_property
    def _physical(self) -> Bound | None:
        """The physical base of the rule's limit, if it has such a limit and the base is known."""
        if self._rule.share(BOUND) is None:
            return None
        bound = physical_base(self._of.lookup, self._facts, self._of.references)
        return bound if bound and bound.unit == self._unit else None

    def _always(self, outcome: Outcome, reason: Reason, detail: str) -> Comparison:
        return lambda metric: self._make(metric, outcome, reason, detail=detail)

    @cached_property
    def _has_unknown_model(self) -> bool:
        """Whether one of the device models has no SKU data."""
        models = str(self._facts.get("gpu") or "").split(MODEL_SEPARATOR)
        return any(isinstance(self._of.references.sku(model), str) for model in models)

    def _number(self, threshold: Limit) -> Comparison:
        """Comparison with a number of the check."""
        basis = self._listed(Basis(BasisKind.RULE, "", threshold.value, self._unit, threshold.op))
        reference = self._reference_for_plausibility(threshold)

        def compare(metric: Metric) -> Verdict:
            if threshold.unit and threshold.unit != metric.unit:
                return self._make(metric, _UNJUDGED, Reason.UNIT_MISMATCH, detail=threshold.unit)
            if threshold.is_met_by(metric.value):
                return self._met(metric, basis, reference)
            return self._violated(metric, threshold.value, threshold.is_met_by, basis, outcome=threshold.outcome)

        return compare

    def _trial_number(self, threshold: Limit) -> Comparison:
        """Comparison with a threshold of the trial, which may be invalid, lax, or too strict for good hardware."""
        of, unit, facts = self._of, self._unit, self._facts
        basis = self._listed(Basis(BasisKind.TRIAL, of.trial, threshold.value, unit, threshold.op))
        error = threshold_error(threshold, unit, of.lookup, facts, of.references)
        too_strict = above_reference(threshold, unit, of.lookup, facts, of.references)
        reference = self._reference_for_plausibility(threshold)
        bases: dict[tuple[str, str], Basis] = {("", ""): basis}  # (lax, exceeds) → basis with these notes

        def compare(metric: Metric) -> Verdict:
            if threshold.unit and threshold.unit != metric.unit:
                return self._make(metric, _UNJUDGED, Reason.UNIT_MISMATCH, detail=threshold.unit)
            if error:
                return self._make(metric, _ERROR, Reason.IMPOSSIBLE_THRESHOLD, basis=basis, detail=error)
            lax, exceeds = notes = threshold_notes(
                threshold,
                metric,
                of.check_threshold,
                of.references.site_or_sku_reference(self._rule.reference, facts) if self._rule.reference else "",
                is_only=of.is_only_threshold,
                is_unknown_model=self._has_unknown_model,
            )
            noted = bases.get(notes) or bases.setdefault(notes, replace(basis, lax_reason=lax, exceeds=exceeds))
            if threshold.is_met_by(metric.value):
                return self._met(metric, noted, reference)
            if too_strict:
                reasons = (Reason.THRESHOLD_VIOLATED, Reason.IMPOSSIBLE_THRESHOLD)
                return self._make(metric, _ERROR, *reasons, basis=noted, detail=too_strict)
            return self._violated(metric, threshold.value, threshold.is_met_by, noted, outcome=threshold.outcome)

        return compare

    def _reference_for_plausibility(self, threshold: Limit) -> Reference | None:
        """The reference value that a value above a lower bound is compared with.

        None without one, or if facts that it requires, such as training settings, differ.
        """
        rule = self._rule
        if not rule.reference or threshold.op[0] != ">" or not rule.reference_when.items() <= self._facts.items():
            return None
        reference = self._of.references.site_or_sku_reference(rule.reference, self._facts)
        return reference if isinstance(reference, Reference) and reference.unit == self._unit else None

    def _met(self, metric: Metric, basis: Basis, reference: Reference | None) -> Verdict:
        """PASS, unless the value is implausibly high or a low outlier of its peer group."""
        if reference and metric.value > MAX_PLAUSIBLE_RATIO * reference.value:
            ratio, detail = metric.value / reference.value, reference_text(reference)
            return self._make(metric, _UNJUDGED, Reason.IMPLAUSIBLY_HIGH, basis=basis, ratio=ratio, detail=detail)
        if self._rule.reference and basis.op[0] == ">" and self._peers.is_low_outlier(metric.value):
            return self._make(metric, _WARN, Reason.BELOW_PEERS, basis=basis)
        return Verdict(self._of.check, metric.subject, _PASS, metric.name, (), "", metric.value, metric.unit, basis)

    def _peak(self, peak: Bound, share: float) -> Comparison:
        """Comparison with what the hardware could do: a GPU model without published values is judged by it alone."""
        source = peak.derivation
        basis = self._listed(
            Basis(BasisKind.PHYSICAL_LIMIT, "the hardware", peak.value, peak.unit, source=source, fail_below=share)
        )

        def compare(metric: Metric) -> Verdict:
            ratio = metric.value / peak.value
            if ratio >= share:
                return self._make(metric, _PASS, basis=basis, ratio=ratio)
            required = share * peak.value
            return self._violated(metric, required, required.__le__, basis, ratio)

        return compare

    def _gemm_share(self) -> Comparison | None:
        """Comparison of a training with the GEMM rate that this run measured on the same GPU, or on all GPUs.

        On GPU models without a measured share, FAIL is below UNMEASURED_SHARE of it. None without such a rate.
        """
        references, facts, fail_below = self._of.references, self._facts, self._rule.share(GEMM)
        work = training_work(self._rule.metric, facts) if fail_below else None
        rates = references.gemm_rates.get(work.spec_key, {}) if work else {}
        if not fail_below or not work or not work.flops_per_token or not rates:
            return None
        skus = [references.sku(model) for model in str(facts.get("gpu") or "").split(MODEL_SEPARATOR)]
        is_measured = all(isinstance(sku, Sku) and sku.trained for sku in skus)
        share = fail_below if is_measured else UNMEASURED_SHARE * fail_below
        all_rates, tokens, data_type = median(rates.values()), 1e12 / work.flops_per_token, work.spec_key
        warn_below = self._rule.share(GEMM, _WARN)
        bases: dict[float, Basis] = {}

        def compare(metric: Metric) -> Verdict:
            rate = rates.get(metric.subject, all_rates)
            if (basis := bases.get(rate)) is None:
                name = f"{rate:.4g} TFLOP/s, the {data_type} GEMM rate of this run"
                basis = Basis(BasisKind.RUN, name, rate * tokens, self._unit, fail_below=share, warn_below=warn_below)
                bases[rate] = basis
            return self._share_of_run(metric, basis, rate * tokens, share, warn_below or 0.0)

        return compare

    def _all_reduce_share(self) -> Comparison | None:
        """Comparison of a training with its speed if each step is followed by an all-reduce of the fp32 gradients.

        Its time follows from the busbw of this run, that of the rest of the step was measured. None without them.
        """
        fail_below, warn_below = self._rule.share(ALL_REDUCE), self._rule.share(ALL_REDUCE, _WARN) or 0.0
        ranks, busbw = self._facts.get("world_size"), self._of.references.all_reduce
        training = self._facts.get("training")
        names = ("parameters", "batch", "seq_len")
        sizes = [training.get(name) for name in names] if isinstance(training, dict) else []
        parameters, batch, seq_len = (each if isinstance(each, int) else 0 for each in sizes or (0, 0, 0))
        if not fail_below or not busbw or not self._step_times or not isinstance(ranks, int) or not parameters:
            return None
        communication = 8 * parameters * (ranks - 1) / ranks / busbw / 1e9
        expected = batch * seq_len / (median(self._step_times) + communication)
        if expected <= 0:
            return None
        name = f"{1e3 * communication:.3g} ms for the gradients at the {busbw:.4g} GB/s of this run's all-reduce"
        basis = Basis(BasisKind.RUN, name, expected, self._unit, fail_below=fail_below, warn_below=warn_below)
        self._listed(basis)
        return lambda metric: self._share_of_run(metric, basis, expected, fail_below, warn_below)

    def _share_of_run(
        self, metric: Metric, basis: Basis, expected: float, fail_below: float, warn_below: float
    ) -> Verdict:
        """Comparison with a value that follows from another measurement of this run."""
        ratio, required = metric.value / expected, fail_below * expected
        if ratio < fail_below:
            return self._violated(metric, required, required.__le__, basis, ratio)
        if ratio < warn_below:
            return self._make(metric, _WARN, Reason.BELOW_WARNING_THRESHOLD, basis=basis, ratio=ratio)
        return self._make(metric, _PASS, basis=basis, ratio=ratio)

    def _outlier(self, metric: Metric) -> Verdict:
        """WARN for a low outlier of the peer group; a uniform slowdown of the group is not detected."""
        if not self._peers.gives_reference:
            return self._make(metric, _SKIP, Reason.TOO_FEW_PEERS)
        basis, ratio = self._warning_basis, metric.value / self._peers.median
        if ratio < (basis.warn_below or 0.0) and self._peers.is_low_outlier(metric.value):
            return self._make(metric, _WARN, Reason.BELOW_WARNING_THRESHOLD, basis=basis, ratio=ratio)
        return self._make(metric, _PASS, basis=basis, ratio=ratio)

    @cached_property
    def _warning_basis(self) -> Basis:
        peers, share = self._peers, self._rule.share(PEERS, _WARN)
        return self._listed(Basis(BasisKind.PEERS, _peers_name(peers), peers.median, self._unit, warn_below=share))

    def _peer_limit(self, peers: PeerGroup, share: float) -> Callable[[Metric], Verdict | None]:
        """FAIL below a share of what the peers reach, on the node or on all nodes.

        Noise that all GPUs of a node share, such as the temperature of the room, does not affect the comparison on the
        node.
        """
        limit = share * peers.healthy
        basis = Basis(BasisKind.PEERS, _peers_name(peers), peers.healthy, self._unit, fail_below=share)
        self._bases.append(basis)

        def compare(metric: Metric) -> Verdict | None:
            if metric.value >= limit:
                return None
            return self._violated(metric, limit, limit.__le__, basis, metric.value / peers.healthy)

        return compare

    def _reference(self, reference: Reference) -> Comparison:
        """Comparison with a baseline or SKU value, the bound of the network, or the median of the peers."""
        of, rule, peers = self._of, self._rule, self._peers
        key, facts, references = of.lookup.reference_key, self._facts, of.references
        ring = references.with_ring(key, facts, reference)
        required = reference.required_value(rule.share(REFERENCE) or 0.0)
        fail_below = required / reference.value
        warn_share = rule.share(REFERENCE, _WARN) or 0.0 if reference.warn_below is None else reference.warn_below
        warn_below = max(warn_share, fail_below)
        highest = MAX_RATIO_OF_BOUND if reference.kind is BasisKind.FABRIC_MODEL else MAX_PLAUSIBLE_RATIO
        if reference.highest is not None:
            highest = reference.highest / reference.value
        basis = Basis(
            reference.kind,
            reference.name,
            reference.value,
            reference.unit,
            source=reference.source,
            fail_below=fail_below,
            warn_below=warn_share,
            arithmetic=reference.arithmetic,
            lax_reason=lax_reference(reference, of.lookup, facts, references),
        )
        self._bases.append(basis)

        def compare(metric: Metric) -> Verdict:
            value = metric.value
            ratio = value / reference.value
            below_peers = (Reason.BELOW_PEERS,) if peers.is_low_outlier(value) else ()
            if reference.kind is BasisKind.PEERS and (ratio >= fail_below or not below_peers):
                reasons = (*below_peers, Reason.NO_ABSOLUTE_REFERENCE)
                return self._make(metric, _UNJUDGED, *reasons, basis=basis, ratio=ratio, detail=reference.source)
            if ratio > highest:
                return self._make(metric, _UNJUDGED, Reason.IMPLAUSIBLY_HIGH, basis=basis, ratio=ratio)
            if ratio >= warn_below and not below_peers:
                return Verdict(of.check, metric.subject, _PASS, metric.name, (), "", value, metric.unit, basis, ratio)
            if ratio >= fail_below:
                reasons = below_peers if ratio >= warn_below else (Reason.BELOW_WARNING_THRESHOLD,)
                return self._make(metric, _WARN, *reasons, basis=basis, ratio=ratio)
            verdict = self._violated(metric, required, required.__le__, basis, ratio)
            if verdict.outcome is _FAIL and ring and value >= ring.required_value(fail_below):
                texts = [f"{value / each.value:.1%} of {reference_text(each)}" for each in (reference, ring)]
                detail = f"NCCL's algorithm or the rate of the ports is unknown: {', but '.join(texts)}"
                return self._make(metric, _UNJUDGED, Reason.ALGORITHM_UNKNOWN, basis=basis, detail=detail)
            return verdict

        return compare

    def _site(self, applied: Sequence[Reference]) -> Comparison:
        """Comparison with the site's baseline, and with the published value unless the baseline overrides it.

        If a baseline learned from the judged run, or from few runs, is the only limit, the metric does not PASS.
        """
        comparisons, includes_run = [*map(self._reference, applied)], self._of.references.site_includes_run
        few = f"the baseline has this value from {applied[0].runs} of {MIN_BASELINE_RUNS} runs that a PASS needs"

        def compare(metric: Metric) -> Verdict:
            verdicts = [each(metric) for each in comparisons]
            verdict = min(verdicts, key=lambda verdict: (_RANK[verdict.outcome], verdict.ratio or 0.0))
            if len(verdicts) > 1:
                return verdict
            if includes_run and verdict.outcome in (_PASS, _WARN):
                reasons = (*verdict.reasons, Reason.BASELINE_OF_THIS_RUN)
                return replace(verdict, outcome=_UNJUDGED, reasons=reasons, fix=_LEARN_FROM_OTHERS)
            if applied[0].runs < MIN_BASELINE_RUNS and verdict.outcome is _PASS:
                reasons = (Reason.BASELINE_OF_FEW_RUNS,)
                return replace(verdict, outcome=_WARN, reasons=reasons, detail=few, fix=_LEARN_FROM_OTHERS)
            return verdict

        return compare

    def _single(self, metric: Metric, limit: float) -> Verdict:
        """Comparison with another metric of this GPU, such as that of its copies alone / the GPUs of the node."""
        basis = Basis(BasisKind.RULE, "", limit, metric.unit, ">")
        if metric.value > limit:
            return self._make(metric, _PASS, basis=basis)
        return self._violated(metric, limit, limit.__lt__, basis)

    def _listed(self, basis: Basis) -> Basis:
        self._bases.append(basis)
        return basis

    def _violated(
        self,
        metric: Metric,
        limit: float,
        is_met_by: Callable[[float], bool],
        basis: Basis,
        ratio: float | None = None,
        outcome: Outcome = Outcome.FAIL,
    ) -> Verdict:
        """The verdict on a value beyond a limit: UNJUDGED if its samples are not conclusive."""
        outcome, reasons, interval = violation(metric, limit, is_met_by, outcome)
        return self._make(metric, outcome, *reasons, basis=basis, ratio=ratio, interval=interval)

    def _make(
        self,
        metric: Metric,
        outcome: Outcome,
        *reasons: Reason,
        basis: Basis | None = None,
        ratio: float | None = None,
        detail: str = "",
        interval: tuple[float, float] | None = None,
    ) -> Verdict:
        name, value, unit = metric.name, metric.value, metric.unit
        return Verdict(
            self._of.check, metric.subject, outcome, name, reasons, detail, value, unit, basis, ratio, interval=interval
        )


def _worse(decided: Verdict, other: Verdict) -> Verdict:
    """The worse of two verdicts. Of two that are FAIL, ERROR or PASS the first, of others the second."""
    worse = _RANK[other.outcome] - _RANK[decided.outcome]
    return other if worse < 0 or (worse == 0 and decided.outcome not in _DECIDED) else decided


def _peers_name(peers: PeerGroup) -> str:
    count = "the faster of 2" if len(peers.values) == 2 else f"{len(peers.values)} subjects"
    return f"{count} on {peers.model}" + (f" in {peers.node}" if peers.node else "")


def _limits_by_gpu(limit: Limit, group: MeasurementGroup, metrics: Sequence[Metric]) -> dict[str, float]:
    """GPU → the value that it must exceed: a share of its value of another metric, or of this / GPUs of its node."""
    gpus = Counter(metric.subject.partition("/")[0] for metric in metrics)
    return {
        single.subject: limit.value * single.value / (gpus[node] if limit.is_per_gpu else 1)
        for single in group.metrics.get(limit.single_metric, ())
        if (node := single.subject.partition("/")[0]) in gpus
    }


def values_above_peak(check: Check, measured: Iterable[Measurement], references: References) -> Iterator[Verdict]:
    """An ERROR for each training metric above the bound that follows from the GPU's peak TFLOP/s.

    Most training metrics have no rule; the bounds of other metrics are checked where their rules are evaluated.
    """
    bounded = {name.partition(".")[0] for name in check.units}.intersection(BOUNDED_METRICS)
    for measurement in measured if bounded else ():
        for metric in measurement.metrics:
            if metric.name.partition(".")[0] in bounded:
                bound = hardware_bound(MetricLookup(metric.name, metric.name), measurement.facts, references)
                if bound and bound.unit == metric.unit and metric.value > bound.value:
                    yield above_physical_limit(check.name, metric, bound)


def above_physical_limit(check: str, metric: Metric, bound: Bound) -> Verdict:
    """An ERROR for a metric above its hardware bound, which is a measurement error."""
    return Verdict(
        check=check,
        subject=metric.subject,
        outcome=_ERROR,
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
    texts = ((name, json.dumps(value, ensure_ascii=False)) for name, value in named.items() if value)
    shown = ((name, text if len(text) <= _MAX_FACT_CHARS else f"{text[:_MAX_FACT_CHARS]}…") for name, text in texts)
    return "".join(f"; {name}: {text}" if name else f"; {text}" for name, text in shown)
