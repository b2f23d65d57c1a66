"""What one rule holds a value to on devices of one kind, and the verdict on each value by it. Pure.

Thousands of like subjects are held to the same: the reference, the threshold and its flaws are looked up once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.hardware.bounds import Bound, MetricLookup, hardware_bound
from seatrial.hardware.references import MODEL_SEPARATOR, PeerGroup, Reference, References
from seatrial.judge.groups import NO_PEERS, MeasurementGroup, PeerGroups
from seatrial.judge.plausibility import (
    LAX_RATIO,
    TIME_UNITS,
    above_reference,
    lax_reference,
    metric_lookup,
    relative_strictness,
    threshold_error,
    undetected_slowdown,
)
from seatrial.model import Basis, BasisKind, Metric, Outcome, Reason, Rule, Threshold, Verdict, format_value
from seatrial.util.quantiles import median_interval

# Of what the hardware is known to reach. The largest gain by software that we know of is NVLink SHARP's: from 370 to
# 480 GB/s busbw of all-reduce on eight H100 (NVIDIA/nccl#1455). What is beyond half as much again was measured wrongly,
# or the reference is wrong.
BELIEVABLE = 1.5
PASS_OR_SKIP = (Outcome.PASS, Outcome.SKIP)
_PASS, _SKIP = PASS_OR_SKIP  # once: to ask an enum for a member takes as long as a call
_NEVER_NEGATIVE = ("B", "s", "ms", "us", "count")  # and what is per second; of others a rule says so
_LOWER_BOUNDS = (">", ">=")
_SHOWN = 600  # characters of a fact in the evidence; the whole stands in the record


class RuleEvaluators:
    """The standards of one rule, each made once: by kind of device and, where nodes are judged apart, by node."""

    def __init__(self, check: Check, rule: Rule, trial: str, known: References, fleets: PeerGroups | None) -> None:
        self._check, self._rule, self._trial, self._known, self._fleets = check.name, rule, trial, known, fleets
        self._figure = metric_lookup(check, rule.metric, rule.reference or "")
        self._made: dict[tuple[object, ...], Standard] = {}
        # a threshold of the check itself says the same of a value wherever it was measured
        self._anywhere = rule.expect is not None and not rule.reference and not trial
        self._good: dict[tuple[float, str], Verdict] = {}
        self._asked: tuple[MeasurementGroup, PeerGroup, str] | None = None
        self._standard: Standard

    def verdict(self, group: MeasurementGroup, metric: Metric) -> Verdict:
        """On a metric that was measured at one of the places of ``group``."""
        value, unit = metric.value, metric.unit
        if self._anywhere and not metric.samples and (same := self._good.get((value, unit))):
            return Verdict(self._check, metric.subject, _PASS, metric.name, (), "", value, unit, same.basis)
        fleet = self._fleets.group_of(group.gpu_model, metric.subject) if self._fleets else NO_PEERS
        asked = group, fleet, metric.unit
        if asked != self._asked:  # of a node's pairs the same is asked again and again
            like = self._rule.reference_if.items() <= group.facts.items()
            kind = (group.shape, like, fleet.node, metric.unit)
            if kind not in self._made:
                self._made[kind] = Standard(
                    self._check, self._rule, metric.unit, group.facts, self._trial, self._known, fleet, self._figure
                )
            self._asked, self._standard = asked, self._made[kind]
        verdict = self._standard.verdict(metric)
        if verdict.outcome is _PASS:
            if self._anywhere:
                self._good[value, unit] = verdict
            return verdict
        if verdict.outcome is _SKIP:
            return verdict
        rule, evidence = self._rule, measured_evidence(metric) + _shown_facts(self._rule, group.facts)
        return replace(verdict, meaning=rule.meaning, evidence=evidence, fix=rule.fix)


@dataclass
class Standard:
    """One rule of ``check`` where a metric is in ``unit``, and device, ranks and nodes are those of ``facts``.

    ``trial`` is the name of the trial whose threshold the rule is, empty where it is the check's own.
    """

    check: str
    rule: Rule
    unit: str
    facts: Mapping[str, JsonValue]
    trial: str
    known: References
    fleet: PeerGroup
    figure: MetricLookup

    def verdict(self, metric: Metric) -> Verdict:
        """Without what the rule says of a bad value."""
        value = metric.value
        if value > self._ceiling and self._most:
            return above_physical_limit(self.check, metric, self._most)
        if value < 0:
            rule, never = self.rule, "/s" in metric.unit or metric.unit in _NEVER_NEGATIVE
            if never or (rule.expect and not rule.may_be_negative and rule.expect.is_met_by(value)):
                return self.on(metric, Outcome.ERROR, Reason.NEGATIVE_VALUE)
        return self._judge(metric)

    def on(
        self,
        metric: Metric,
        outcome: Outcome,
        *reasons: Reason,
        basis: Basis | None = None,
        share: float | None = None,
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
            share,
            interval=interval,
        )

    @cached_property
    def _ceiling(self) -> float:
        return self._most.value if self._most else math.inf

    @cached_property
    def _most(self) -> Bound | None:
        """What the hardware can do. Of trainings, of which each place may have another, ``peaks`` tells.

        Not between nodes: an algorithm that we do not model may ask less of the network.
        """
        models = self.figure.bounded_by and self.facts.get("nodes") in (None, 1)
        most = hardware_bound(self.figure, self.facts, self.known) if models else None
        return most if most and most.unit == self.unit else None

    @cached_property
    def _judge(self) -> Callable[[Metric], Verdict]:
        rule = self.rule
        if rule.expect is not None:
            return _Threshold(self, rule.expect).verdict
        if rule.compare_with_peers:
            return self._among_peers
        found = self.known.find(
            self.figure.reference_key, self.facts, NO_PEERS if rule.reference_optional else self.fleet, self.unit
        )
        if isinstance(found, Reference):
            return _Reference(self, found).verdict
        if rule.reference_optional:
            return lambda metric: self.on(metric, Outcome.SKIP, Reason.NO_THRESHOLD, detail=found)
        return lambda metric: self.on(metric, Outcome.UNJUDGED, Reason.NO_REFERENCE, detail=found)

    def _among_peers(self, metric: Metric) -> Verdict:
        """Beside its peers alone: who is slower than the rest is seen, and whether all are slow is not asked."""
        if not self.fleet.gives_reference:
            return self.on(metric, Outcome.SKIP, Reason.TOO_FEW_PEERS)
        basis = self._peers
        share = metric.value / self.fleet.median
        if share < self.rule.warn_below and self.fleet.is_low_outlier(metric.value):
            return self.on(metric, Outcome.WARN, Reason.BELOW_WARNING_THRESHOLD, basis=basis, share=share)
        return self.on(metric, _PASS, basis=basis, share=share)

    @cached_property
    def _peers(self) -> Basis:
        name = f"{len(self.fleet.values)} subjects on {self.fleet.model}"
        return Basis(BasisKind.PEERS, name, self.fleet.median, self.unit, warn_below=self.rule.warn_below)


class _Reference:
    """Beside what is known: a value of the site or the SKU files, or the median of the peers."""

    def __init__(self, standard: Standard, known: Reference) -> None:
        rule = standard.rule
        self._check, self._on, self._known, self._fleet = standard.check, standard.on, known, standard.fleet
        self._least = rule.fail_below if known.required is None else known.required / known.value
        self._good = max(rule.warn_below, self._least)
        self._basis = Basis(
            known.kind,
            known.name,
            known.value,
            known.unit,
            source=known.source,
            fail_below=self._least,
            warn_below=rule.warn_below,
            lax_reason=lax_reference(known, standard.figure, standard.facts, standard.known),
        )

    def verdict(self, metric: Metric) -> Verdict:
        known, least, basis = self._known, self._least, self._basis
        share = metric.value / known.value
        behind = (Reason.BELOW_PEERS,) if self._fleet.is_low_outlier(metric.value) else ()
        if known.kind is BasisKind.PEERS and (share >= least or not behind):
            reasons = (*behind, Reason.NO_ABSOLUTE_REFERENCE)
            return self._on(metric, Outcome.UNJUDGED, *reasons, basis=basis, share=share, detail=known.source)
        if share > BELIEVABLE:
            return self._on(metric, Outcome.UNJUDGED, Reason.IMPLAUSIBLY_HIGH, basis=basis, share=share)
        if share >= self._good:
            if behind:
                return self._on(metric, Outcome.WARN, *behind, basis=basis, share=share)
            return Verdict(
                self._check, metric.subject, _PASS, metric.name, (), "", metric.value, metric.unit, basis, share
            )
        if share >= least:
            return self._on(metric, Outcome.WARN, Reason.BELOW_WARNING_THRESHOLD, basis=basis, share=share)
        interval, reaches = _interval(metric)
        if interval and interval[1] >= least * known.value:
            reasons = (Reason.THRESHOLD_VIOLATED, reaches)
            return self._on(metric, Outcome.WARN, *reasons, basis=basis, share=share, interval=interval)
        return self._on(metric, Outcome.FAIL, Reason.THRESHOLD_VIOLATED, basis=basis, share=share)


class _Threshold:
    """Beside a threshold, which may itself be wrong where a trial gives it."""

    def __init__(self, standard: Standard, limit: Threshold) -> None:
        self._standard, self._on, self._limit = standard, standard.on, limit
        kind = BasisKind.TRIAL if standard.trial else BasisKind.RULE
        self._basis = Basis(kind, standard.trial, limit.value, standard.unit, limit.op)
        self._by_quality = {("", ""): self._basis}
        baseline = standard.rule.reference
        self._published = standard.known.site_or_sku_reference(baseline, standard.facts) if baseline else ""

    def verdict(self, metric: Metric) -> Verdict:
        limit, standard, basis = self._limit, self._standard, self._basis
        if limit.unit and limit.unit != metric.unit:
            return self._on(metric, Outcome.UNJUDGED, Reason.UNIT_MISMATCH, detail=limit.unit)
        if standard.trial:
            if self._flaw:
                return self._on(metric, Outcome.ERROR, Reason.IMPOSSIBLE_THRESHOLD, basis=basis, detail=self._flaw)
            basis = self._with_quality(metric)
        if limit.is_met_by(metric.value):
            return self._held(metric, basis)
        if standard.trial and self._beyond:
            reasons = (Reason.THRESHOLD_VIOLATED, Reason.IMPOSSIBLE_THRESHOLD)
            return self._on(metric, Outcome.ERROR, *reasons, basis=basis, detail=self._beyond)
        interval, reaches = _interval(metric)
        if interval and any(limit.is_met_by(end) for end in interval):
            reasons = (Reason.THRESHOLD_VIOLATED, reaches)
            return self._on(metric, Outcome.WARN, *reasons, basis=basis, interval=interval)
        return self._on(metric, standard.rule.outcome_if_violated, Reason.THRESHOLD_VIOLATED, basis=basis)

    @cached_property
    def _flaw(self) -> str:
        of = self._standard
        return threshold_error(self._limit, of.unit, of.figure, of.facts, of.known)

    @cached_property
    def _beyond(self) -> str:
        of = self._standard
        return above_reference(self._limit, of.unit, of.figure, of.facts, of.known)

    def _held(self, metric: Metric, basis: Basis) -> Verdict:
        """Of a value that holds the threshold: whether it can be believed, and whether its peers are far better."""
        if self._standard.rule.reference and self._limit.op in _LOWER_BOUNDS:
            best = self._best
            if best and metric.value > BELIEVABLE * best.value:
                share, of = metric.value / best.value, f"the {format_value(best.value, best.unit)} of {best.label}"
                reason = Reason.IMPLAUSIBLY_HIGH
                return self._on(metric, Outcome.UNJUDGED, reason, basis=basis, share=share, detail=of)
            if self._standard.fleet.is_low_outlier(metric.value):
                return self._on(metric, Outcome.WARN, Reason.BELOW_PEERS, basis=basis)
        return Verdict(
            self._standard.check, metric.subject, _PASS, metric.name, (), "", metric.value, metric.unit, basis
        )

    @cached_property
    def _best(self) -> Reference | None:
        """What a value is too good to be true beside: what is published of the same.

        Of a training with settings of its own, say, what is published tells nothing.
        """
        of, best = self._standard, self._published
        alike = of.rule.reference_if.items() <= of.facts.items()
        return best if alike and isinstance(best, Reference) and best.unit == of.unit else None

    def _with_quality(self, metric: Metric) -> Basis:
        """The threshold of a trial, with what it is worth beside what is known."""
        quality = self._quality(metric)
        if (basis := self._by_quality.get(quality)) is None:
            basis = self._by_quality[quality] = replace(self._basis, lax_reason=quality[0], exceeds=quality[1])
        return basis

    def _quality(self, metric: Metric) -> tuple[str, str]:
        """Why the threshold hardly tests anything, and the good value that it exceeds; each empty where it does not.

        Where nothing is known of this figure, what a GPU that is known has just reached is the least that can be
        expected of it. Of a CPU, and of a model that is unknown, nothing is expected.
        """
        limit, published, unit = self._limit, self._published, metric.unit
        if self._laxness < LAX_RATIO:
            return f"the check itself asks for {self._standard.rule.check_threshold}", ""
        if limit.op not in _LOWER_BOUNDS:
            if (
                self._unknown_model
                or unit not in TIME_UNITS
                or limit.op == "=="
                or metric.value >= LAX_RATIO * limit.value
            ):
                return "", ""
            here, times = format_value(metric.value, unit), limit.value / max(metric.value, 1e-9)
            return f"beside the {here} that was measured here, a {times:,.3g}x slowdown would pass", ""
        if isinstance(published, Reference) and published.unit == unit:
            best, of = published.value, f"the {format_value(published.value, published.unit)} of {published.label}"
        elif self._unknown_model:
            return "", ""
        else:
            best, of = metric.value, f"the {format_value(metric.value, unit)} that was measured here"
        share = limit.value / best if best > 0 else 1.0
        if share < LAX_RATIO:
            return f"{100 * share:.2g}% of {of}: {undetected_slowdown(share)}", ""
        return "", of if isinstance(published, Reference) and share > 1 else ""

    @cached_property
    def _laxness(self) -> float:
        return relative_strictness(self._limit, self._standard.rule.check_threshold)

    @cached_property
    def _unknown_model(self) -> bool:
        """Whether a model is among the devices of which nothing is known."""
        gpus = str(self._standard.facts.get("gpu") or "").split(MODEL_SEPARATOR)
        return any(isinstance(self._standard.known.sku(gpu), str) for gpu in gpus)


def above_physical_limit(check: str, metric: Metric, most: Bound) -> Verdict:
    """An ERROR: a value above ``most`` was measured wrongly."""
    return Verdict(
        check=check,
        subject=metric.subject,
        outcome=Outcome.ERROR,
        metric=metric.name,
        reasons=(Reason.ABOVE_PHYSICAL_LIMIT,),
        detail=most.derivation,
        value=metric.value,
        unit=metric.unit,
        basis=Basis(BasisKind.PHYSICAL_LIMIT, "the hardware", most.value, most.unit, "<="),
        evidence=measured_evidence(metric),
    )


def measured_evidence(metric: Metric) -> str:
    """What stands beside a verdict that somebody has to look into; the record has it of all."""
    figure, samples = f"{metric.name} = {format_value(metric.value, metric.unit)} on {metric.subject}", metric.samples
    if len(samples) < 2:
        return figure
    low, high = format_value(min(samples), metric.unit), format_value(max(samples), metric.unit)
    return f"{figure}, {len(samples)} samples from {low} to {high}"


def _shown_facts(rule: Rule, facts: Mapping[str, JsonValue]) -> str:
    """The facts that the rule shows, as they were recorded, each cut to a length that a person reads."""
    texts = {name: json.dumps(facts[name], ensure_ascii=False) for name in rule.evidence_facts if facts.get(name)}
    return "".join(f"; {name}: {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}" for name, text in texts.items())


def _interval(metric: Metric) -> tuple[tuple[float, float] | None, Reason]:
    """What the samples leave open of a value; None where they say nothing of it.

    Too few for an interval leave open all that they show, and no more: the slower something is, the fewer samples of it
    there are, and what is slow in each of three is not good because they are three. Samples that the value is not
    among are of something else.
    """
    samples = metric.samples
    if len(samples) < 2 or not min(samples) <= metric.value <= max(samples):
        return None, Reason.WITHIN_SAMPLE_RANGE
    if interval := median_interval(samples):
        return interval, Reason.WITHIN_CONFIDENCE_INTERVAL
    return (min(samples), max(samples)), Reason.WITHIN_SAMPLE_RANGE
