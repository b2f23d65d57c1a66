"""What one rule holds a figure to on devices of one kind, and the verdict on each figure by it. Pure.

Thousands of like subjects are held to the same: what is known of their kind, what speaks against a threshold, and the
words for both are found once.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cached_property

from pydantic import JsonValue

from seatrial.checks.base import Check
from seatrial.hardware.bounds import Bound, Figure, bound
from seatrial.hardware.references import MIXED, Fleet, Known, Reference
from seatrial.judge.groups import NOBODY, Fleets, Group
from seatrial.judge.plausibility import TIMES, WEAK, beyond, figure_of, flaw, laxness, passes, weakness
from seatrial.model import HARDLY, Limit, Metric, Outcome, Rule, Verdict, format_value
from seatrial.util.quantiles import median_interval

# Of what the hardware is known to reach. The largest gain by software that we know of is NVLink SHARP's: from 370 to
# 480 GB/s busbw of all-reduce on eight H100 (NVIDIA/nccl#1455). What is beyond half as much again was measured wrongly,
# or the reference is wrong.
BELIEVABLE = 1.5
_PASS = Outcome.PASS  # once: to ask an enum for a member takes as long as a call
NO_TROUBLE = (_PASS, Outcome.SKIP)
RECORDED = "rule: where somebody knows what good hardware reaches"
_NEVER_NEGATIVE = ("B", "s", "ms", "us", "count")  # and what is per second; of others a rule says so
_BEHIND = "far under the others of this trial"
_SHOWN = 600  # characters of a fact in the evidence; the whole stands in the record

Said = tuple[Outcome, str, str]  # outcome, reason, and who judged


@dataclass(frozen=True, eq=False)
class Standard:
    """One rule of ``check`` where a metric is in ``unit``, and device, ranks and nodes are those of ``facts``.

    ``trial`` is the name of the trial whose threshold the rule is, empty where it is the check's own.
    """

    check: str
    rule: Rule
    unit: str
    facts: Mapping[str, JsonValue]
    trial: str
    known: Known
    fleet: Fleet
    figure: Figure

    def verdict(self, metric: Metric, facts: Mapping[str, JsonValue]) -> Verdict:
        """``facts``: all that was recorded where ``metric`` was measured, which the rule may want to show."""
        figure = f"{metric.name} is {format_value(metric.value, metric.unit)}"
        if not 0 <= metric.value <= self._ceiling and (wrong := self._impossible(metric)):
            outcome, reason, judged_by = Outcome.ERROR, f"{figure}, {wrong}", ""
        else:
            outcome, reason, judged_by = self._judged(metric, figure)
        if outcome in NO_TROUBLE:
            return Verdict(self.check, metric.subject, outcome, reason, metric.name, "", "", judged_by)
        return Verdict(
            check=self.check,
            subject=metric.subject,
            metric=metric.name,
            outcome=outcome,
            reason=f"{reason}: {self.rule.why}" if self.rule.why else reason,
            evidence=evidence_of(metric) + _shown(self.rule, facts),
            fix=self.rule.fix,
            judged_by=judged_by,
        )

    def _impossible(self, odd: Metric) -> str:
        """Why a value below 0 or beyond the hardware cannot be; empty where it can.

        One below 0 cannot by its unit, or since the rule would find it good.
        """
        if self._most and odd.value > self._most.value:
            return f"which nothing here can reach: it was measured wrongly: {self._most.arithmetic}"
        rule, never = self.rule, "/s" in odd.unit or odd.unit in _NEVER_NEGATIVE
        wrong = never or (rule.expect and not rule.signed and rule.expect.holds(odd.value))
        return "which cannot be below 0: it was measured wrongly" if wrong else ""

    @cached_property
    def _ceiling(self) -> float:
        return self._most.value if self._most else math.inf

    @cached_property
    def _most(self) -> Bound | None:
        """What the hardware can do. Of trainings, of which each place may have another, ``peaks`` tells.

        Not between nodes: an algorithm that we do not model may ask less of the network.
        """
        models = self.figure.bound and self.facts.get("nodes") in (None, 1)
        most = bound(self.figure, self.facts, self.known) if models else None
        return most if most and most.unit == self.unit else None

    @cached_property
    def _judged(self) -> Callable[[Metric, str], Said]:
        """How a metric is judged of which a figure says in words what it is."""
        if self.rule.expect is not None:
            return _Asked(self, self.rule.expect).judged
        if self.rule.siblings:
            return self._among
        found = self.known.find(self.figure.key, self.facts, NOBODY if self.rule.if_known else self.fleet, self.unit)
        return self._unknown(found) if isinstance(found, str) else _Compared(self, found).judged

    def _unknown(self, why: str) -> Callable[[Metric, str], Said]:
        if self.rule.if_known:
            return lambda _, figure: (Outcome.SKIP, f"{figure}, recorded and judged by nothing: {why}", RECORDED)
        return lambda _, figure: (Outcome.UNJUDGED, f"{figure}, and {why}", "")

    def _among(self, metric: Metric, figure: str) -> Said:
        """Beside its siblings alone: who is slower than the rest is seen, and whether all are slow is not asked."""
        if not self.fleet.known:
            return Outcome.SKIP, f"{figure}; there are too few of one model to be compared with each other", ""
        of, judged_by = self._siblings
        share = metric.value / self.fleet.median
        far = share < self.rule.warn_below and self.fleet.outlying(metric.value)
        return (Outcome.WARN if far else _PASS), f"{figure}, {share:.1%} of {of}", judged_by

    @cached_property
    def _siblings(self) -> tuple[str, str]:
        """What the others of a trial reach, and how that judges."""
        of = f"median of {len(self.fleet.values)} subjects on {self.fleet.model}"
        least = f"{of}; warns under {self.rule.warn_below:.0%}"
        return f"the {format_value(self.fleet.median, self.unit)} that is the {of}", least


class Standards:
    """The standards of one rule, each made once: by kind of device and, where nodes are judged apart, by node."""

    def __init__(self, check: Check, rule: Rule, trial: str, known: Known, fleets: Fleets | None) -> None:
        self._check, self._rule, self._trial, self._known, self._fleets = check.name, rule, trial, known, fleets
        self._figure = figure_of(check, rule.metric, rule.baseline or "")
        self._made: dict[tuple[object, ...], Standard] = {}
        # a threshold of the check itself says the same of a value wherever it was measured
        self._anywhere = rule.expect is not None and not rule.baseline and not trial
        self._good: dict[tuple[float, str], tuple[str, str]] = {}
        self._asked: tuple[Group, Fleet, str] | None = None
        self._found: Standard

    def verdict(self, group: Group, metric: Metric) -> Verdict:
        """On a metric that was measured at one of the places of ``group``."""
        once = self._anywhere and not metric.samples
        if once and (same := self._good.get((metric.value, metric.unit))):
            reason, judged_by = same
            return Verdict(self._check, metric.subject, _PASS, reason, metric.name, "", "", judged_by)
        fleet = self._fleets.of(group.model, metric.subject) if self._fleets else NOBODY
        asked = group, fleet, metric.unit
        if asked != self._asked:  # of a node's pairs the same is asked again and again
            self._asked, self._found = asked, self._of(group, fleet, metric.unit)
        verdict = self._found.verdict(metric, group.facts)
        if once and verdict.outcome is _PASS:
            self._good[metric.value, metric.unit] = verdict.reason, verdict.judged_by
        return verdict

    def _of(self, group: Group, fleet: Fleet, unit: str) -> Standard:
        alike = not self._rule.like or self._rule.like.items() <= group.facts.items()
        kind = (group.shape, alike, fleet.node, unit)
        if (found := self._made.get(kind)) is None:
            found = Standard(self._check, self._rule, unit, group.facts, self._trial, self._known, fleet, self._figure)
            self._made[kind] = found
        return found


class _Compared:
    """Beside what is known: a figure of the site or the SKU files, or the fleet's own median."""

    def __init__(self, standard: Standard, known: Reference) -> None:
        self._known, self._fleet = known, standard.fleet
        rule = standard.rule
        self._least = rule.fail_below if known.floor is None else known.floor / known.value
        self._good = max(rule.warn_below, self._least)
        self._given = f"the {format_value(known.value, known.unit)} that {known.of} gives"
        self._by = (
            f"{known.of}: {known.value:g} {known.unit} ({known.source}); "
            f"fails under {self._least:.0%}, warns under {rule.warn_below:.0%}"
            f"{weakness(known, standard.figure, standard.facts, standard.known)}"
        )

    def judged(self, metric: Metric, figure: str) -> Said:
        known, least = self._known, self._least
        share = metric.value / known.value
        reason = f"{figure}, {share:.1%} of {self._given}"
        behind = self._fleet.outlying(metric.value)
        if known.deviation is not None and (share >= least or not behind):
            told = f"{reason}, and {_BEHIND}" if behind else reason
            return Outcome.UNJUDGED, f"{told}; {known.source}", self._by
        if share > BELIEVABLE:
            return Outcome.UNJUDGED, f"{reason}, which is more than can be believed of either", self._by
        if share >= self._good:
            return (Outcome.WARN, f"{reason}, and {_BEHIND}", self._by) if behind else (_PASS, reason, self._by)
        if share >= least:
            return Outcome.WARN, reason, self._by
        interval, of_it = _interval(metric)
        if interval and interval[1] >= least * known.value:
            return Outcome.WARN, f"{reason}, which {of_it} does not exclude ({_range(interval, metric)})", self._by
        return Outcome.FAIL, reason, self._by


class _Asked:
    """Beside a threshold, which may itself be wrong where a trial gives it."""

    def __init__(self, standard: Standard, limit: Limit) -> None:
        self._standard, self._rule, self._limit = standard, standard.rule, limit
        text = format_value(limit.value, standard.unit)
        self._words = text if standard.unit == "bool" else f"{limit.op} {text}"
        self._by = f"trial {standard.trial}: {self._words}" if standard.trial else f"rule: {self._words}"
        baseline = self._rule.baseline
        self._published = standard.known.published(baseline, standard.facts) if baseline else ""

    def judged(self, metric: Metric, figure: str) -> Said:
        limit, of_trial, judged_by = self._limit, self._standard.trial, self._by
        if limit.unit and limit.unit != metric.unit:
            return Outcome.UNJUDGED, f"{figure}, and the threshold is in {limit.unit!r}", ""
        if of_trial and self._flaw:
            return Outcome.ERROR, f"{figure}, and the threshold says nothing: {self._flaw}", judged_by
        if of_trial:
            judged_by += self._sense(metric)
        if limit.holds(metric.value):
            return (*self._held(metric, figure), judged_by)
        reason = f"{figure}, expected {self._words}"
        if of_trial and self._beyond:
            return Outcome.ERROR, f"{reason}, and the threshold says nothing: {self._beyond}", judged_by
        interval, of_it = _interval(metric)
        if interval and any(limit.holds(end) for end in interval):
            return Outcome.WARN, f"{reason}, which {of_it} still reaches ({_range(interval, metric)})", judged_by
        return self._rule.breach, reason, judged_by

    @cached_property
    def _flaw(self) -> str:
        one = self._standard
        return flaw(self._limit, one.unit, one.figure, one.facts, one.known)

    @cached_property
    def _beyond(self) -> str:
        one = self._standard
        return beyond(self._limit, one.unit, one.figure, one.facts, one.known)

    def _held(self, metric: Metric, figure: str) -> tuple[Outcome, str]:
        """Of a figure that holds a limit: whether it can be believed, and whether its like are far better."""
        limit = self._limit
        if self._rule.baseline and limit.op in (">", ">="):
            best = self._best
            if best and metric.value > BELIEVABLE * best.value:
                share, most = f"{metric.value / best.value:.1%}", format_value(best.value, best.unit)
                return Outcome.UNJUDGED, f"{figure}, {share} of {most}, which is more than can be believed: {best.of}"
            if self._standard.fleet.outlying(metric.value):
                return Outcome.WARN, f"{figure}, and {_BEHIND}"
        return _PASS, figure

    @cached_property
    def _best(self) -> Reference | None:
        """What a figure is too good to be true beside: what is published of the same.

        Of a training with settings of its own, say, what is published tells nothing.
        """
        one, best = self._standard, self._published
        alike = self._rule.like.items() <= one.facts.items()
        return best if alike and isinstance(best, Reference) and best.unit == one.unit else None

    def _sense(self, metric: Metric) -> str:
        """What a threshold of the trial is worth beside what is known: one far under that hardly tests anything.

        Where nothing is known of this figure, what a GPU that is known has just reached is the least that can be
        expected of it. Of a CPU, and of a model that is unknown, nothing is expected.
        """
        limit, published = self._limit, self._published
        if self._laxness < WEAK:
            return f"; {HARDLY}: the check itself asks for {self._rule.own}"
        if limit.op not in (">", ">="):
            return "" if self._strange else _slack(limit, metric)
        known = isinstance(published, Reference) and published.unit == metric.unit
        if isinstance(published, Reference) and known:
            best, of = published.value, f"the {format_value(published.value, published.unit)} of {published.of}"
        elif self._strange:
            return ""
        else:
            best, of = metric.value, f"the {format_value(metric.value, metric.unit)} that was measured here"
        share = limit.value / best if best > 0 else 1.0
        if share < WEAK:
            return f"; {HARDLY}: {100 * share:.2g}% of {of}: {passes(share)}"
        good = isinstance(published, Reference) and share > 1
        return f"; BEYOND {of}: good hardware of this shape fails it" if good else ""

    @cached_property
    def _laxness(self) -> float:
        return laxness(self._limit, self._rule.own)

    @cached_property
    def _strange(self) -> bool:
        """Whether a model is among the devices of which nothing is known."""
        gpus = str(self._standard.facts.get("gpu") or "").split(MIXED)
        return any(isinstance(self._standard.known.sku(gpu), str) for gpu in gpus)


def _slack(limit: Limit, metric: Metric) -> str:
    """What a limit of a time is worth, of which nothing is known but what was measured here."""
    if metric.unit not in TIMES or limit.op == "==" or metric.value >= WEAK * limit.value:
        return ""
    took, times = format_value(metric.value, metric.unit), limit.value / max(metric.value, 1e-9)
    return f"; {HARDLY}: beside the {took} that was measured here, what is {times:,.3g} times slower passes"


def _interval(metric: Metric) -> tuple[tuple[float, float] | None, str]:
    """What the samples leave open of a value, and its name; None where they say nothing of it.

    Too few for an interval leave open all that they show, and no more: the slower something is, the fewer samples of it
    there are, and what is slow in each of three is not good because they are three. Samples that the value is not
    among are of something else.
    """
    samples = metric.samples
    if len(samples) < 2 or not min(samples) <= metric.value <= max(samples):
        return None, ""
    if interval := median_interval(samples):
        return interval, "its own 95 % interval"
    return (min(samples), max(samples)), f"the range of its {len(samples)} samples, too few for an interval,"


def _range(interval: tuple[float, float], metric: Metric) -> str:
    return " to ".join(format_value(bound, metric.unit) for bound in interval)


def _shown(rule: Rule, facts: Mapping[str, JsonValue]) -> str:
    """The facts that the rule shows, as they were recorded, each cut to a length that a person reads."""
    texts = {name: json.dumps(facts[name], ensure_ascii=False) for name in rule.shows if facts.get(name)}
    return "".join(f"; {name}: {text[:_SHOWN]}{'…' if len(text) > _SHOWN else ''}" for name, text in texts.items())


def evidence_of(metric: Metric) -> str:
    """What stands beside a verdict that somebody has to look into; the record has it of all."""
    figure, samples = f"{metric.name} = {format_value(metric.value, metric.unit)} on {metric.subject}", metric.samples
    if len(samples) < 2:
        return figure
    low, high = format_value(min(samples), metric.unit), format_value(max(samples), metric.unit)
    return f"{figure}, {len(samples)} samples from {low} to {high}"
