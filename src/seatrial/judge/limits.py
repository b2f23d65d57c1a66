"""The limits of one rule on the values of a metric: all are evaluated, and the worst verdict counts. Pure."""

from __future__ import annotations

import json
import math
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache, cached_property, partial
from statistics import median

from seatrial.checks.check import Check
from seatrial.hardware.bounds import MetricLookup, physical_base
from seatrial.hardware.references import MODEL_SEPARATOR, NO_PEERS, PeerGroup, Reference, References, Sku
from seatrial.hardware.training_flops import BOUNDED_METRICS, training_work
from seatrial.judge.groups import Facts, MeasurementGroup, PeerGroups, opposite_direction
from seatrial.judge.plausibility import (
    above_reference,
    bound_in_unit,
    lax_reference,
    metric_lookup,
    reference_in_unit,
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
    node_of,
    plausible_range,
)
from seatrial.model.benchmark import Bound
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
_VIOLATED, _INCONCLUSIVE = (Reason.THRESHOLD_VIOLATED,), (Reason.THRESHOLD_VIOLATED, Reason.INCONCLUSIVE)
_TOO_HIGH = frozenset({Reason.IMPLAUSIBLY_HIGH, Reason.MEASUREMENT_ERROR})
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
        rule: Rule,
        trial: str,
        references: References,
        peer_groups: PeerGroups | None,
        *,
        override: bool = False,
    ) -> None:
        self.check, self.rule, self.trial, self.references = check.name, rule, trial, references
        check_rules = [each for each in check.rules if each.metric == rule.metric]
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
        self._passed: dict[float, Verdict] = {}  # value → its PASS

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
        if self._same_for_all and not metric.samples and (same := self._passed.get(value)):
            return Verdict(self.check, metric.subject, _PASS, metric.name, (), "", value, unit, same.basis)
        verdict = self._limits(group, shape, metric).verdict(metric, single)
        if verdict.outcome is _PASS:
            if self._same_for_all:
                self._passed[value] = verdict
            return verdict
        if verdict.outcome is _SKIP or verdict.fix:
            return verdict
        # The rule's meaning is that of a bad value, and does not fit a value that is too high
        meaning = "" if _TOO_HIGH.intersection(verdict.reasons) else self.rule.meaning
        return replace(verdict, meaning=meaning, evidence=_evidence(metric), fix=self.rule.fix)

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
        outcome = _WARN if metric.value >= self._opposite_failure * opposite else _FAIL
        was_good = verdict.outcome in (_PASS, _SKIP)
        return replace(
            verdict,
            outcome=outcome if was_good or _RANK[outcome] < _RANK[verdict.outcome] else verdict.outcome,
            reasons=(*verdict.reasons, Reason.ASYMMETRIC),
            opposite_value=opposite,
            basis=replace(verdict.basis, asymmetry_limit=share) if verdict.basis else None,
            meaning=self.rule.meaning,
            evidence=verdict.evidence or _evidence(metric),
            fix=self.rule.fix,
        )


class _Limits:
    """The limits on values in ``unit`` of one device model, shape and peer group."""

    def __init__(
        self,
        of: RuleLimits,
        facts: Facts,
        unit: str,
        peers: PeerGroup,
        peers_to_reach: Sequence[PeerGroup],
        step_times: Sequence[float],
    ) -> None:
        self._of, self._facts, self._unit, self._peers, self._rule = of, facts, unit, peers, of.rule
        self._plausible = plausible_range(unit, of.may_exceed_100)
        # Training metrics have their bound in ``values_above_peak``. On several nodes NCCL may use an algorithm that no
        # model covers and that sends less data
        is_bounded = of.lookup.bounded_by and facts.get("nodes") in (None, 1)
        self._bound = bound_in_unit(of.lookup, unit, facts, of.references) if is_bounded else None
        self._highest = self._bound.value if self._bound else math.inf
        self._never_negative = "/s" in unit or unit in _NEVER_NEGATIVE
        self._step_times = step_times
        self._bases: list[Basis] = []  # of all limits that apply to every value
        self._first, *self._more = self._absolute_limits()
        share = self._rule.share(PEERS) or 0.0
        among = [each for each in peers_to_reach if share and each.healthy]
        self._among_peers = [(share * each.healthy, self._peers_basis(each, share)) for each in among]

    def verdict(self, metric: Metric, single_limit: float | None) -> Verdict:
        """The worst verdict of all limits; an ERROR if the value cannot be true."""
        if error := self._measurement_error(metric):
            return error
        decided, bases = self._first(metric), self._bases
        for compare in self._more:
            decided = _worse(decided, compare(metric))
        if decided.outcome is not _FAIL and decided.outcome is not _ERROR:
            among = (self._by_share(metric, basis) for limit, basis in self._among_peers if metric.value < limit)
            worse = next(among, None)
            # the limits of windows come from GPU nodes
            if worse is None and metric.samples and not self._of.references.cpu_only:
                on_average = self._slow_on_average(metric) if decided.outcome in (_PASS, _WARN) else None
                worse = on_average or slow_windows(self._of.check, metric)
            decided = _worse(decided, worse) if worse else decided
            if single_limit is not None:
                single = self._single(metric, single_limit)
                decided, bases = _worse(decided, single), [*bases, *filter(None, [single.basis])]
        if not bases or (len(bases) == 1 and decided.basis in (None, bases[0])):
            return decided
        return replace(decided, other_limits=tuple(basis for basis in bases if basis is not decided.basis))

    def _measurement_error(self, metric: Metric) -> Verdict | None:
        value, signed, threshold = metric.value, self._of.signed, self._rule.threshold
        if value > self._highest and self._bound:
            return _above_physical_limit(self._of.check, metric, self._bound)
        if value < 0 and (self._never_negative or (threshold and not signed and threshold.is_met_by(value))):
            return self._make(metric, _ERROR, Reason.MEASUREMENT_ERROR, detail="the value cannot be negative")
        if (abs(value) if signed else value) not in self._plausible:
            detail = f"expected {self._plausible} {metric.unit}".rstrip()
            return self._make(metric, _ERROR, Reason.MEASUREMENT_ERROR, detail=detail)
        return None

    def _absolute_limits(self) -> Sequence[Comparison]:
        """The comparisons with the number, or with the reference, the GEMM rate and the peak of the rule.

        Without any of them: a comparison that says why there is none.
        """
        rule, of, unit, facts, share = self._rule, self._of, self._unit, self._facts, self._rule.share(BOUND)
        if rule.threshold is not None:
            return [self._trial_number(rule.threshold) if of.trial else self._number(rule.threshold)]
        if rule.only_warns_by_peers:
            return [self._outlier()]
        by_gemm, by_all_reduce = self._gemm_share(), self._all_reduce_share()
        others = [each for each in (by_gemm, by_all_reduce) if each]
        peak = physical_base(of.lookup, self._facts, of.references) if share else None
        peak = peak if peak and peak.unit == unit else None
        reference: Reference | str = "the peak speed of this training on this GPU model is unknown"
        if rule.reference or not share:
            peers = NO_PEERS if of.reference_optional or others or peak else self._peers
            reference = of.references.find(of.lookup.reference_key, self._facts, peers, unit)
        if isinstance(reference, str):
            if peak and not by_gemm:
                basis = Basis(
                    BasisKind.PHYSICAL_LIMIT, "the hardware", peak.value, unit, source=peak.derivation, fail_below=share
                )
                return [partial(self._by_share, basis=self._listed(basis)), *others]
            is_known = not self._has_unknown_model or facts.get("nodes") != 1
            optional = (of.reference_optional and is_known) or (share and not rule.reference)
            missing = (_SKIP, Reason.NO_THRESHOLD) if optional else (_UNJUDGED, Reason.NO_REFERENCE)
            return others or [self._always(*missing, reference)]
        if reference.unit != unit:
            return [self._always(_UNJUDGED, Reason.UNIT_MISMATCH, reference.unit), *others]
        if reference.kind is BasisKind.SITE:
            return [self._site(of.references.applicable(of.lookup.reference_key, self._facts)), *others]
        return [self._reference(reference), *others]

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

        def compare(metric: Metric) -> Verdict:
            if threshold.is_met_by(metric.value):
                return self._make(metric, _PASS, basis=basis)
            return self._violated(metric, threshold.value, threshold.is_met_by, basis, outcome=threshold.outcome)

        return compare

    def _trial_number(self, threshold: Limit) -> Comparison:
        """Comparison with a threshold of the trial, which may be invalid, lax, or too strict for good hardware.

        A value that meets a lower bound is compared with the reference value too, if the facts that it requires, such
        as training settings, are as required.
        """
        of, unit, facts, rule = self._of, self._unit, self._facts, self._rule
        basis = self._listed(Basis(BasisKind.TRIAL, of.trial, threshold.value, unit, threshold.op))
        error = threshold_error(threshold, unit, of.lookup, facts, of.references)
        too_strict = above_reference(threshold, unit, of.lookup, facts, of.references)
        reference = reference_in_unit(of.lookup, unit, facts, of.references) if rule.reference else None
        is_lower_bound = bool(rule.reference) and threshold.op[0] == ">"
        is_comparable = is_lower_bound and rule.reference_when.items() <= facts.items()
        highest = MAX_PLAUSIBLE_RATIO * reference.value if reference and is_comparable else math.inf
        bases: dict[tuple[str, str], Basis] = {("", ""): basis}  # (lax, exceeds) → basis with these notes

        def compare(metric: Metric) -> Verdict:
            value = metric.value
            if threshold.unit and threshold.unit != metric.unit:
                return self._make(metric, _UNJUDGED, Reason.UNIT_MISMATCH, detail=threshold.unit)
            if error:
                return self._make(metric, _ERROR, Reason.IMPOSSIBLE_THRESHOLD, basis=basis, detail=error)
            lax, exceeds = notes = threshold_notes(
                threshold,
                metric,
                of.check_threshold,
                reference,
                is_only=of.is_only_threshold,
                is_unknown_model=self._has_unknown_model,
            )
            noted = bases.get(notes) or bases.setdefault(notes, replace(basis, lax_reason=lax, exceeds=exceeds))
            if not threshold.is_met_by(value):
                if too_strict:
                    reasons = (Reason.THRESHOLD_VIOLATED, Reason.IMPOSSIBLE_THRESHOLD)
                    return self._make(metric, _ERROR, *reasons, basis=noted, detail=too_strict)
                return self._violated(metric, threshold.value, threshold.is_met_by, noted, outcome=threshold.outcome)
            if reference and value > highest:
                ratio, detail = value / reference.value, reference_text(reference)
                return self._make(metric, _UNJUDGED, Reason.IMPLAUSIBLY_HIGH, basis=noted, ratio=ratio, detail=detail)
            if is_lower_bound and self._peers.is_low_outlier(value):
                return self._make(metric, _WARN, Reason.BELOW_PEERS, basis=noted)
            return self._make(metric, _PASS, basis=noted)

        return compare

    def _by_share(self, metric: Metric, basis: Basis) -> Verdict:
        """Comparison with the shares of an expected value below which ``basis`` fails and warns."""
        expected, share, value, unit = basis.expected or 0.0, basis.fail_below or 0.0, metric.value, metric.unit
        ratio = value / expected
        if ratio < share:
            return self._violated(metric, share * expected, (share * expected).__le__, basis, ratio)
        if ratio < (basis.warn_below or 0.0):
            return self._make(metric, _WARN, Reason.BELOW_WARNING_THRESHOLD, basis=basis, ratio=ratio)
        return Verdict(self._of.check, metric.subject, _PASS, metric.name, (), "", value, unit, basis, ratio)

    def _gemm_share(self) -> Comparison | None:
        """Comparison of a training with the GEMM rate that this run measured on the same GPU, or on all GPUs.

        On GPU models without a measured share, FAIL is below UNMEASURED_SHARE of it. None without such a rate.
        """
        references, facts, share = self._of.references, self._facts, self._rule.share(GEMM)
        work = training_work(self._rule.metric, facts) if share else None
        rates = references.gemm_rates.get(work.spec_key, {}) if work else {}
        if not share or not work or not work.flops_per_token or not rates:
            return None
        skus = [references.sku(model) for model in str(facts.get("gpu") or "").split(MODEL_SEPARATOR)]
        is_measured = all(isinstance(sku, Sku) and sku.trained for sku in skus)
        fail_below, warn_below = share if is_measured else UNMEASURED_SHARE * share, self._rule.share(GEMM, _WARN)
        all_rates, tokens, data_type = median(rates.values()), 1e12 / work.flops_per_token, work.spec_key

        @cache
        def basis(rate: float) -> Basis:
            name = f"{rate:.4g} TFLOP/s, the {data_type} GEMM rate of this run"
            return Basis(BasisKind.RUN, name, rate * tokens, self._unit, fail_below=fail_below, warn_below=warn_below)

        return lambda metric: self._by_share(metric, basis(rates.get(metric.subject, all_rates)))

    def _all_reduce_share(self) -> Comparison | None:
        """Comparison of a training with its speed if each step is followed by an all-reduce of the fp32 gradients.

        Its time follows from the busbw of this run, that of the rest of the step was measured. None without them.
        """
        fail_below, warn_below = self._rule.share(ALL_REDUCE), self._rule.share(ALL_REDUCE, _WARN)
        ranks, busbw = self._facts.get("world_size"), self._of.references.all_reduce
        training = self._facts.get("training")
        work = training if isinstance(training, dict) else {}
        sizes = map(work.get, ("parameters", "batch", "seq_len"))
        parameters, batch, seq_len = (each if isinstance(each, int) else 0 for each in sizes)
        if not fail_below or not busbw or not self._step_times or not isinstance(ranks, int) or not parameters:
            return None
        communication = 8 * parameters * (ranks - 1) / ranks / busbw / 1e9
        expected = batch * seq_len / (median(self._step_times) + communication)
        if expected <= 0:
            return None
        name = f"{1e3 * communication:.3g} ms for the gradients at the {busbw:.4g} GB/s of this run's all-reduce"
        basis = Basis(BasisKind.RUN, name, expected, self._unit, fail_below=fail_below, warn_below=warn_below)
        return partial(self._by_share, basis=self._listed(basis))

    def _outlier(self) -> Comparison:
        """WARN for a low outlier of the peer group; a uniform slowdown of the group is not detected."""
        peers = self._peers
        if not peers.gives_reference:
            return lambda metric: self._make(metric, _SKIP, Reason.TOO_FEW_PEERS)
        basis = self._peers_basis(peers, None, self._rule.share(PEERS, _WARN))

        def compare(metric: Metric) -> Verdict:
            verdict = self._by_share(metric, basis)
            if verdict.outcome is _PASS or peers.is_low_outlier(metric.value):
                return verdict
            return self._make(metric, _PASS, basis=basis, ratio=verdict.ratio)

        return compare

    def _peers_basis(self, peers: PeerGroup, fail_below: float | None, warn_below: float | None = None) -> Basis:
        """What the peers reach, on the node or on all nodes.

        Noise that all GPUs of a node share, such as the temperature of the room, does not affect the comparison on the
        node.
        """
        count = "the faster of 2" if len(peers.values) == 2 else f"{len(peers.values)} subjects"
        name = f"{count} on {peers.model}" + (f" in {peers.node}" if peers.node else "")
        basis = Basis(BasisKind.PEERS, name, peers.healthy, self._unit, fail_below=fail_below, warn_below=warn_below)
        return self._listed(basis)

    def _reference(self, reference: Reference) -> Comparison:
        """Comparison with a baseline or SKU value, the bound of the network, or the median of the peers."""
        of, rule, peers = self._of, self._rule, self._peers
        key, facts, references = of.lookup.reference_key, self._facts, of.references
        ring = references.with_ring(key, facts, reference)
        fail_below = reference.required_value(rule.share(REFERENCE) or 0.0) / reference.value
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
            warn_below=rule.share(REFERENCE, _WARN) or 0.0 if reference.warn_below is None else reference.warn_below,
            arithmetic=reference.arithmetic,
            lax_reason=lax_reference(reference, of.lookup, facts, references),
        )
        self._listed(basis)

        def compare(metric: Metric) -> Verdict:
            value = metric.value
            ratio, is_low = value / reference.value, peers.is_low_outlier(value)
            if reference.kind is BasisKind.PEERS and (ratio >= fail_below or not is_low):
                reasons = (Reason.BELOW_PEERS, Reason.NO_REFERENCE) if is_low else (Reason.NO_REFERENCE,)
                return self._make(metric, _UNJUDGED, *reasons, basis=basis, ratio=ratio, detail=reference.source)
            if ratio > highest:
                return self._make(metric, _UNJUDGED, Reason.IMPLAUSIBLY_HIGH, basis=basis, ratio=ratio)
            verdict = self._by_share(metric, basis)
            if verdict.outcome is _PASS and is_low:
                return self._make(metric, _WARN, Reason.BELOW_PEERS, basis=basis, ratio=ratio)
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
        comparisons, runs = [*map(self._reference, applied)], applied[0].runs
        weak, outcome = "", _UNJUDGED
        if len(applied) == 1 and self._of.references.site_includes_run:
            weak = "the only reference value was learned from this run"
        elif len(applied) == 1 and runs < MIN_BASELINE_RUNS:
            weak = f"the baseline has this value from {runs} of {MIN_BASELINE_RUNS} runs that a PASS needs"
            outcome = _WARN

        def compare(metric: Metric) -> Verdict:
            verdicts = [each(metric) for each in comparisons]
            verdict = min(verdicts, key=lambda verdict: (_RANK[verdict.outcome], verdict.ratio or 0.0))
            if not weak or verdict.outcome not in (_PASS, _WARN) or (verdict.outcome is outcome):
                return verdict
            reasons = (*verdict.reasons, Reason.WEAK_BASELINE)
            return replace(verdict, outcome=outcome, reasons=reasons, detail=weak, fix=_LEARN_FROM_OTHERS)

        return compare

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
        outcome, interval = violation(metric, limit, is_met_by, outcome)
        reasons = _INCONCLUSIVE if interval else _VIOLATED
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


def _limits_by_gpu(limit: Limit, group: MeasurementGroup, metrics: Sequence[Metric]) -> dict[str, float]:
    """GPU → the value that it must exceed: a share of its value of another metric, or of this / GPUs of its node."""
    gpus = Counter(node_of(metric.subject) for metric in metrics)
    return {
        single.subject: limit.value * single.value / (gpus[node] if limit.is_per_gpu else 1)
        for single in group.metrics.get(limit.single_metric, ())
        if (node := node_of(single.subject)) in gpus
    }


def values_above_peak(check: Check, measured: Iterable[Measurement], references: References) -> Iterator[Verdict]:
    """An ERROR for each training metric above the bound that follows from the GPU's peak TFLOP/s.

    Most training metrics have no rule; the bounds of other metrics are checked where their rules are evaluated.
    """
    bounded = {name.partition(".")[0] for name in check.units}.intersection(BOUNDED_METRICS)
    for measurement in measured if bounded else ():
        for metric in measurement.metrics:
            if metric.name.partition(".")[0] in bounded:
                lookup = MetricLookup(metric.name, metric.name)
                bound = bound_in_unit(lookup, metric.unit, measurement.facts, references)
                if bound and metric.value > bound.value:
                    yield _above_physical_limit(check.name, metric, bound)


def _above_physical_limit(check: str, metric: Metric, bound: Bound) -> Verdict:
    """An ERROR for a metric above its hardware bound, which is a measurement error."""
    return Verdict(
        check=check,
        subject=metric.subject,
        outcome=_ERROR,
        metric=metric.name,
        reasons=(Reason.MEASUREMENT_ERROR,),
        detail=f"above the physical limit: {bound.derivation}",
        value=metric.value,
        unit=metric.unit,
        basis=Basis(BasisKind.PHYSICAL_LIMIT, "the hardware", bound.value, bound.unit, "<="),
        evidence=_evidence(metric),
    )


def _evidence(metric: Metric) -> str:
    """The value of a metric, the range of its samples, and the evidence that the check gave with the value."""
    text, samples = f"{metric.name} = {format_value(metric.value, metric.unit)} on {metric.subject}", metric.samples
    if len(samples) > 1:
        low, high = format_value(min(samples), metric.unit), format_value(max(samples), metric.unit)
        text += f", {len(samples)} samples from {low} to {high}"
    given = metric.evidence if isinstance(metric.evidence, dict) else {"": metric.evidence}
    for name, value in given.items():
        if value:
            shown = json.dumps(value, ensure_ascii=False)
            shown = shown if len(shown) <= _MAX_FACT_CHARS else f"{shown[:_MAX_FACT_CHARS]}…"
            text += f"; {name}: {shown}" if name else f"; {shown}"
    return text
