"""Verdicts on a first measurement and its retry: a performance metric FAILs only if both measurements fail.

Other metrics, such as data corruption, FAIL if either measurement fails.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from seatrial.checks.base import Check
from seatrial.model import WORST_FIRST, Measurement, Outcome, Reason, Retry, Verdict

CHANGE_FACT = "retry"  # fact of a retry: what differs from the first measurement
_FAIL = Outcome.FAIL  # looked up once, since enum member access is slow
# Outcome of a FAIL by the outcome of its retry; with any other outcome, such as ERROR, it remains FAIL
_LIFTED = {Outcome.PASS: Outcome.WARN, Outcome.WARN: Outcome.WARN, Outcome.UNJUDGED: Outcome.UNJUDGED}


def retryable_failures(check: Check, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """The FAIL verdicts on performance metrics, which a retry may lift."""
    is_performance = _PerformanceMetrics(check)
    return [verdict for verdict in verdicts if verdict.outcome is _FAIL and is_performance[verdict.metric]]


def covers_same_subjects(first: Sequence[Measurement], second: Sequence[Measurement]) -> bool:
    """Whether the retry measured the same subjects as the first measurement, without errors and skips."""
    same = {measurement.subject for measurement in first} == {measurement.subject for measurement in second}
    return same and not any(measurement.error or measurement.skipped for measurement in second)


def combined_verdicts(
    check: Check,
    first_verdicts: Sequence[Verdict],
    first: Sequence[Measurement],
    second_verdicts: Sequence[Verdict],
    second: Sequence[Measurement],
) -> Iterator[Verdict]:
    """The verdicts on a check from its first measurements and its retries (``second``)."""
    is_performance = _PerformanceMetrics(check)
    complete, problem = covers_same_subjects(first, second), _retry_problem(second)
    changes = dict.fromkeys(
        str(measurement.facts[CHANGE_FACT]) for measurement in second if CHANGE_FACT in measurement.facts
    )
    label = "retry" + (f" ({'; '.join(changes)})" if changes else "")
    mildest_first = sorted(second_verdicts, key=lambda verdict: WORST_FIRST.index(verdict.outcome), reverse=True)
    worst_second = {(verdict.metric, verdict.subject): verdict for verdict in mildest_first}
    failed_first = {(verdict.metric, verdict.subject) for verdict in first_verdicts if verdict.outcome is _FAIL}
    failed_second = {(verdict.metric, verdict.subject) for verdict in second_verdicts if verdict.outcome is _FAIL}
    retry_subjects = _retry_subjects(first, second)
    for verdict in first_verdicts:
        if not (second or verdict.outcome is _FAIL) or not is_performance[verdict.metric]:
            yield verdict
            continue
        key = verdict.metric, verdict.subject
        same_rank = verdict.metric, retry_subjects.get(verdict.subject, "")
        if not complete or key not in worst_second or verdict.value is None:
            yield _not_retried(verdict, problem)
        elif key in failed_first and key not in failed_second and same_rank in failed_second:
            # the fault follows the rank to another device: a fault of the host (cores, memory, settings)
            reason, retry_verdict = Reason.REPRODUCED_ON_OTHER_DEVICE, worst_second[same_rank]
            yield _with_retry(verdict, retry_verdict, _FAIL, reason, label, retry_subject=same_rank[1])
        else:
            lifted = key in failed_first and key not in failed_second
            new_failures = failed_second - failed_first if lifted else set()
            subjects = tuple(sorted(subject for metric, subject in new_failures if metric == verdict.metric))
            yield _combined(verdict, worst_second[key], label, subjects)
    for verdict in second_verdicts:  # new failures of metrics that a retry cannot lift
        is_new = verdict.outcome is _FAIL and (verdict.metric, verdict.subject) not in failed_first
        if is_new and not is_performance[verdict.metric]:
            yield replace(verdict, reasons=(*verdict.reasons, Reason.FAILED_IN_RETRY_ONLY))


class _PerformanceMetrics(dict[str, bool]):
    """Metric → whether it is a performance metric of ``check``: declared as one, or with a reference value.

    Cached, since thousands of subjects have the same few metrics.
    """

    def __init__(self, check: Check) -> None:
        super().__init__((rule.metric, True) for rule in check.rules if rule.reference)
        self._families = check.performance_metrics

    def __missing__(self, metric: str) -> bool:
        self[metric] = any(fnmatchcase(metric, family) for family in self._families)
        return self[metric]


def _retry_problem(second: Sequence[Measurement]) -> str:
    """Why the retry is incomplete: its first error, else the subjects it covers; empty without a retry."""
    errors = (
        f"{measurement.subject}: {measurement.error or measurement.skipped}"
        for measurement in second
        if measurement.error or measurement.skipped
    )
    subjects = sorted({measurement.subject for measurement in second})
    return next(errors, f"only {', '.join(subjects)}" if second else "")


def _retry_subjects(first: Iterable[Measurement], second: Iterable[Measurement]) -> dict[str, str]:
    """Subject → subject of the same rank in the retry, where ranks use the GPUs of a node in reverse order."""
    by_rank = {measurement.rank: measurement.subject for measurement in second}
    return {
        measurement.subject: by_rank[measurement.rank]
        for measurement in first
        if measurement.rank is not None and measurement.rank in by_rank
    }


def _not_retried(verdict: Verdict, problem: str) -> Verdict:
    """The verdict without a usable retry: a FAIL remains FAIL."""
    if verdict.outcome is not _FAIL:
        return verdict
    reason = Reason.RETRY_FAILED if problem else Reason.NOT_RETRIED
    evidence = f"{verdict.evidence}; retry: {problem}" if problem else verdict.evidence
    return replace(verdict, reasons=(*verdict.reasons, reason), evidence=evidence)


def _combined(first: Verdict, second: Verdict, label: str, new_failures: tuple[str, ...]) -> Verdict:
    """The verdict on two values of a metric of one subject."""
    match first.outcome, second.outcome:
        case Outcome.FAIL, Outcome.FAIL:
            return _with_retry(first, second, _FAIL, Reason.REPRODUCED, label)
        case Outcome.FAIL, better if better in _LIFTED:
            return _with_retry(
                first, second, _LIFTED[better], Reason.NOT_REPRODUCED, label, failed_only_in_retry=new_failures
            )
        case Outcome.FAIL, _:
            return _not_retried(first, second.message)
        case Outcome.PASS | Outcome.WARN, Outcome.FAIL:
            return _with_retry(first, second, Outcome.WARN, Reason.FAILED_IN_RETRY_ONLY, label)
    return first


def _with_retry(
    first: Verdict,
    second: Verdict,
    outcome: Outcome,
    reason: Reason,
    label: str,
    retry_subject: str = "",
    failed_only_in_retry: tuple[str, ...] = (),
) -> Verdict:
    """The failed verdict of the two, with the values and the evidence of both."""
    assert first.value is not None
    assert second.value is not None
    failed = second if reason is Reason.FAILED_IN_RETRY_ONLY else first
    first_evidence, second_evidence = (verdict.evidence or verdict.summary for verdict in (first, second))
    return replace(
        failed,
        outcome=outcome,
        reasons=(*failed.reasons, reason),
        evidence=f"{first_evidence}; {label}: {second_evidence}",
        retry=Retry(first.value, second.value, retry_subject, failed_only_in_retry),
    )
