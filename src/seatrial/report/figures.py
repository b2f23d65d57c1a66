"""The figures of a trial, once for all reports: each metric with its worst value, expected value, limit and source."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase

from seatrial.checks import catalog
from seatrial.model import WORST_FIRST, Basis, BasisKind, Outcome, Trial, Verdict
from seatrial.report.formatting import print_value, size_in_name

# Outcomes that a reader has to act on, in the order in which reports list them
NOT_PASSED = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN)
# A value that meets its limit by this factor says nothing about speed: the limit is a plausibility check
LAX_MARGIN = 3.0


@dataclass(frozen=True, slots=True)
class Figure:
    """A metric of a check: its worst value, and what this value is compared with.

    ``limit``: the value must meet ``op limit``. ``expected``: the value that the limit is a share of; None for a limit
    that is a number of its own. ``source``: where the expected value or the limit is from. ``worst_part``: the subject
    with the worst value. ``n``: number of subjects. ``verdict``: the verdict on the worst value. ``checks``: several
    names only for one error of several checks.
    """

    checks: tuple[str, ...]
    metric: str
    measured: float | None
    expected: float | None
    op: str
    limit: float | None
    unit: str
    source: str
    worst_part: str
    n: int
    outcome: Outcome
    verdict: Verdict

    @property
    def name(self) -> str:
        """The check and the metric; for several checks, their number."""
        return f"{self.checks[0]} {self.metric}".rstrip() if len(self.checks) == 1 else f"{len(self.checks)} checks"

    @property
    def title(self) -> str:
        """What the check measures: its title up to the first punctuation mark; the name of an unknown check."""
        check = catalog().get(self.checks[0])
        return _PUNCTUATION.split(check.title)[0] if check and len(self.checks) == 1 else self.name

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
        return "not measured" if self.measured is None else print_value(self.measured, self.unit)

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


_PUNCTUATION = re.compile(r"[:;,]|\s\(")
_SIGNS = {">=": "≥", "<=": "≤"}


def figures(verdicts: Iterable[Verdict]) -> list[Figure]:
    """One figure for each metric, and one for each text of verdicts without a metric; in the order of ``verdicts``."""
    groups: dict[tuple[str, ...], list[Verdict]] = {}
    for verdict in verdicts:
        of_check = (verdict.check, verdict.metric)
        key = of_check if verdict.metric else (verdict.outcome, verdict.detail, verdict.evidence, verdict.fix)
        groups.setdefault(key, []).append(verdict)
    return [_figure(group) for group in groups.values()]


def headline(trial: Trial) -> list[Figure]:
    """The most important figure of each check that has a speed with a limit, worst outcome first.

    Of several figures of a check: the worst outcome, then the metric that its declaration names first, then the largest
    size.
    """
    by_check: dict[str, list[Verdict]] = {}
    for verdict in trial.verdicts:
        if verdict.basis and verdict.value is not None and verdict.outcome is not Outcome.SKIP:
            by_check.setdefault(verdict.check, []).append(verdict)
    rows = []
    for name, check in catalog().items():
        patterns = [each.name for each in check.declared if each.key] + list(check.speeds)
        ranked = []
        for figure in figures(by_check.get(name, ())):
            rank = next((n for n, pattern in enumerate(patterns) if fnmatchcase(figure.metric, pattern)), None)
            is_lax = figure.margin is None or (figure.outcome is Outcome.PASS and figure.margin > LAX_MARGIN)
            if rank is not None and not is_lax:
                ranked.append((WORST_FIRST.index(figure.outcome), rank, -size_in_name(figure.metric), figure))
        if ranked:
            rows.append(min(ranked, key=lambda entry: entry[:3])[3])
    return sorted(rows, key=lambda figure: WORST_FIRST.index(figure.outcome))


def _figure(verdicts: list[Verdict]) -> Figure:
    """The figure of verdicts on one metric, or of verdicts without a metric that have the same text."""
    verdict = min(verdicts, key=_badness)
    expected, op, limit = _comparison(verdict)
    return Figure(
        checks=tuple(dict.fromkeys(each.check for each in verdicts)),
        metric=verdict.metric,
        measured=verdict.value,
        expected=expected,
        op=op,
        limit=limit,
        unit=verdict.unit,
        source=_source(verdict.basis) if verdict.basis else "",
        worst_part=verdict.subject,
        n=len({each.subject for each in verdicts}),
        outcome=verdict.outcome,
        verdict=verdict,
    )


def _badness(verdict: Verdict) -> tuple[int, float]:
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


def _source(basis: Basis) -> str:
    """Where the expected value or the limit is from: ``SKU NVIDIA H200 SXM``, ``trial acceptance``."""
    label = "check" if basis.kind is BasisKind.RULE else str(basis.kind).replace("_", " ")
    return f"{label} {basis.name}".rstrip()
