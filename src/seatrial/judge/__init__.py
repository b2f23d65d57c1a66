"""Measurements × rules × baselines → verdicts and a decision. Pure: no clock, no file but our own data, no GPU."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.base import Check
from seatrial.config.schema import Config
from seatrial.hardware import links
from seatrial.hardware.references import references_for
from seatrial.judge import error_counters, retry
from seatrial.judge.coverage import coverage_errors, unevaluated_thresholds
from seatrial.judge.peaks import values_above_peak
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Baseline, Job, Measurement, Outcome, Reason, Verdict
from seatrial.util.gc_pause import gc_paused


@gc_paused()
def judge(
    config: Config,
    jobs: Sequence[Job],
    measurements: Sequence[Measurement],
    checks: Mapping[str, Check],
    excluded_checks: Mapping[str, str],
    site: Baseline | None = None,
    retries: Sequence[Measurement] | None = (),
) -> tuple[Verdict, ...]:
    """Verdicts on every check of a trial, in the trial's order, those that nobody measured among them.

    ``jobs`` say at how many places a check was to be measured: at fewer, what the others brought is not enough.
    ``site`` is what good runs of this site reached. ``repeats`` are second measurements of what fell short at first:
    they bear a FAIL out, or not, and speak of nothing else. None: they are still to come.
    """
    known = references_for(links.read(measurements, checks), site)
    by_check: dict[str, list[Measurement]] = {}
    for measurement in measurements:
        by_check.setdefault(measurement.check, []).append(measurement)
    verdicts: list[Verdict] = []
    for name, setting in config.checks.items():
        if name in excluded_checks:
            reasons, detail = (Reason.EXCLUDED,), excluded_checks[name]
            verdicts.append(Verdict(name, CLUSTER, Outcome.SKIP, reasons=reasons, detail=detail))
        elif name not in checks:
            verdicts.append(Verdict(name, CLUSTER, Outcome.UNJUDGED, reasons=(Reason.UNKNOWN_CHECK,)))
        else:
            check, own = checks[name], by_check.get(name, ())
            verdicts += coverage_errors(name, config.cluster, jobs, by_check)
            verdicts += unevaluated_thresholds(name, setting, own, config.name)
            first = judge_check(check, own, setting.expect, config.name, known)
            verdicts += error_counters.verdicts(check, own)
            verdicts += values_above_peak(check, own, known)
            if retries is None:
                verdicts += first
                continue
            more = [measurement for measurement in retries if measurement.check == name]
            second = judge_check(check, more, setting.expect, config.name, known) if more else []
            verdicts += retry.combined_verdicts(check, first, own, second, more)
            verdicts += error_counters.verdicts(check, more)
            verdicts += values_above_peak(check, more, known)
    return tuple(verdicts)


def checks_to_retry(
    config: Config,
    measurements: Sequence[Measurement],
    repeats: Sequence[Measurement],
    checks: Mapping[str, Check],
    site: Baseline | None = None,
) -> dict[str, str]:
    """The checks that fell short of a figure of performance, with what they fell short of, and were measured once only.

    A check that could not be measured somewhere is none of them: first it is to be measured everywhere.
    """
    known = references_for(links.read(measurements, checks), site)
    found: dict[str, str] = {}
    for name, setting in config.checks.items():
        own, more = ([one for one in every if one.check == name] for every in (measurements, repeats))
        if name in checks and own and not any(one.error for one in own) and not retry.covers_same_subjects(own, more):
            first = judge_check(checks[name], own, setting.expect, config.name, known)
            figures = [one.summary for one in retry.retryable_failures(checks[name], first)]
            more_of_them = f", and {len(figures) - 1} more" if len(figures) > 1 else ""
            found |= {name: figures[0] + more_of_them} if figures else {}
    return found
