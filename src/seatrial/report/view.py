"""A trial arranged for reading: chapters, checks, one row a metric, troubles grouped. Shared by all reports.

Nothing here judges: an outcome shown for several verdicts is ``model.worst`` of them.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import median
from typing import TypeVar

from seatrial.checks import catalog
from seatrial.model import (
    WORST_FIRST,
    Artifact,
    Basis,
    Decision,
    Insight,
    Measurement,
    Metric,
    Outcome,
    Phase,
    Trial,
    Verdict,
    worst,
)
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.formatting import bytes_of, count_text, family, format_range, natural_key, print_value, unit_text
from seatrial.report.text import plural

OTHER = "Other"  # the chapter of checks that this version does not know: an old run, or a site's own check
MAX_REMARKS = 2
METHOD = "how"  # the fact with which a check says in a sentence what was measured, over which path, how often, how sure
_NUMBER = re.compile(r"\d[\d.,]*")
NOT_PASSED = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN)


@dataclass(frozen=True)
class Reading:
    """One metric of one subject, and the verdicts on it. No metric: a rule looked for it in vain."""

    subject: str
    metric: Metric | None
    verdicts: tuple[Verdict, ...]

    @property
    def outcome(self) -> Outcome | None:
        """None where no rule looks at this metric: it is recorded, not judged."""
        return worst(verdict.outcome for verdict in self.verdicts) if self.verdicts else None


@dataclass(frozen=True)
class Row:
    """One metric of a check over all its subjects, worst first."""

    name: str
    readings: tuple[Reading, ...]

    @cached_property
    def values(self) -> list[float]:
        return [reading.metric.value for reading in self.readings if reading.metric]

    @cached_property
    def unit(self) -> str:
        return next((reading.metric.unit for reading in self.readings if reading.metric), "")

    @property
    def subject_text(self) -> str:
        """The one subject, or of how many the value is the median."""
        if len(self.readings) == 1:
            return self.readings[0].subject
        return f"median of {len(self.values):,}" if self.range else plural(len(self.readings), "subject")

    @property
    def value(self) -> str:
        """The one value, or the median of several."""
        return print_value(median(self.values), self.unit) if self.values else "not measured"

    @property
    def spread(self) -> tuple[float, ...]:
        """The values of several subjects, or the samples behind the value of one."""
        if len(self.readings) == 1 and self.readings[0].metric:
            return self.readings[0].metric.samples
        return tuple(self.values)

    @property
    def range(self) -> str:
        """Least to greatest of the spread, without the unit; empty where all are the same."""
        unit = unit_text(self.unit)
        return format_range(self.spread, self.unit).removesuffix(f" {unit}") if len(set(self.spread)) > 1 else ""

    @property
    def outcomes(self) -> list[tuple[Outcome, int]]:
        """How often each outcome was given, worst first. Empty: recorded, not judged."""
        return outcome_counts(self.verdicts)

    @property
    def not_passed(self) -> bool:
        return any(outcome in NOT_PASSED for outcome, _ in self.outcomes)

    @property
    def judged(self) -> bool:
        """Whether a rule had something to say: not where none looks at this metric, nor where none applies."""
        return any(outcome not in (Outcome.SKIP, Outcome.UNJUDGED) for outcome, _ in self.outcomes)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        return [verdict for reading in self.readings for verdict in reading.verdicts]

    @property
    def remark(self) -> str:
        """What judged it; where nothing did, why."""
        texts = dict.fromkeys(verdict.basis_text or verdict.detail or verdict.message for verdict in self.verdicts)
        return "; ".join(texts) if len(texts) <= MAX_REMARKS else f"{next(iter(texts))}; and so on"


@dataclass(frozen=True)
class CheckView:
    """All that a trial says of one check."""

    name: str
    title: str
    phase: str
    verdicts: tuple[Verdict, ...]
    measurements: tuple[Measurement, ...]
    insights: tuple[Insight, ...] = ()
    performance: tuple[str, ...] = ()  # as the check declares it

    @property
    def outcome(self) -> Outcome:
        return worst(verdict.outcome for verdict in self.verdicts)

    @cached_property
    def subjects(self) -> list[str]:
        """Every place that the check speaks of, worst first."""
        outcomes: dict[str, Outcome] = {}
        for verdict in self.verdicts:
            outcomes[verdict.subject] = worst((verdict.outcome, outcomes.get(verdict.subject, verdict.outcome)))
        for measurement in self.measurements:
            for metric in measurement.metrics:
                outcomes.setdefault(metric.subject, Outcome.PASS)
        return sorted(outcomes, key=lambda subject: (WORST_FIRST.index(outcomes[subject]), natural_key(subject)))

    @property
    def extent(self) -> str:
        """How many places of which kind: ``cluster + 2 ranks``."""
        return count_text(self.subjects)

    @property
    def methods(self) -> list[str]:
        """What was measured, over which path, how often and how sure: a sentence, several where processes differ.

        And what the figures say beyond their verdicts.
        """
        told = [str(measurement.facts[METHOD]) for measurement in self.measurements if METHOD in measurement.facts]
        beyond = [f"{one.title}: {one.text}" for one in self.insights]
        beyond += [f"{LAX_THRESHOLD}: {text}" for _, text in lax_thresholds(self.verdicts)]
        return list(dict.fromkeys([*_alike(told), *beyond]))

    @property
    def seconds(self) -> float:
        """The longest of its measurements: its processes run side by side."""
        return max((measurement.seconds for measurement in self.measurements), default=0.0)

    @cached_property
    def rows(self) -> list[Row]:
        """One row a metric: what is in trouble first, then what is judged, then the rest; families by size."""
        readings: dict[str, dict[str, Reading]] = {}
        judged: dict[tuple[str, str], list[Verdict]] = {}
        for verdict in self.verdicts:
            if verdict.metric:
                judged.setdefault((verdict.metric, verdict.subject), []).append(verdict)
        for measurement in self.measurements:
            for metric in measurement.metrics:
                verdicts = tuple(judged.get((metric.name, metric.subject), ()))
                readings.setdefault(metric.name, {})[metric.subject] = Reading(metric.subject, metric, verdicts)
        for (name, subject), given in judged.items():
            readings.setdefault(name, {}).setdefault(subject, Reading(subject, None, tuple(given)))
        families = list(dict.fromkeys(family(name) for name in readings))
        rows = [Row(name, tuple(sorted(row.values(), key=_worst_reading))) for name, row in readings.items()]
        return sorted(rows, key=lambda row: (_urgency(row), families.index(family(row.name)), bytes_of(row.name)))

    @property
    def artifacts(self) -> list[Artifact]:
        return [artifact for measurement in self.measurements for artifact in measurement.artifacts]

    @property
    def notes(self) -> list[Group]:
        """Verdicts on no metric of the table and no success: why the check or a rule of it said nothing."""
        return grouped(v for v in self.verdicts if not v.metric and v.outcome is not Outcome.PASS)

    @property
    def skipped(self) -> str:
        """Why the check brought back no number, unless that is told with the other troubles."""
        return self.verdicts[0].message if self.outcome is Outcome.SKIP else ""

    @property
    def key_figure(self) -> str:
        """The metric in trouble, else the first that is neither zero nor a yes, with its span.

        How fast something is comes before the rest, and what is judged before what is recorded.
        Of a recorded family such as ``busbw.*`` it is the last member: the largest size. It is said of a figure that
        no rule judged it: the outcome beside it speaks of other metrics.
        """
        rows = [row for row in self.rows if row.values]
        if not rows:
            return ""
        row = min(rows, key=self._dullness)
        if not row.outcomes:
            row = [other for other in rows if family(other.name) == family(row.name)][-1]
        unit = "" if row.unit == row.name else row.unit  # "nodes 2", not "nodes 2 nodes"
        return f"{row.name} {format_range(row.values, unit)}{'' if row.judged else ', not judged'}"

    def _dullness(self, row: Row) -> tuple[int, bool, bool, int]:
        urgency = _urgency(row)
        other = not any(fnmatchcase(row.name, pattern) for pattern in self.performance)
        return min(urgency, len(WORST_FIRST)), row.unit == "bool" or not any(row.values), other, urgency


@dataclass(frozen=True)
class Chapter:
    """One phase of the trial and its checks."""

    title: str
    checks: tuple[CheckView, ...]


@dataclass(frozen=True)
class Group:
    """Verdicts that say the same of several subjects. ``others``: further checks that the same cause stopped."""

    verdicts: tuple[Verdict, ...]
    others: tuple[str, ...] = ()

    @property
    def first(self) -> Verdict:
        return self.verdicts[0]

    @property
    def title(self) -> str:
        """The check, or how many of them."""
        return plural(1 + len(self.others), "check") if self.others else self.first.check

    @property
    def stopped(self) -> str:
        """The names of several checks; empty where there is one."""
        return ", ".join((self.first.check, *self.others)) if self.others else ""

    @property
    def subjects_text(self) -> str:
        return self.first.subject if len(self.verdicts) == 1 else plural(len(self.verdicts), "subject")

    @property
    def meaning(self) -> str:
        """What a bad value means, where it is the same for all: it is shown once."""
        return self.first.meaning if len({verdict.meaning for verdict in self.verdicts}) == 1 else ""

    def verdict_text(self, verdict: Verdict) -> str:
        """What the verdict says of its subject alone."""
        return verdict.summary if self.meaning else verdict.message


def chapters(trial: Trial) -> list[Chapter]:
    """Every check that the trial planned, measured or judged, under its phase, in the order of the catalog."""
    verdicts, measurements = _by_check(trial.verdicts), _by_check(trial.measurements)
    planned = (name for job in trial.jobs for name in job.checks)
    names = dict.fromkeys((*planned, *measurements, *verdicts))
    known = catalog()
    ordered = [name for name in known if name in names] + [name for name in names if name not in known]
    views = [
        CheckView(
            name=name,
            title=known[name].title if name in known else name,
            phase=str(known[name].phase) if name in known else OTHER,
            verdicts=tuple(verdicts.get(name, ())),
            measurements=tuple(measurements.get(name, ())),
            insights=tuple(one for one in trial.insights if one.check == name),
            performance=known[name].performance_metrics if name in known else (),
        )
        for name in ordered
    ]
    parts = [(title, tuple(view for view in views if view.phase == title)) for title in (*Phase, OTHER)]
    return [Chapter(str(title), checks) for title, checks in parts if checks]


def problems(trial: Trial) -> list[Group]:
    """Every FAIL, ERROR, UNJUDGED and WARN, worst first, the same trouble on many subjects as one group.

    A job that never starts is an ERROR of each of its checks, all in the same words: one group, too.
    """
    groups: dict[object, list[Group]] = {}
    for group in grouped(verdict for verdict in trial.verdicts if verdict.outcome in NOT_PASSED):
        words = [(one.subject, one.metric, one.detail, one.evidence, one.fix) for one in group.verdicts]
        same = tuple(words) if group.first.outcome is Outcome.ERROR else group
        groups.setdefault(same, []).append(group)
    merged = [replace(first, others=tuple(one.first.check for one in more)) for first, *more in groups.values()]
    return sorted(merged, key=lambda group: WORST_FIRST.index(group.first.outcome))


def grouped(verdicts: Iterable[Verdict]) -> list[Group]:
    """Verdicts of the same rule with the same outcome together, in the order of first sight."""
    groups: dict[tuple[object, ...], list[Verdict]] = {}
    for verdict in verdicts:
        key = (verdict.check, verdict.metric, verdict.outcome, verdict.basis, verdict.fix)
        groups.setdefault(key, []).append(verdict)
    return [Group(tuple(sorted(group, key=lambda verdict: natural_key(verdict.subject)))) for group in groups.values()]


def lax_thresholds(verdicts: Iterable[Verdict]) -> list[tuple[str, str]]:
    """Each threshold that tests hardly anything, once however many subjects passed it: its check, and why."""
    found: dict[tuple[str, str], Basis] = {}
    for verdict in verdicts:
        if verdict.basis and verdict.basis.lax_reason:
            found[verdict.check, verdict.metric] = verdict.basis
    plain = (
        (check, metric, replace(basis, lax_reason=""), basis.lax_reason) for (check, metric), basis in found.items()
    )
    return [(check, f"{metric}, {basis}, is {lax}") for check, metric, basis, lax in plain]


def recorded_only(decision: Decision) -> list[str]:
    """The metrics that nothing judged, a line for the checks that have the same: ``a.b, a.c: algbw.*``."""
    by_metrics: dict[tuple[str, ...], list[str]] = {}
    for check, metrics in decision.metrics_without_threshold.items():
        by_metrics.setdefault(metrics, []).append(check)
    return [f"{', '.join(checks)}: {', '.join(metrics)}" for metrics, checks in by_metrics.items()]


def outcome_counts(verdicts: Iterable[Verdict]) -> list[tuple[Outcome, int]]:
    """How many verdicts of each outcome, worst first, none left at zero."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return [(outcome, counts[outcome]) for outcome in WORST_FIRST if counts[outcome]]


def headline(trial: Trial) -> str:
    """The decision, in print."""
    return f"{trial.decision.value}, as a rehearsal" if trial.decision.cpu_only else trial.decision.value


def launchers(trial: Trial) -> str:
    """The launchers that ran jobs, or the one that was configured when none ran."""
    return ", ".join(dict.fromkeys(result.launcher for result in trial.results)) or str(
        trial.config.get("launcher", "")
    )


def size(trial: Trial) -> str:
    """``2 nodes × 4 GPUs``, as the largest job was planned."""
    if not trial.jobs:
        return "no job planned"
    job = max(trial.jobs, key=lambda job: job.nodes * job.ranks_per_node)
    ranks = (
        plural(job.ranks_per_node, "GPU")
        if job.device == "cuda"
        else plural(job.ranks_per_node, "process", "processes")
    )
    return f"{plural(job.nodes, 'node')} × {ranks}"


_Record = TypeVar("_Record", Verdict, Measurement)


def _by_check(records: Iterable[_Record]) -> dict[str, list[_Record]]:
    found: dict[str, list[_Record]] = {}
    for record in records:
        found.setdefault(record.check, []).append(record)
    return found


def _alike(told: list[str]) -> Iterator[str]:
    """Each sentence once: of those that differ in numbers alone the first, for each GPU times its own windows."""
    groups: dict[str, list[str]] = {}
    for sentence in told:
        groups.setdefault(_NUMBER.sub("#", sentence), []).append(sentence)
    for first, *others in groups.values():
        differing = sum(other != first for other in others)
        who = plural(differing, "other process", "other processes")
        yield f"{first} ({who}: the same with other numbers)" if differing else first


def _worst_reading(reading: Reading) -> tuple[int, list[tuple[int, str]]]:
    return WORST_FIRST.index(reading.outcome or Outcome.PASS), natural_key(reading.subject)


def _urgency(row: Row) -> int:
    """Trouble by its weight, then judged rows, then recorded ones."""
    if row.not_passed:
        return WORST_FIRST.index(row.outcomes[0][0])
    return len(WORST_FIRST) + (not row.outcomes)
