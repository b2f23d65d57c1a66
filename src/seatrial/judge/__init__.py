"""Measurements × rules × baselines → verdicts and a decision. Pure: no clock, no file but our own data, no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.hardware import links
from seatrial.hardware.references import known_for
from seatrial.judge import error_counters, retry
from seatrial.judge.coverage import unheld, unproven
from seatrial.judge.peaks import unreachable
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Baseline, Job, Measurement, Outcome, Verdict
from seatrial.util.gc_pause import uncollected


@uncollected()
def judge(
    config: Config,
    jobs: Sequence[Job],
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    left_out: Mapping[str, str],
    site: Baseline | None = None,
    repeats: Sequence[Measurement] | None = (),
) -> tuple[Verdict, ...]:
    """Verdicts on every check of a trial, in the trial's order, those that nobody measured among them.

    ``jobs`` say at how many places a check was to be measured: at fewer, what the others brought is not enough.
    ``site`` is what good runs of this site reached. ``repeats`` are second measurements of what fell short at first:
    they bear a FAIL out, or not, and speak of nothing else. None: they are still to come.
    """
    known = known_for(links.read(measurements, checks), site)
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
            own = by_check.get(name, ())
            verdicts += unproven(name, config.cluster, jobs, by_check)
            verdicts += unheld(name, setting, own, config.name)
            first = judge_check(checks[name], own, setting.expect, config.name, known)
            verdicts += error_counters.verdicts(checks[name], own)
            verdicts += unreachable(checks[name], own, known)
            if repeats is None:
                verdicts += first
                continue
            more = [measurement for measurement in repeats if measurement.check == name]
            second = judge_check(checks[name], more, setting.expect, config.name, known) if more else []
            verdicts += retry.weighed(checks[name], first, own, second, more)
            verdicts += error_counters.verdicts(checks[name], more)
            verdicts += unreachable(checks[name], more, known)
    return tuple(verdicts)


def to_repeat(
    config: Config,
    measurements: Sequence[Measurement],
    repeats: Sequence[Measurement],
    checks: Mapping[str, Check],
    site: Baseline | None = None,
) -> dict[str, str]:
    """The checks that fell short of a figure of performance, with what they fell short of, and were measured once only.

    A check that could not be measured somewhere is none of them: first it is to be measured everywhere.
    """
    known = known_for(links.read(measurements, checks), site)
    found: dict[str, str] = {}
    for name, setting in config.checks.items():
        own, more = ([one for one in every if one.check == name] for every in (measurements, repeats))
        if name in checks and own and not any(one.error for one in own) and not retry.whole(own, more):
            first = judge_check(checks[name], own, setting.expect, config.name, known)
            figures = [one.reason.partition(": ")[0] for one in retry.shortfalls(checks[name], first)]
            more_of_them = f", and {len(figures) - 1} more" if len(figures) > 1 else ""
            found |= {name: figures[0] + more_of_them} if figures else {}
    return found
