"""The checks of a trial with their figures, its coverage, and texts about the decision, for all reports.

Reports compute no verdicts. Where they show one outcome for several verdicts, it is the worst one (``model.worst``).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from textwrap import shorten

from seatrial.checks import catalog
from seatrial.model import (
    WORST_FIRST,
    Artifact,
    Decision,
    DecisionValue,
    Insight,
    Measurement,
    Outcome,
    Phase,
    Trial,
    Verdict,
    worst,
)
from seatrial.model.verdict_text import LAX_THRESHOLD
from seatrial.report.figures import NOT_PASSED, Figure, figures, key_figure, outcome_rank
from seatrial.report.formatting import family, merge_similar, size_in_name
from seatrial.util.grouping import grouped
from seatrial.util.text import plural

OTHER = "Other"  # phase of checks that this version does not have, such as those of an old run
MAX_OVERVIEW = 72  # characters of a reason in the list of checks
METHOD = "method"  # fact: the measured quantity, path, number of samples and precision, as text


@dataclass(frozen=True)
class CheckView:
    """One check with its verdicts and measurements."""

    name: str
    title: str
    phase: str
    verdicts: tuple[Verdict, ...]
    measurements: tuple[Measurement, ...]
    insights: tuple[Insight, ...] = ()

    @cached_property
    def outcome(self) -> Outcome:
        return worst(verdict.outcome for verdict in self.verdicts)

    @property
    def methods(self) -> list[str]:
        """The method of each process (equal ones once), then the insights and the lax thresholds of the check."""
        methods = [str(each.facts[METHOD]) for each in self.measurements if METHOD in each.facts]
        notes = [f"{insight.title}: {insight.text}" for insight in self.insights]
        notes += [f"{LAX_THRESHOLD}: {text}" for _, text in lax_thresholds(self.verdicts)]
        return list(dict.fromkeys([*merge_similar(methods), *notes]))

    @property
    def seconds(self) -> float:
        """The seconds of the longest measurement; the processes run concurrently."""
        return max((each.seconds for each in self.measurements), default=0.0)

    @cached_property
    def figures(self) -> list[Figure]:
        """All figures with a value, an error or no reference value: worst outcome first, without a rule last.

        Metrics of one family, such as busbw.1GiB and busbw.8GiB, are sorted by size.
        """
        evaluated = [verdict for verdict in self.verdicts if verdict.outcome is not Outcome.SKIP]
        measured = [(self.name, metric) for measurement in self.measurements for metric in measurement.metrics]
        rows = figures(evaluated, measured)
        families = {name: n for n, name in enumerate(dict.fromkeys(family(row.metric) for row in rows))}

        def key(row: Figure) -> tuple[int, int, int]:
            return outcome_rank(row.outcome), families[family(row.metric)], size_in_name(row.metric)

        return sorted(rows, key=key)

    @property
    def artifacts(self) -> list[Artifact]:
        return [artifact for measurement in self.measurements for artifact in measurement.artifacts]

    @property
    def limit_texts(self) -> list[str]:
        """The different limits of all figures with their sources, also those that did not decide."""
        verdicts = [figure.verdict for figure in self.figures if figure.verdict and figure.verdict.basis]
        return list(dict.fromkeys(str(limit) for v in verdicts for limit in (v.basis, *v.other_limits)))

    @property
    def skip_reasons(self) -> list[str]:
        """The different reasons why metrics, or the whole check, do not apply."""
        return list(dict.fromkeys(v.message for v in self.verdicts if v.outcome is Outcome.SKIP))

    @cached_property
    def key_figure(self) -> Figure | None:
        """The most important speed; if no speed has a limit, the worst figure."""
        of_speeds = (key_figure(self.name, self.figures, with_lax=lax) for lax in (False, True))
        speed = next(filter(None, of_speeds), None) if self.name in catalog() else None
        shown = (row for row in self.figures if row.metric or row.outcome in NOT_PASSED)
        return speed or next(shown, None)

    @property
    def overview_text(self) -> str:
        """One line for a list of checks: why the check was skipped or not measured, or its key figure."""
        if self.outcome is Outcome.SKIP:
            return shorten("; ".join(self.skip_reasons), MAX_OVERVIEW, placeholder=" …")
        figure = self.key_figure
        if figure is None:
            return ""
        if figure.verdict and (figure.outcome is Outcome.UNJUDGED or figure.measured is None):
            return shorten(figure.verdict.message, MAX_OVERVIEW, placeholder=" …")
        share = f" ({figure.share_text} of {figure.expected_text})" if figure.share is not None else ""
        return f"{figure.metric} {figure.measured_text}{share}"


def check_views(trial: Trial) -> list[CheckView]:
    """All checks that were planned, measured or judged, by phase, in the order of the catalog.

    Checks that were only excluded are omitted: reports list ``trial.excluded_checks`` separately.
    """
    verdicts = grouped((verdict.check, verdict) for verdict in trial.verdicts)
    measurements = grouped((each.check, each) for each in trial.measurements)
    planned = (name for job in trial.jobs for name in job.checks)
    judged = (name for name in verdicts if name not in trial.excluded_checks)
    names = dict.fromkeys((*planned, *measurements, *judged))
    checks = catalog()
    views = [
        CheckView(
            name=name,
            title=checks[name].title if name in checks else name,
            phase=str(checks[name].phase) if name in checks else OTHER,
            verdicts=tuple(verdicts.get(name, ())),
            measurements=tuple(measurements.get(name, ())),
            insights=tuple(insight for insight in trial.insights if insight.check == name),
        )
        for name in (*(name for name in checks if name in names), *(name for name in names if name not in checks))
    ]
    return sorted(views, key=lambda view: [*map(str, Phase), OTHER].index(view.phase))


def coverage(trial: Trial) -> dict[str, list[str]]:
    """Kind of result → checks: those that were judged, those that were not, and those that an option excluded."""
    outcomes = grouped((verdict.check, verdict.outcome) for verdict in trial.verdicts)
    titles = {
        "Covered": (Outcome.PASS, Outcome.WARN, Outcome.FAIL),
        "Not measured": (Outcome.ERROR,),
        "Without a verdict": (Outcome.UNJUDGED,),
        "Does not apply here": (Outcome.SKIP,),
    }
    groups: dict[str, list[str]] = {title: [] for title in titles}
    for name, of_check in outcomes.items():
        if name not in trial.excluded_checks:
            groups[next(title for title in titles if worst(of_check) in titles[title])].append(name)
    for name, option in trial.excluded_checks.items():
        groups.setdefault(f"Excluded by {option}", []).append(name)
    return {title: names for title, names in groups.items() if names or title == "Covered"}


def lax_thresholds(verdicts: Iterable[Verdict]) -> list[tuple[str, str]]:
    """(check, text) of each lax threshold, once for all subjects."""
    lax = {(each.check, each.metric): each.basis for each in verdicts if each.basis and each.basis.lax_reason}
    return [
        (check, f"{metric}, {replace(basis, lax_reason='')}: {basis.lax_reason}")
        for (check, metric), basis in lax.items()
    ]


def metrics_without_threshold(decision: Decision) -> list[str]:
    """The metrics without a threshold, one line for checks that share them: ``a.b, a.c: latency.*``."""
    by_metrics = grouped((metrics, check) for check, metrics in decision.metrics_without_threshold.items())
    return [f"{', '.join(checks)}: {', '.join(metrics)}" for metrics, checks in by_metrics.items()]


def outcome_counts(verdicts: Iterable[Verdict]) -> list[tuple[Outcome, int]]:
    """The number of verdicts by outcome, worst first, without zeros."""
    counts = Counter(verdict.outcome for verdict in verdicts)
    return [(outcome, counts[outcome]) for outcome in WORST_FIRST if counts[outcome]]


def decision_title(trial: Trial) -> str:
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
