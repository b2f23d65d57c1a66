"""Figures of performance that were recorded and that nothing judged: who accepts is to know of what nobody spoke."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Set
from fnmatch import fnmatchcase
from operator import attrgetter

from seatrial.checks.base import Check
from seatrial.model import Measurement, Outcome, Verdict


def unjudged(
    checks: Mapping[str, Check], measurements: Iterable[Measurement], verdicts: Iterable[Verdict]
) -> tuple[str, ...]:
    """Each a sentence on checks of which the same is to say: ``a.b, a.c: algbw.*, busbw.* other than 1GiB``."""
    recorded: dict[str, set[str]] = {}
    speaking = {name for name, check in checks.items() if check.performance}
    for one in (one for one in measurements if one.metrics and one.check in speaking):
        recorded.setdefault(one.check, set()).update(map(attrgetter("name"), one.metrics))
    said = set(map(attrgetter("check", "metric", "outcome"), verdicts))  # few of very many
    judged = {(check, metric) for check, metric, outcome in said if outcome is not Outcome.SKIP}
    by_figures: dict[str, list[str]] = {}
    for name, metrics in recorded.items():
        if figures := ", ".join(_families(checks[name], metrics, judged)):
            by_figures.setdefault(figures, []).append(name)
    return tuple(f"{', '.join(names)}: {figures}" for figures, names in by_figures.items())


def _families(check: Check, recorded: Iterable[str], judged: Set[tuple[str, str]]) -> Iterator[str]:
    """The families of metrics that no verdict is on, or not on all of their members."""
    families: dict[str, list[str]] = {}
    for pattern in check.performance:  # which are in the order of their weight
        for metric in sorted(metric for metric in recorded if fnmatchcase(metric, pattern)):
            members = families.setdefault(metric.partition(".")[0], [])
            members += [metric] if metric not in members else []
    for family, members in families.items():
        held = [metric.partition(".")[2] for metric in members if (check.name, metric) in judged]
        if len(members) == len(held) + 1:
            yield next(metric for metric in members if (check.name, metric) not in judged)
        elif len(members) > len(held):
            yield f"{family}.*" + (f" other than {' '.join(held)}" if held else "")
