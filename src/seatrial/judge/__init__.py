"""Measurements, rules and reference values → verdicts. Pure: no clock, no GPU, no files except seatrial's own data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.base import Check
from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware import links
from seatrial.hardware.references import References, references_for
from seatrial.judge import error_counters, retry
from seatrial.judge.coverage import coverage_errors, unevaluated_thresholds
from seatrial.judge.peaks import values_above_peak
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Baseline, BasisKind, Job, Measurement, Outcome, Reason, Verdict
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
    *,
    site_includes_run: bool = False,
) -> tuple[Verdict, ...]:
    """Verdicts on all checks of a trial, in the trial's order, including checks without a measurement.

    ``jobs`` define on how many subjects each check must be measured. ``site`` is the site's baseline, learned from this
    run among others if ``site_includes_run``. ``retries`` are second measurements of checks that failed; they confirm
    or lift a FAIL. None: the retries are not made yet.
    """
    references = references_for(links.read(measurements, checks), site, site_includes_run=site_includes_run)
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
            check, first = checks[name], by_check.get(name, ())
            verdicts += coverage_errors(name, config.cluster, jobs, by_check)
            verdicts += unevaluated_thresholds(name, setting, first, config.name)
            first_verdicts = _judge_check(check, first, setting, config.name, references)
            verdicts += error_counters.verdicts(check, first)
            verdicts += values_above_peak(check, first, references)
            if retries is None:
                verdicts += first_verdicts
                continue
            second = [measurement for measurement in retries if measurement.check == name]
            second_verdicts = _judge_check(check, second, setting, config.name, references) if second else []
            for is_of_trial in (False, True):  # a rule and a threshold on the same metric are retried separately
                of_first, of_second = (
                    [verdict for verdict in of_both if _is_of_trial(verdict) is is_of_trial]
                    for of_both in (first_verdicts, second_verdicts)
                )
                verdicts += retry.combined_verdicts(check, of_first, first, of_second, second)
            verdicts += error_counters.verdicts(check, second)
            verdicts += values_above_peak(check, second, references)
    return tuple(verdicts)


def checks_to_retry(
    config: Config,
    measurements: Sequence[Measurement],
    retries: Sequence[Measurement],
    checks: Mapping[str, Check],
    site: Baseline | None = None,
) -> dict[str, str]:
    """The checks with failed performance metrics and without a complete retry, each with a summary of its failures.

    Checks with an error in any measurement are not retried.
    """
    references = references_for(links.read(measurements, checks), site)
    failures_by_check: dict[str, str] = {}
    for name, setting in config.checks.items():
        first = [measurement for measurement in measurements if measurement.check == name]
        second = [measurement for measurement in retries if measurement.check == name]
        if name not in checks or not first or any(measurement.error for measurement in first):
            continue
        if retry.covers_same_subjects(first, second):
            continue
        verdicts = _judge_check(checks[name], first, setting, config.name, references)
        if failures := [verdict.summary for verdict in retry.retryable_failures(checks[name], verdicts)]:
            others = f", and {len(failures) - 1} more" if len(failures) > 1 else ""
            failures_by_check[name] = failures[0] + others
    return failures_by_check


def _judge_check(
    check: Check, measurements: Sequence[Measurement], setting: CheckSettings, trial: str, references: References
) -> list[Verdict]:
    expect, override, options = setting.expect, setting.override, setting.options
    return judge_check(check, measurements, expect, trial, references, override=override, options=options)


def _is_of_trial(verdict: Verdict) -> bool:
    """Whether the verdict is that of a threshold of the trial."""
    return verdict.basis is not None and verdict.basis.kind is BasisKind.TRIAL
