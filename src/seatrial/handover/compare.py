"""Compares two records, or two sets of records: the speeds of each part, the parts that fail, and facts that differ.

The spread of a speed between runs is that of the sets, if they have enough records, else that of repeated runs of one
machine (data/noise.yaml). A comparison of healthy runs has an alarm with a probability of at most SIGNIFICANCE: each
alarm costs somebody a repair. The false discovery rate would let one alarm in twenty be false.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, median, variance
from typing import Literal

from pydantic import Field

from seatrial.handover.changed_facts import FactChange, changed_facts, possible_causes
from seatrial.handover.side import Side, Speed, sides
from seatrial.judge.plausibility import TIME_UNITS
from seatrial.model import Frozen, Trial
from seatrial.report.formatting import subject_kind
from seatrial.report.identity import Gpu
from seatrial.report.view import machine_size
from seatrial.util import data_files
from seatrial.util.grouping import grouped
from seatrial.util.quantiles import CONFIDENCE, t_quantile, t_tail
from seatrial.util.text import and_more, plural

SIGNIFICANCE = 0.05  # highest probability of any alarm in a comparison of healthy runs
# Smaller changes are never reported: healthy machines of one configuration differ by as much (REFERENCE_TOLERANCE), and
# repeated runs within an hour do not show what a reboot or another day changes
MIN_CHANGE = 0.02
MIN_FREEDOM = 4  # degrees of freedom from which the sets themselves give the spread: two sets of three records
NOTABLE_LOSS = 0.04  # smallest losses above this are named
FOUND = 1.645  # standard errors beyond the limit of significance at which a loss is found in 95 of 100 comparisons
MIN_SPREAD = 0.001  # relative; a smaller spread of a few runs is chance
_MEDIAN_VARIANCE = math.pi / 2  # of a median, relative to that of a mean
_NO_SPREAD = "no spread between runs is known: give three records a side"
_FAILS = "fails"
_MAX_NAMED = 4


class Noise(Frozen):
    """The relative standard deviation of a metric between runs of one machine, and its degrees of freedom."""

    spread: float = Field(gt=0)
    freedom: int = Field(gt=0)


class NoiseData(Frozen):
    """Content of data/noise.yaml; the keys of ``speeds`` are a check and a metric."""

    source: str = Field(min_length=1)
    speeds: dict[str, Noise]


@cache
def noise_data() -> NoiseData:
    return NoiseData.model_validate(data_files.read("noise.yaml"))


def pooled(groups: Iterable[Sequence[Sequence[float]]]) -> Noise | None:
    """The noise of a metric in groups of runs; a group has a row for each run, with a speed for each part.

    Parts of one run share the temperature and the load of their host. So the degrees of freedom are fewer than those of
    independent parts; they follow from the spread of the rows' means (Satterthwaite, 1946). They are also fewer if the
    spreads of the groups differ by more than chance (variances with an inverse chi-squared distribution).
    """
    variances = []  # of each group, and its degrees of freedom
    for group in groups:
        rows = [[math.log(value) for value in row] for row in group]
        if len(rows) < 2 or not rows[0]:
            continue
        count, repeats = len(rows[0]), len(rows) - 1
        total = fmean(variance(column) for column in zip(*rows, strict=True))
        of_rows = count * variance([fmean(row) for row in rows])
        of_parts = (count * total - of_rows) / max(count - 1, 1)
        scale = of_rows**2 + (count - 1) * of_parts**2
        variances.append((total, repeats * (count * total) ** 2 / scale if scale else repeats))
    freedom = sum(weight for _, weight in variances)
    if not freedom:
        return None
    mean = max(sum(weight * total for total, weight in variances) / freedom, MIN_SPREAD**2)
    by_chance = 2 * len(variances) / freedom
    excess = sum(weight * (total / mean - 1) ** 2 for total, weight in variances) / freedom - by_chance
    if excess > 0:
        freedom = min(freedom, 4 + 2 / excess)
    return Noise(spread=math.sqrt(mean), freedom=math.floor(freedom + 1e-9))


Effect = Literal["slower", "faster", "same", "not compared"]


@dataclass(frozen=True)
class Change:
    """The speed of one part on both sides. ``part``: its subject on side B.

    ``change`` and ``interval`` are relative to the value before. ``detectable``: the smallest loss of speed that is
    found in 95 of 100 comparisons. ``reason``: why it is not compared.
    """

    check: str
    metric: str
    unit: str
    part: str
    serial: str
    before: float
    after: float
    change: float
    effect: Effect = "not compared"
    reason: str = ""
    interval: tuple[float, float] | None = None
    detectable: float | None = None

    @property
    def speed(self) -> str:
        return f"{self.check} {self.metric}"

    @property
    def loss(self) -> float:
        """The share of the speed that was lost, also for a duration; negative if it is faster."""
        if self.unit not in TIME_UNITS:
            return -self.change
        return 1 - self.before / self.after if self.after else -math.inf


@dataclass(frozen=True)
class Loss:
    """Parts that lost speed in one metric, of all parts that were compared, and what changed where they are."""

    changes: tuple[Change, ...]
    compared: int
    causes: tuple[str, ...]


@dataclass(frozen=True)
class PartChange:
    """A part that fails now (a regression if its check was measured before), passes again, moved, is new or missing."""

    kind: str
    part: str
    text: str


@dataclass(frozen=True)
class Comparison:
    """The result. ``not_comparable``: what was not compared, and why."""

    changes: tuple[Change, ...]
    losses: tuple[Loss, ...]
    parts: tuple[PartChange, ...]
    facts: tuple[FactChange, ...]
    not_comparable: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def has_regression(self) -> bool:
        return bool(self.losses or self.failing)

    @property
    def failing(self) -> int:
        return sum(part.kind == _FAILS for part in self.parts)

    @property
    def tested(self) -> int:
        return sum(change.effect != "not compared" for change in self.changes)


def compare(before: Sequence[Trial], after: Sequence[Trial], noise: NoiseData | None = None) -> Comparison:
    """Compare records of side A with records of side B; pure. Each record has the verdicts of one version."""
    a, b = sides(before, after)
    noise = noise or noise_data()
    if any(trial.decision.cpu_only for trial in (*before, *after)):
        noise = NoiseData(source="unknown for runs without GPUs", speeds={})
    facts = list(changed_facts(a, b))
    changes = _tested(dict(_changes(a, b)), a, b, noise)
    return Comparison(
        changes=tuple(changes),
        losses=tuple(_losses(changes, facts)),
        parts=tuple(_changed_parts(a, b)),
        facts=tuple(facts),
        not_comparable=tuple(_not_comparable(a, b, changes)),
        notes=tuple(_notes(a, b, changes, noise)),
    )


def _changes(a: Side, b: Side) -> Iterator[tuple[tuple[Speed, str], Change]]:
    """(speed, key of a part) → its change, not yet tested, of each that both sides have."""
    options = _other_options(a, b)
    sizes = [" and ".join(sorted({machine_size(trial) for trial in side.trials})) for side in (a, b)]
    for speed, of_b in b.values.items():
        of_a = a.values.get(speed, {})
        for key in filter(of_a.__contains__, of_b):
            before, after = median(of_a[key]), median(of_b[key])
            relative = after / before - 1 if before else 0.0
            serial = b.gpus.get(key, Gpu()).serial
            change = Change(*speed, b.places[key], serial, before, after, relative)
            reason = options.get(change.check, "")
            if key in b.gpus and a.gpus[key].model != b.gpus[key].model:
                reason = f"another GPU model: {a.gpus[key].model} before"
            elif key not in b.gpus and a.gpus and b.gpus and not a.gpus.keys() & b.gpus.keys():
                reason = "no GPU is on both sides, by serial numbers and UUIDs"
            elif sizes[0] != sizes[1] and subject_kind(change.part) not in ("GPU", "node", "port"):
                reason = f"another size: {sizes[0]} before, {sizes[1]} now"
            elif before <= 0 or (after <= 0 and change.unit in TIME_UNITS):
                reason = f"no speed: {before:g} before, {after:g} now"
            yield (speed, key), replace(change, reason=reason)


def _tested(changes: Mapping[tuple[Speed, str], Change], a: Side, b: Side, noise: NoiseData) -> list[Change]:
    """The changes with interval and effect; those whose spread between runs is unknown are not compared.

    The tests share SIGNIFICANCE, of losses alone. A test needs no share if its spread makes MIN_CHANGE improbable.
    """
    spreads = {speed: _noise(speed, a, b, noise) for speed in dict.fromkeys(speed for speed, _ in changes)}
    errors = {}  # standard error of ln(B / A), degrees of freedom
    for (speed, key), change in changes.items():
        spread = spreads[speed]
        if spread and not change.reason and change.after > 0:
            counts = len(a.values[speed][key]), len(b.values[speed][key])
            weights = sum((1.0 if count < 3 else _MEDIAN_VARIANCE) / count for count in counts)
            errors[speed, key] = spread.spread * math.sqrt(weights), spread.freedom
    rare = SIGNIFICANCE / 20 / max(len(errors), 1)
    shares = sum(t_tail(_MIN_RATIO / error, freedom) / 2 > rare for error, freedom in errors.values())
    probability = 0.95 * SIGNIFICANCE / max(shares, 1)
    results = []
    for part, change in changes.items():
        if part in errors:
            results.append(_judged(change, *errors[part], probability))
        elif change.reason:
            results.append(change)
        elif change.after <= 0:  # a rate of 0 has no logarithm, and needs no test
            results.append(replace(change, effect="slower"))
        else:
            results.append(replace(change, reason=_NO_SPREAD))
    return results


_MIN_RATIO = -math.log(1 - MIN_CHANGE)


def _noise(speed: Speed, a: Side, b: Side, noise: NoiseData) -> Noise | None:
    """The noise of a speed in the records of both sides, if they are enough, else in the repeated runs."""
    groups = []
    for side in (a, b):
        columns = [values for values in side.values.get(speed, {}).values() if min(values) > 0]
        groups.append(list(zip(*(each for each in columns if len(each) == len(side.trials)), strict=True)))
    own = pooled(groups)
    return own if own and own.freedom >= MIN_FREEDOM else noise.speeds.get(" ".join(speed[:2]))


def _judged(change: Change, error: float, freedom: int, probability: float) -> Change:
    """The change with its interval and its effect. ``probability``: of a loss without a cause, in this test."""
    ratio = math.log(change.after / change.before)
    half = t_quantile(1 - CONFIDENCE, freedom) * error
    limit = max(t_quantile(2 * probability, freedom) * error, _MIN_RATIO)
    faster = -ratio if change.unit in TIME_UNITS else ratio
    effect: Effect = "slower" if faster <= -limit else "faster" if faster >= limit else "same"
    interval = (math.expm1(ratio - half), math.expm1(ratio + half))
    return replace(change, effect=effect, interval=interval, detectable=-math.expm1(-limit - FOUND * error))


def _losses(changes: Sequence[Change], facts: Sequence[FactChange]) -> list[Loss]:
    """The losses by metric, the largest first."""
    losses = []
    for compared in grouped((each.speed, each) for each in changes if each.effect != "not compared").values():
        slower = sorted((each for each in compared if each.effect == "slower"), key=lambda each: -each.loss)
        if slower:
            causes = possible_causes([each.part for each in slower], [each.part for each in compared], facts)
            losses.append(Loss(tuple(slower), len(compared), tuple(causes)))
    return sorted(losses, key=lambda loss: -loss.changes[0].loss)


def _changed_parts(a: Side, b: Side) -> Iterator[PartChange]:
    for key, (text, checks) in b.failing.items():
        if key not in a.failing:
            kind = _FAILS if checks & a.checks else f"{_FAILS}, its check was not measured before"
            yield PartChange(kind, b.name(key), text)
    for key, (text, checks) in a.failing.items():
        if key not in b.failing and checks & b.checks:
            yield PartChange("passes again", (b if key in b.places else a).name(key), f"before: {text}")
    if not a.gpus or not b.gpus:
        return
    for key in b.gpus:
        if key not in a.gpus:
            yield PartChange("new", b.name(key), "not in the records of A")
        elif a.places[key] != b.places[key]:
            yield PartChange("moved", b.name(key), f"was {a.places[key]}: the same GPU, by serial number or UUID")
    for key in sorted(a.gpus.keys() - b.gpus.keys()):
        yield PartChange("missing", a.name(key), "not in the records of B")


def _other_options(a: Side, b: Side) -> dict[str, str]:
    """Check → its options on both sides, if they differ."""
    found = {}
    for check in a.checks & b.checks:
        texts = []
        for side in (a, b):
            options = [trial.config["checks"].get(check, {}).get("options") or {} for trial in side.trials]
            shown = {", ".join(f"{name} {each[name]}" for name in sorted(each)) or "none" for each in options}
            texts.append(" or ".join(sorted(shown)))
        if texts[0] != texts[1]:
            found[check] = f"other options: {texts[0]} before, {texts[1]} now"
    return found


def _not_comparable(a: Side, b: Side, changes: Sequence[Change]) -> Iterator[str]:
    names = [" and ".join(sorted({trial.name for trial in side.trials})) for side in (a, b)]
    if names[0] != names[1]:
        yield f"trial: {names[0]} and {names[1]}; compared are the checks that both have"
    only_a, only_b = ({f"{check} {metric}" for check, metric, _ in side.values} for side in (a, b))
    reasons = {"only in A": only_a - only_b, "only in B": only_b - only_a}
    for change in changes:
        if change.reason:
            reasons.setdefault(change.reason, set()).add(change.speed)
    for reason, speeds in reasons.items():
        if speeds:
            yield f"{reason}: {and_more(sorted(speeds), _MAX_NAMED)}"


def _notes(a: Side, b: Side, changes: Sequence[Change], noise: NoiseData) -> Iterator[str]:
    counts = f"{len(a.trials)} and {len(b.trials)} records"
    own = "" if len(a.trials) + len(b.trials) == 2 else f"of the {counts} themselves, or if they are too few: "
    yield f"spread between runs: {own}{noise.source}"
    unnamed = [key for key, gpu in b.gpus.items() if key not in (gpu.uuid, gpu.serial)]
    if unnamed:
        yield f"{plural(len(unnamed), 'GPU')} without serial number and UUID: matched by node and index"
    hidden = {change.speed: change.detectable for change in changes if (change.detectable or 0) > NOTABLE_LOSS}
    if hidden:
        names = [f"{share:.1%} of {speed}" for speed, share in sorted(hidden.items(), key=lambda each: each[1] or 0)]
        yield f"with {counts}, a loss below these may not be found: {and_more(names, len(names))}"
