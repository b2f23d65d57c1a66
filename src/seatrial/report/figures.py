"""The figures of a trial, once for all reports: each metric with its worst value, expected value, limit and source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase

from seatrial.checks import catalog
from seatrial.model import WORST_FIRST, BasisKind, Metric, Outcome, Trial, Verdict
from seatrial.report.formatting import format_range, print_value, size_in_name
from seatrial.util.grouping import grouped

# Outcomes that a reader has to act on, in the order in which reports list them
NOT_PASSED = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN)
# A value that meets its limit by this factor says nothing about speed: the limit is a plausibility check
LAX_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of a check: its worst value, and what this value is compared with.

    Of a metric without a rule, ``verdict`` is None, and ``measured`` is None if it has several values.

    ``limit``: the value must meet ``op limit``. ``expected``: the value that the limit is a share of; None for a limit
    that is a number of its own. ``source``: where the expected value or the limit is from. ``worst_part``: the subject
    with the worst value. ``n``: number of subjects. ``verdict``: the verdict on the worst value. ``checks``: several
    names only for one error of several checks. ``metrics``: the values of all subjects, if they were asked for.
    """

    checks: tuple[str, ...]
    metric: str
    measured: float | None
    unit: str
    worst_part: str
    n: int
    expected: float | None = None
    op: str = ""
    limit: float | None = None
    source: str = ""
    verdict: Verdict | None = None
    metrics: tuple[Metric, ...] = ()

    @property
    def outcome(self) -> Outcome | None:
        return self.verdict.outcome if self.verdict else None

    @property
    def name(self) -> str:
        """The check and the metric; for several checks, their number."""
        return f"{self.checks[0]} {self.metric}".rstrip() if len(self.checks) == 1 else f"{len(self.checks)} checks"

    @property
    def title(self) -> str:
        """What the check measures: its title without the subtitle; the name of an unknown check."""
        check = catalog().get(self.checks[0])
        return _SUBTITLE.split(check.title)[0] if check and len(self.checks) == 1 else self.name

    @property
    def share(self) -> float | None:
        """The measured relative to the expected value."""
        return _ratio(self.measured, self.expected)

    @property
    def margin(self) -> float | None:
        """The distance to the limit: 1 at the limit, above 1 if the value meets it; None without a numerical limit."""
        return _margin(self.measured, self.op, self.limit) if self.unit != "bool" else None

    @property
    def measured_text(self) -> str:
        """The worst value; of a metric without a rule, the lowest and the highest value."""
        if self.measured is None:
            return format_range(self.values, self.unit) if self.values and not self.verdict else "not measured"
        return print_value(self.measured, self.unit)

    @property
    def values(self) -> tuple[float, ...]:
        """The values of several subjects, or the samples of one."""
        if len(self.metrics) == 1:
            return self.metrics[0].samples or (self.metrics[0].value,)
        return tuple(metric.value for metric in self.metrics)

    def worst_values(self, limit: int) -> list[tuple[str, str]]:
        """(subject, value as text) of at most ``limit`` subjects, the value closest to its limit or beyond it first."""

        def distance(metric: Metric) -> float:
            """A key that is lowest for the worst value."""
            if self.op == "==":
                return -abs(metric.value - (self.limit or 0.0))
            return -metric.value if self.op in ("<", "<=") else metric.value

        ordered = sorted(self.metrics, key=distance)
        return [(metric.subject, print_value(metric.value, metric.unit)) for metric in ordered[:limit]]

    @property
    def expected_text(self) -> str:
        return "" if self.expected is None else print_value(self.expected, self.unit)

    @property
    def share_text(self) -> str:
        return "" if self.share is None else f"{self.share:.1%}"

    @property
    def limit_text(self) -> str:
        if self.limit is None:
            return ""
        value = print_value(self.limit, self.unit)
        return value if self.unit == "bool" or self.op == "==" else f"{_SIGNS.get(self.op, self.op)} {value}"

    @property
    def text(self) -> str:
        """The name, the worst value and its limit; for a figure without a value, the text of its verdict."""
        if self.verdict and self.measured is None:
            return f"{self.checks[0] if len(self.checks) == 1 else self.name}: {self.verdict.message}"
        word = "expected" if self.unit == "bool" or self.op == "==" else "limit"
        return f"{self.name} {self.measured_text}" + (f", {word} {self.limit_text}" if self.limit_text else "")


_SUBTITLE = re.compile(r"[:;,]|\s\(| and correctness")
_SIGNS = {">=": "≥", "<=": "≤"}


def figures(verdicts: Iterable[Verdict], measured: Iterable[tuple[str, Metric]] = ()) -> list[Figure]:
    """One figure for each metric, and one for each text of verdicts without a metric; in the order of ``verdicts``.

    ``measured``: (check, metric) of values; those without a verdict come last.
    """
    groups = grouped(
        ((each.check, each.metric) if each.metric else (each.outcome, each.detail, each.evidence, each.fix), each)
        for each in verdicts
    )
    values: dict[tuple[str, ...], list[Metric]] = grouped(((check, metric.name), metric) for check, metric in measured)
    judged = [_figure(group, values.pop(key, [])) for key, group in groups.items()]
    return judged + [_without_rule(check, name, metrics) for (check, name), metrics in values.items()]


def headline(trial: Trial) -> list[Figure]:
    """The most important figure of each check that has a speed with a limit, worst outcome first."""
    by_check = grouped(
        (verdict.check, verdict)
        for verdict in trial.verdicts
        if verdict.basis and verdict.value is not None and verdict.outcome is not Outcome.SKIP
    )
    rows = [key_figure(name, figures(by_check.get(name, ()))) for name in catalog()]
    return sorted(filter(None, rows), key=lambda figure: outcome_rank(figure.outcome))


def key_figure(check: str, of_check: Iterable[Figure], *, with_lax: bool = False) -> Figure | None:
    """The speed with the worst outcome, of these the first in the declaration of the check, of these the largest size.

    ``with_lax``: also speeds whose limit says nothing about speed. None if there is no such speed.
    """
    declared = catalog()[check].declared
    patterns = [each.name for each in declared if each.key] + [each.name for each in declared if each.speed]
    ranked = []
    for figure in of_check:
        rank = next((n for n, pattern in enumerate(patterns) if fnmatchcase(figure.metric, pattern)), None)
        is_lax = figure.margin is None or (figure.outcome is Outcome.PASS and figure.margin > LAX_MARGIN)
        if rank is not None and figure.verdict and (with_lax or not is_lax):
            ranked.append((outcome_rank(figure.outcome), rank, -size_in_name(figure.metric), figure))
    return min(ranked, key=lambda entry: entry[:3])[3] if ranked else None


def outcome_rank(outcome: Outcome | None) -> int:
    """The sort key of outcomes, worst first; metrics without a rule come last."""
    return WORST_FIRST.index(outcome) if outcome else len(WORST_FIRST)


def _figure(verdicts: Sequence[Verdict], metrics: Sequence[Metric]) -> Figure:
    """The figure of verdicts on one metric, or of verdicts without a metric that have the same text."""
    verdict = min(verdicts, key=badness)
    expected, op, limit = _comparison(verdict)
    source = ""  # such as: SKU NVIDIA H200 SXM, or trial acceptance
    if basis := verdict.basis:
        label = "check" if basis.kind is BasisKind.RULE else str(basis.kind).replace("_", " ")
        source = f"{label} {basis.name}".rstrip()
    return Figure(
        checks=tuple(dict.fromkeys(each.check for each in verdicts)),
        metric=verdict.metric,
        measured=verdict.value,
        unit=verdict.unit,
        worst_part=verdict.subject,
        n=len({each.subject for each in verdicts}),
        expected=expected,
        op=op,
        limit=limit,
        source=source,
        verdict=verdict,
        metrics=tuple(metrics),
    )


def _without_rule(check: str, name: str, metrics: Sequence[Metric]) -> Figure:
    only = metrics[0] if len(metrics) == 1 else None
    return Figure(
        checks=(check,),
        metric=name,
        measured=only.value if only else None,
        unit=metrics[0].unit,
        worst_part=only.subject if only else "",
        n=len(metrics),
        metrics=tuple(metrics),
    )


def badness(verdict: Verdict) -> tuple[int, float]:
    """A key that is lowest for the worst outcome and, of equal outcomes, for the value closest to its limit."""
    _expected, op, limit = _comparison(verdict)
    margin = _margin(verdict.value, op, limit)
    return WORST_FIRST.index(verdict.outcome), math.inf if margin is None else margin


def _comparison(verdict: Verdict) -> tuple[float | None, str, float | None]:
    """The expected value, the operator and the limit of a verdict."""
    basis = verdict.basis
    if basis is None or basis.expected is None or basis.kind is BasisKind.OWN_MEDIAN:
        return None, "", None
    if basis.op:  # the ratio refers to the reference value that the text of the verdict names
        return _ratio(verdict.value, verdict.ratio), basis.op, basis.expected
    violates_only_warning = verdict.outcome is Outcome.WARN or basis.fail_below is None
    share = (basis.warn_below if violates_only_warning else None) or basis.fail_below
    return basis.expected, ">=", None if share is None else share * basis.expected


def _margin(value: float | None, op: str, limit: float | None) -> float | None:
    if limit is None or limit <= 0 or op == "==":
        return None
    return _ratio(limit, value) if op in ("<", "<=") else _ratio(value, limit)


def _ratio(value: float | None, base: float | None) -> float | None:
    if value is None or base is None or not math.isfinite(value) or not math.isfinite(base) or base <= 0 or value < 0:
        return None
    return value / base
