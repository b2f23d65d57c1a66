"""The structure of all reports: chapters, checks, one row per metric, grouped problems.

Reports compute no verdicts. Where they show one outcome for several verdicts, it is the worst one (``model.worst``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from functools import cached_property
from statistics import median
from textwrap import shorten
from typing import TypeVar

from seatrial.checks import catalog
from seatrial.model import (
    WORST_FIRST,
    Artifact,
    Basis,
    Decision,
    DecisionValue,
    Insight,
    Measurement,
    Metric,
    Outcome,
    Phase,
    Reason,
    Trial,
    Verdict,
    VerdictKey,
    worst,
)
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.formatting import (
    count_text,
    family,
    format_range,
    merge_similar,
    natural_key,
    print_value,
    size_in_name,
    unit_text,
)
from seatrial.util.text import plural

OTHER = "Other"  # chapter of checks that this version does not have, such as those of an old run
MAX_REMARKS = 2  # different remarks that a row shows; of more remarks it shows only the first
MAX_OVERVIEW = 72  # characters of a reason in the table of checks
METHOD = "method"  # fact: the measured quantity, path, number of samples and precision, as text
NOT_PASSED = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN)


_UNJUDGED_MARKS = {
    Reason.IMPLAUSIBLY_HIGH: "implausibly high",
    Reason.INCONCLUSIVE: "inconclusive",
    Reason.NO_REFERENCE: "no reference value",
}


@dataclass(frozen=True)
class Reading:
    """One metric of one subject, and its verdicts; ``metric``: None if a rule needs a metric that was not measured."""

    subject: str
    metric: Metric | None
    verdicts: tuple[Verdict, ...]

    @property
    def outcome(self) -> Outcome | None:
        """The worst outcome; None for a metric without a rule."""
        return worst(verdict.outcome for verdict in self.verdicts) if self.verdicts else None


@dataclass(frozen=True)
class MetricRow:
    """One metric of a check with the readings of all subjects, worst first."""

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
        """The subject; for several subjects ``median of 8``, or ``8 subjects`` if their values are equal."""
        if len(self.readings) == 1:
            return self.readings[0].subject
        return f"median of {len(self.values):,}" if self.range_text else plural(len(self.readings), "subject")

    @property
    def value(self) -> str:
        """The value as text; for several subjects the median of their values."""
        return print_value(median(self.values), self.unit) if self.values else "not measured"

    @property
    def spread(self) -> tuple[float, ...]:
        """The values of several subjects, or the samples of one."""
        if len(self.readings) == 1 and self.readings[0].metric:
            return self.readings[0].metric.samples
        return tuple(self.values)

    @property
    def range_text(self) -> str:
        """Minimum and maximum of ``spread``, without the unit; empty if all values are equal."""
        unit = unit_text(self.unit)
        return format_range(self.spread, self.unit).removesuffix(f" {unit}") if len(set(self.spread)) > 1 else ""

    @property
    def text(self) -> str:
        """The name with the values of all subjects: ``busbw.1GiB 327 GB/s to 331 GB/s``."""
        return f"{self.name} {format_range(self.values, '' if self.unit == self.name else self.unit)}"  # "nodes 2"

    @property
    def outcomes(self) -> list[tuple[Outcome, int]]:
        """The number of verdicts by outcome, worst first; empty for a metric without a rule."""
        return outcome_counts(self.verdicts)

    @property
    def has_problem(self) -> bool:
        return any(outcome in NOT_PASSED for outcome, _ in self.outcomes)

    @property
    def has_evaluated_rule(self) -> bool:
        """Whether a rule was evaluated on this metric."""
        return any(outcome not in (Outcome.SKIP, Outcome.UNJUDGED) for outcome, _ in self.outcomes)

    @cached_property
    def verdicts(self) -> list[Verdict]:
        return [verdict for reading in self.readings for verdict in reading.verdicts]

    @property
    def remark(self) -> str:
        """The bases of the verdicts; for a verdict without a basis, its text. At most MAX_REMARKS different ones."""
        texts = dict.fromkeys(verdict.basis_text or verdict.detail or verdict.message for verdict in self.verdicts)
        return "; ".join(texts) if len(texts) <= MAX_REMARKS else f"{next(iter(texts))}; and others"


@dataclass(frozen=True)
class CheckView:
    """One check with its verdicts and measurements."""

    name: str
    title: str
    phase: str
    verdicts: tuple[Verdict, ...]
    measurements: tuple[Measurement, ...]
    insights: tuple[Insight, ...] = ()
    speeds: tuple[str, ...] = ()  # from the declaration of the check
    key_metric: str = ""  # from the declaration of the check

    @property
    def outcome(self) -> Outcome:
        return worst(verdict.outcome for verdict in self.verdicts)

    @cached_property
    def subjects(self) -> list[str]:
        """All subjects of the check, worst first."""
        outcomes: dict[str, Outcome] = {}
        for verdict in self.verdicts:
            outcomes[verdict.subject] = worst((verdict.outcome, outcomes.get(verdict.subject, verdict.outcome)))
        for measurement in self.measurements:
            for metric in measurement.metrics:
                outcomes.setdefault(metric.subject, Outcome.PASS)
        return sorted(outcomes, key=lambda subject: (WORST_FIRST.index(outcomes[subject]), natural_key(subject)))

    @property
    def subjects_text(self) -> str:
        """The number of subjects by kind: ``cluster + 2 ranks``. A subject with only SKIP counts if all are SKIP."""
        evaluated = {verdict.subject for verdict in self.verdicts if verdict.outcome is not Outcome.SKIP}
        measured = {metric.subject for measurement in self.measurements for metric in measurement.metrics}
        return count_text([subject for subject in self.subjects if subject in evaluated | measured] or self.subjects)

    @property
    def methods(self) -> list[str]:
        """The method of each process (equal ones once), then the insights and the lax thresholds of the check."""
        methods = [str(measurement.facts[METHOD]) for measurement in self.measurements if METHOD in measurement.facts]
        notes = [f"{insight.title}: {insight.text}" for insight in self.insights]
        notes += [f"{LAX_THRESHOLD}: {text}" for _, text in lax_thresholds(self.verdicts)]
        return list(dict.fromkeys([*merge_similar(methods), *notes]))

    @property
    def seconds(self) -> float:
        """The seconds of the longest measurement; the processes run concurrently."""
        return max((measurement.seconds for measurement in self.measurements), default=0.0)

    @cached_property
    def rows(self) -> list[MetricRow]:
        """One row per metric: problems first, then other metrics with a rule, then the rest.

        Metrics of one family, such as busbw.1GiB and busbw.8GiB, are sorted by size.
        """
        readings: dict[str, dict[str, Reading]] = {}  # metric → subject → reading
        verdicts_by_key: dict[tuple[str, str], list[Verdict]] = {}
        for verdict in self.verdicts:
            if verdict.metric:
                verdicts_by_key.setdefault((verdict.metric, verdict.subject), []).append(verdict)
        for measurement in self.measurements:
            for metric in measurement.metrics:
                verdicts = tuple(verdicts_by_key.get((metric.name, metric.subject), ()))
                readings.setdefault(metric.name, {})[metric.subject] = Reading(metric.subject, metric, verdicts)
        for (name, subject), verdicts_of_key in verdicts_by_key.items():
            readings.setdefault(name, {}).setdefault(subject, Reading(subject, None, tuple(verdicts_of_key)))
        families = list(dict.fromkeys(family(name) for name in readings))
        rows = [
            MetricRow(name, tuple(sorted(by_subject.values(), key=_reading_key)))
            for name, by_subject in readings.items()
        ]
        return sorted(rows, key=lambda row: (_row_rank(row), families.index(family(row.name)), size_in_name(row.name)))

    @property
    def artifacts(self) -> list[Artifact]:
        return [artifact for measurement in self.measurements for artifact in measurement.artifacts]

    @property
    def notes(self) -> list[Group]:
        """Groups of the verdicts without a metric, except PASS: why the check could not be measured or evaluated."""
        return grouped(v for v in self.verdicts if not v.metric and v.outcome is not Outcome.PASS)

    @property
    def skip_reason(self) -> str:
        """The reason if the outcome of the check is SKIP; otherwise empty."""
        return self.verdicts[0].message if self.outcome is Outcome.SKIP else ""

    @property
    def overview_text(self) -> str:
        """One line for a table of checks: why the check was skipped, its key figure, or why it was not measured."""
        if not self.skip_reason and (key_figure := self.key_figure):
            return key_figure
        errors = (verdict.message for verdict in self.verdicts if verdict.outcome is Outcome.ERROR)
        return shorten(self.skip_reason or next(errors, ""), MAX_OVERVIEW, placeholder=" …")

    @property
    def key_figure(self) -> str:
        """The metric with the worst outcome, and its range. If none is bad, a metric that is neither zero nor boolean.

        Of several such metrics the check's ``key_metric`` comes first, then performance metrics, then metrics with a
        rule. For a family without a rule, such as ``busbw.*``, the largest size is shown. A metric that no rule
        evaluated is marked: "(no threshold)", or why it is UNJUDGED. If the check is PASS, its first metric with an
        evaluated rule precedes this one.
        """
        rows = [row for row in self.rows if row.values]
        if not rows:
            return ""
        row = min(rows, key=self._key_figure_rank)
        if not row.outcomes:
            row = [other for other in rows if family(other.name) == family(row.name)][-1]
        if row.has_evaluated_rule:
            return row.text
        judged = next((other for other in rows if other.has_evaluated_rule), None)
        judged_text = f"{judged.text}; " if judged and self.outcome is Outcome.PASS else ""
        unjudged = [verdict for verdict in row.verdicts if verdict.outcome is Outcome.UNJUDGED]
        reasons = {reason for verdict in unjudged for reason in verdict.reasons}
        mark = next((text for reason, text in _UNJUDGED_MARKS.items() if reason in reasons), "no threshold")
        return f"{judged_text}{row.text} ({mark})"

    def _key_figure_rank(self, row: MetricRow) -> tuple[int, bool, int, int]:
        """The sort key of rows by their suitability as key figure; the row with the lowest key is shown."""
        rank = _row_rank(row)
        is_performance = any(fnmatchcase(row.name, pattern) for pattern in self.speeds)
        kind = 1 if is_performance else 2
        if row.name == self.key_metric:
            kind = 0
        return min(rank, len(WORST_FIRST)), row.unit == "bool" or not any(row.values), kind, rank


@dataclass(frozen=True)
class Chapter:
    """One phase of the trial and its checks."""

    title: str
    checks: tuple[CheckView, ...]


@dataclass(frozen=True)
class Group:
    """Verdicts of one rule with the same outcome, sorted by subject. ``other_checks``: checks with the same ERROR."""

    verdicts: tuple[Verdict, ...]
    other_checks: tuple[str, ...] = ()

    @property
    def first(self) -> Verdict:
        return self.verdicts[0]

    @property
    def title(self) -> str:
        """The check, or the number of checks."""
        return plural(1 + len(self.other_checks), "check") if self.other_checks else self.first.check

    @property
    def check_names(self) -> str:
        """The names of several checks; empty for one check."""
        return ", ".join((self.first.check, *self.other_checks)) if self.other_checks else ""

    @property
    def subjects_text(self) -> str:
        return self.first.subject if len(self.verdicts) == 1 else plural(len(self.verdicts), "subject")

    @property
    def meaning(self) -> str:
        """The meaning of a bad value if all verdicts share it, to show it once; otherwise empty."""
        return self.first.meaning if len({verdict.meaning for verdict in self.verdicts}) == 1 else ""

    def verdict_text(self, verdict: Verdict) -> str:
        """The text of ``verdict``, without the meaning if all verdicts share it."""
        return verdict.summary if self.meaning else verdict.message


def chapters(trial: Trial) -> list[Chapter]:
    """All checks that were planned, measured or judged, by phase, in the order of the catalog.

    Checks that were only excluded are omitted: reports list ``trial.excluded_checks`` separately.
    """
    verdicts, measurements = _by_check(trial.verdicts), _by_check(trial.measurements)
    planned = (name for job in trial.jobs for name in job.checks)
    judged = (name for name in verdicts if name not in trial.excluded_checks)
    names = dict.fromkeys((*planned, *measurements, *judged))
    checks = catalog()
    ordered = [name for name in checks if name in names] + [name for name in names if name not in checks]
    views = [
        CheckView(
            name=name,
            title=checks[name].title if name in checks else name,
            phase=str(checks[name].phase) if name in checks else OTHER,
            verdicts=tuple(verdicts.get(name, ())),
            measurements=tuple(measurements.get(name, ())),
            insights=tuple(insight for insight in trial.insights if insight.check == name),
            speeds=checks[name].speeds if name in checks else (),
            key_metric=next((each.name for each in checks[name].declared if each.key), "") if name in checks else "",
        )
        for name in ordered
    ]
    by_phase = [(phase, tuple(view for view in views if view.phase == phase)) for phase in (*Phase, OTHER)]
    return [Chapter(str(phase), checks_of_phase) for phase, checks_of_phase in by_phase if checks_of_phase]


def problems(trial: Trial) -> list[Group]:
    """All FAIL, ERROR, UNJUDGED and WARN that no cause explains, in groups (see ``grouped``), worst first.

    Equal ERRORs of several checks are one group: if a job does not start, each of its checks has the same ERROR.
    """
    explained = {key for finding in trial.findings for key in finding.explains}
    not_passed = [verdict for verdict in trial.verdicts if verdict.outcome in NOT_PASSED]
    if explained:
        not_passed = [verdict for verdict in not_passed if VerdictKey.from_verdict(verdict) not in explained]
    groups: dict[object, list[Group]] = {}
    for group in grouped(not_passed):
        fields = tuple((v.subject, v.metric, v.detail, v.evidence, v.fix) for v in group.verdicts)
        groups.setdefault(fields if group.first.outcome is Outcome.ERROR else group, []).append(group)
    merged = [
        replace(first, other_checks=tuple(other.first.check for other in others)) for first, *others in groups.values()
    ]
    return sorted(merged, key=lambda group: WORST_FIRST.index(group.first.outcome))


def grouped(verdicts: Iterable[Verdict]) -> list[Group]:
    """Verdicts grouped by check, metric, outcome, basis and fix, in the order of their first occurrence."""
    groups: dict[tuple[object, ...], list[Verdict]] = {}
    for verdict in verdicts:
        key = (verdict.check, verdict.metric, verdict.outcome, verdict.basis, verdict.fix)
        groups.setdefault(key, []).append(verdict)
    return [Group(tuple(sorted(group, key=lambda verdict: natural_key(verdict.subject)))) for group in groups.values()]


def lax_thresholds(verdicts: Iterable[Verdict]) -> list[tuple[str, str]]:
    """(check, text) of each lax threshold, once for all subjects."""
    lax: dict[tuple[str, str], Basis] = {}
    for verdict in verdicts:
        if verdict.basis and verdict.basis.lax_reason:
            lax[verdict.check, verdict.metric] = verdict.basis
    return [
        (check, f"{metric}, {replace(basis, lax_reason='')}: {basis.lax_reason}")
        for (check, metric), basis in lax.items()
    ]


def metrics_without_threshold(decision: Decision) -> list[str]:
    """The metrics without a threshold, one line for checks that share them: ``a.b, a.c: latency.*``."""
    by_metrics: dict[tuple[str, ...], list[str]] = {}
    for check, metrics in decision.metrics_without_threshold.items():
        by_metrics.setdefault(metrics, []).append(check)
    return [f"{', '.join(checks)}: {', '.join(metrics)}" for metrics, checks in by_metrics.items()]


def outcome_counts(verdicts: Iterable[Verdict]) -> list[tuple[Outcome, int]]:
    """The number of verdicts by outcome, worst first, without zeros."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return [(outcome, counts[outcome]) for outcome in WORST_FIRST if counts[outcome]]


def headline(trial: Trial) -> str:
    """The decision, with CPU ONLY if no GPU was tested, and the GPU models for which SKU data are missing."""
    decision = trial.decision
    notes = ["CPU ONLY"] if decision.cpu_only else []
    notes += [f"unknown GPU model {gpu}" for gpu in decision.unknown_gpus]
    return f"{decision.value} ({', '.join(notes)})" if notes else decision.value


def decision_style(decision: Decision) -> str:
    """The CSS class of the decision: an accepted CPU-only trial does not have the colour of accepted GPUs."""
    is_cpu_only = decision.cpu_only and decision.value is DecisionValue.ACCEPTED
    return "cpu-only" if is_cpu_only else decision.value.lower()


def launchers(trial: Trial) -> str:
    """The launchers that ran jobs; the configured launcher if no job ran."""
    return ", ".join(dict.fromkeys(result.launcher for result in trial.results)) or str(
        trial.config.get("launcher", "")
    )


def machine_size(trial: Trial) -> str:
    """The nodes of the largest planned job, and its GPUs or processes per node: ``2 nodes × 4 GPUs``."""
    if not trial.jobs:
        return "no job planned"
    job = max(trial.jobs, key=lambda job: job.nodes * job.ranks_per_node)
    noun, nouns = ("GPU", "GPUs") if job.device == "cuda" else ("process", "processes")
    return f"{plural(job.nodes, 'node')} × {plural(job.ranks_per_node, noun, nouns)}"


_Record = TypeVar("_Record", Verdict, Measurement)


def _by_check(records: Iterable[_Record]) -> dict[str, list[_Record]]:
    by_check: dict[str, list[_Record]] = {}
    for record in records:
        by_check.setdefault(record.check, []).append(record)
    return by_check


def _reading_key(reading: Reading) -> tuple[int, list[tuple[int, str]]]:
    return WORST_FIRST.index(reading.outcome or Outcome.PASS), natural_key(reading.subject)


def _row_rank(row: MetricRow) -> int:
    """The sort key of a row: rows with a problem by severity, then other rows with a rule, then rows without a rule."""
    if row.has_problem:
        return WORST_FIRST.index(row.outcomes[0][0])
    return len(WORST_FIRST) + (not row.outcomes)
