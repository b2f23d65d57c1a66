"""Measurements × rules × baselines → verdicts and a decision. Pure: no clock, no file but our own data, no GPU."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager

from seatrial.checks.base import Check
from seatrial.judge import insights, links
from seatrial.judge.baselines import Known, skus
from seatrial.judge.places import unproven
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Baseline, Insight, Job, Measurement, Outcome, Verdict
from seatrial.settings import Config


@contextmanager
def _uncollected() -> Iterator[None]:
    """Judging adds records that stay: collecting garbage meanwhile is a walk through a million of them, in vain."""
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()


@_uncollected()
def judge(
    config: Config,
    jobs: Sequence[Job],
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    left_out: Mapping[str, str],
    site: Baseline | None = None,
) -> tuple[Verdict, ...]:
    """Verdicts on every check of a trial, in the trial's order, those that nobody measured among them.

    ``jobs`` say at how many places a check was to be measured: at fewer, what the others brought is not enough.
    ``site`` is what good runs of this site reached.
    """
    known = _known(measurements, site)
    by_check: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_check.setdefault(measurement.check, []).append(measurement)
    verdicts: list[Verdict] = []
    for name, setting in config.checks.items():
        if name in left_out:
            reason = f"left out by {left_out[name]}"
            verdicts.append(Verdict(check=name, subject=CLUSTER, outcome=Outcome.SKIP, reason=reason))
        elif name not in checks:
            reason = "this version of seatrial has no such check, so that nothing can judge it"
            verdicts.append(Verdict(check=name, subject=CLUSTER, outcome=Outcome.UNJUDGED, reason=reason))
        else:
            verdicts += unproven(name, config.cluster, jobs, by_check)
            verdicts += judge_check(checks[name], by_check.get(name, ()), setting.expect, config.name, known)
    return tuple(verdicts)


def read(
    config: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
    site: Baseline | None = None,
) -> tuple[Insight, ...]:
    """What the figures say beyond their verdicts; see ``insights``."""
    known = _known(measurements, site)
    return insights.insights(config, measurements, verdicts, checks, known, links.read(measurements))


def _known(measurements: Sequence[Measurement], site: Baseline | None) -> Known:
    found = links.read(measurements)
    return Known(site, skus(), found.fabric, found.sliced)
