"""Combines the verdicts on a first measurement and its retries.

A performance metric FAILs if two measurements are bad and their samples are conclusive. If only one of two is bad, a
third measurement decides. Without a complete retry the first verdict is kept. Other metrics, such as data corruption,
FAIL if any measurement fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import median

from seatrial.checks.base import Check
from seatrial.model import WORST_FIRST, Measurement, Metric, Outcome, Reason, Retry, Verdict

CHANGE_FACT = "retry"  # fact of a retry: what differs from the first measurement
MAX_RETRIES = 2
MetricAndSubject = tuple[str, str]  # metric, subject
Judge = Callable[[Sequence[Measurement]], Sequence[Verdict]]
_FAIL, _PASS = Outcome.FAIL, Outcome.PASS  # looked up once, since enum member access is slow
_GOOD = (Outcome.PASS, Outcome.WARN)


def is_bad(verdict: Verdict) -> bool:
    """Whether the value violates the limit of FAIL, conclusively or not."""
    return verdict.outcome is _FAIL or Reason.INCONCLUSIVE in verdict.reasons


def verdicts_to_retry(check: Check, rounds: Sequence[Sequence[Measurement]], judge: Judge) -> list[Verdict]:
    """The bad verdicts on performance metrics that need one more measurement.

    ``rounds``: the first measurement and its complete retries. After one measurement these are all bad verdicts; after
    two, the verdicts that are bad in only one of them; after three, none.
    """
    is_performance = PerformanceMetrics(check)
    bad_by_round = [
        {
            (verdict.metric, verdict.subject): verdict
            for verdict in judge(measurements)
            if is_bad(verdict) and is_performance[verdict.metric]
        }
        for measurements in rounds
    ]
    if len(rounds) == 1:
        return list(bad_by_round[0].values())
    if len(rounds) > MAX_RETRIES:
        return []
    first, second = bad_by_round
    return [verdict for key, verdict in (*first.items(), *second.items()) if (key in first) is not (key in second)]


def complete_retries(first: Sequence[Measurement], retries: Sequence[Measurement]) -> list[list[Measurement]]:
    """The retries by number, up to the first one that is incomplete or missing."""
    complete: list[list[Measurement]] = []
    for number in range(1, MAX_RETRIES + 1):
        retry = [measurement for measurement in retries if measurement.retry == number]
        if not covers_same_subjects(first, retry):
            break
        complete.append(retry)
    return complete


def covers_same_subjects(first: Sequence[Measurement], retry: Sequence[Measurement]) -> bool:
    """Whether the retry measured the same subjects as the first measurement, without errors and skips."""
    same_subjects = {measurement.subject for measurement in first} == {measurement.subject for measurement in retry}
    return same_subjects and not any(measurement.error or measurement.skipped for measurement in retry)


def combined_verdicts(
    check: Check, first: Sequence[Measurement], retries: Sequence[Measurement], judge: Judge
) -> Iterator[Verdict]:
    """The verdicts on a check from its first measurements and its retries, each judged by ``judge``."""
    is_performance, first_verdicts = PerformanceMetrics(check), judge(first)
    if not retries:
        for verdict in first_verdicts:
            # PASS is tested first, since most verdicts are PASS
            if verdict.outcome is _PASS or not (is_bad(verdict) and is_performance[verdict.metric]):
                yield verdict
            else:
                yield _not_retried(verdict, "")
        return
    second = _RetryResult(first, [measurement for measurement in retries if measurement.retry == 1], judge)
    third = _RetryResult(first, [measurement for measurement in retries if measurement.retry > 1], judge)
    bad_first = {(verdict.metric, verdict.subject) for verdict in first_verdicts if is_bad(verdict)}
    for verdict in first_verdicts:
        key = verdict.metric, verdict.subject
        if not is_performance[verdict.metric]:
            yield verdict
        elif second.problem or key not in second.verdicts or verdict.value is None:
            yield _not_retried(verdict, second.problem)
        else:
            yield _combined(verdict, _Attempts(key, first, second, third, judge))
    yield from _moved_faults(first_verdicts, second, is_performance)
    # a metric that is not a performance metric FAILs if any measurement fails
    retried = (item for retry in (third, second) for item in retry.verdicts.items())
    for key, verdict in {key: verdict for key, verdict in retried if verdict.outcome is _FAIL}.items():
        if key not in bad_first and not is_performance[verdict.metric]:
            yield replace(verdict, reasons=(*verdict.reasons, Reason.FAILED_IN_RETRY_ONLY))


class PerformanceMetrics(dict[str, bool]):
    """Metric → whether it is a performance metric of ``check``: declared as one, or with a reference value.

    Cached, since thousands of subjects have the same few metrics.
    """

    def __init__(self, check: Check) -> None:
        super().__init__((rule.metric, True) for rule in check.rules if rule.reference)
        self._check = check

    def __missing__(self, metric: str) -> bool:
        declared = self._check.declaration(metric)
        self[metric] = bool(declared and declared.speed)
        return self[metric]


class _RetryResult:
    """The measurements of one retry, and its verdicts by metric and subject.

    ``problem``: why the retry is incomplete; empty if it is complete.
    """

    def __init__(self, first: Sequence[Measurement], measurements: Sequence[Measurement], judge: Judge) -> None:
        self.measurements = measurements
        self.problem = "" if covers_same_subjects(first, measurements) else _retry_problem(measurements)
        mildest_first = sorted(
            judge(measurements) if measurements else (),
            key=lambda verdict: WORST_FIRST.index(verdict.outcome),
            reverse=True,
        )
        self.verdicts = {(verdict.metric, verdict.subject): verdict for verdict in mildest_first}
        changes = dict.fromkeys(
            str(measurement.facts[CHANGE_FACT]) for measurement in measurements if CHANGE_FACT in measurement.facts
        )
        self.label = "retry" + (f" ({'; '.join(changes)})" if changes else "")
        # Subject → subject of the same rank in the retry: there, ranks use the GPUs of a node in reverse order
        by_rank = {measurement.rank: measurement.subject for measurement in measurements}
        self.same_rank_subjects = {
            measurement.subject: by_rank[measurement.rank]
            for measurement in first
            if measurement.rank is not None and measurement.rank in by_rank
        }


@dataclass
class _Attempts:
    """All measurements of the metric and subject in ``key``."""

    key: MetricAndSubject
    first: Sequence[Measurement]
    second: _RetryResult
    third: _RetryResult
    judge: Judge

    @property
    def second_verdict(self) -> Verdict:
        return self.second.verdicts[self.key]

    @property
    def third_verdict(self) -> Verdict | None:
        """The verdict of the third measurement; None if there is none, or if it has an error."""
        return None if self.third.problem else self.third.verdicts.get(self.key)

    @cached_property
    def same_rank_verdict(self) -> Verdict | None:
        """The verdict on the other device that the rank of this subject used in the retry; None if it is not bad."""
        metric, subject = self.key
        verdict = self.second.verdicts.get((metric, self.second.same_rank_subjects.get(subject, "")))
        return verdict if verdict and is_bad(verdict) else None

    def pooled_verdict(self) -> Verdict | None:
        """The verdict on the samples of the first two measurements together."""
        samples = {measurement.subject: _samples(measurement) for measurement in self.second.measurements}
        pooled = [_with_samples(measurement, samples[measurement.subject]) for measurement in self.first]
        verdicts = (verdict for verdict in self.judge(pooled) if (verdict.metric, verdict.subject) == self.key)
        return min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict.outcome), default=None)


def _samples(measurement: Measurement) -> dict[MetricAndSubject, tuple[float, ...]]:
    return {(metric.name, metric.subject): metric.samples or (metric.value,) for metric in measurement.metrics}


def _with_samples(measurement: Measurement, more: Mapping[MetricAndSubject, tuple[float, ...]]) -> Measurement:
    """The measurement with ``more`` samples of each metric, and the median of all as its value."""
    metrics = []
    for metric in measurement.metrics:
        samples = (*(metric.samples or (metric.value,)), *more.get((metric.name, metric.subject), ()))
        metrics.append(
            Metric(name=metric.name, value=median(samples), unit=metric.unit, subject=metric.subject, samples=samples)
        )
    return measurement.model_copy(update={"metrics": tuple(metrics)})


def _retry_problem(retries: Sequence[Measurement]) -> str:
    """Why the retry is incomplete: an error or skip, the other subjects that it measured, or "not run"."""
    errors = (
        f"{measurement.subject}: {measurement.error or measurement.skipped}"
        for measurement in retries
        if measurement.error or measurement.skipped
    )
    subjects = sorted({measurement.subject for measurement in retries})
    return next(errors, f"measured {', '.join(subjects)}, not the same subjects" if retries else "not run")


def _not_retried(verdict: Verdict, problem: str) -> Verdict:
    """The verdict with the reason why there is no retry of it; a verdict that is not bad is returned unchanged."""
    if not is_bad(verdict):
        return verdict
    reason = Reason.RETRY_FAILED if problem else Reason.NOT_RETRIED
    evidence = f"{verdict.evidence}; retry: {problem}" if problem else verdict.evidence
    return replace(verdict, reasons=(*verdict.reasons, reason), evidence=evidence)


def _combined(first: Verdict, attempts: _Attempts) -> Verdict:
    """The verdict on all measurements of a metric of one subject.

    Two bad values are a FAIL if both are conclusive, or if their pooled samples are conclusive; otherwise UNJUDGED.
    """
    second, third = attempts.second_verdict, attempts.third_verdict
    if not is_bad(first) and not is_bad(second):
        return first
    if is_bad(first) and is_bad(second):
        if first.outcome is _FAIL and second.outcome is _FAIL:
            return _with_retry(first, first, second, _FAIL, Reason.REPRODUCED, attempts)
        pooled = attempts.pooled_verdict()
        if pooled and pooled.outcome is _FAIL:
            return _with_retry(pooled, first, second, _FAIL, Reason.REPRODUCED, attempts)
        uncertain = pooled if pooled and is_bad(pooled) else first
        return _with_retry(uncertain, first, second, Outcome.UNJUDGED, Reason.REPRODUCED, attempts)
    bad, good = (first, second) if is_bad(first) else (second, first)
    if bad is first and (same_rank := attempts.same_rank_verdict):
        # the fault follows the rank to another device: a fault of the host (cores, memory, settings)
        return _with_retry(first, first, same_rank, _FAIL, Reason.REPRODUCED_ON_OTHER_DEVICE, attempts)
    if good.outcome is Outcome.UNJUDGED:
        return _with_retry(bad, first, second, Outcome.UNJUDGED, Reason.NOT_REPRODUCED, attempts)
    if good.outcome not in _GOOD and Reason.NO_THRESHOLD not in good.reasons:
        return _not_retried(bad, good.message)
    reason = Reason.NOT_REPRODUCED if bad is first else Reason.FAILED_IN_RETRY_ONLY
    if third is None:
        return _with_retry(bad, first, second, Outcome.UNJUDGED, Reason.NO_THIRD_MEASUREMENT, attempts)
    if is_bad(third):
        return _with_retry(bad, first, second, _FAIL, Reason.REPRODUCED, attempts)
    return _with_retry(bad, first, second, Outcome.WARN, reason, attempts)


def _with_retry(
    verdict: Verdict, first: Verdict, second: Verdict, outcome: Outcome, reason: Reason, attempts: _Attempts
) -> Verdict:
    """``verdict`` with this outcome, and with the values and the evidence of all measurements."""
    assert first.value is not None
    assert second.value is not None
    third = attempts.third_verdict
    evidence = [first.evidence or first.summary, f"{attempts.second.label}: {second.evidence or second.summary}"]
    evidence += [f"second {attempts.third.label}: {third.evidence or third.summary}"] if third else []
    return replace(
        verdict,
        outcome=outcome,
        reasons=(*verdict.reasons, reason),
        evidence="; ".join(evidence),
        retry=Retry(
            first.value,
            second.value,
            second.subject if second.subject != first.subject else "",
            third_value=third.value if third else None,
        ),
    )


def _moved_faults(
    first_verdicts: Iterable[Verdict], second: _RetryResult, is_performance: Mapping[str, bool]
) -> Iterator[Verdict]:
    """A FAIL of each node on which a metric was bad on different subjects in the two measurements."""
    bad_first = _bad_by_metric_and_node(first_verdicts, is_performance)
    bad_second = _bad_by_metric_and_node(second.verdicts.values(), is_performance)
    for (metric, node), in_first in bad_first.items():
        in_second = bad_second.get((metric, node), [])
        if not in_second or {verdict.subject for verdict in in_first} & {verdict.subject for verdict in in_second}:
            continue
        bad, elsewhere = in_first[0], in_second[0]
        assert bad.value is not None
        assert elsewhere.value is not None
        yield replace(
            bad,
            subject=node,
            outcome=_FAIL,
            reasons=(*bad.reasons, Reason.MOVED),
            evidence=f"{bad.evidence}; {second.label}: {elsewhere.evidence}",
            retry=Retry(bad.value, elsewhere.value, elsewhere.subject),
        )


def _bad_by_metric_and_node(
    verdicts: Iterable[Verdict], is_performance: Mapping[str, bool]
) -> dict[tuple[str, str], list[Verdict]]:
    """(metric, node) → the bad verdicts on performance metrics of the node's GPUs, ranks and ports."""
    by_metric_and_node: dict[tuple[str, str], list[Verdict]] = {}
    for verdict in verdicts:
        if is_bad(verdict) and is_performance[verdict.metric] and "/" in verdict.subject:
            node = verdict.subject.partition("/")[0]
            by_metric_and_node.setdefault((verdict.metric, node), []).append(verdict)
    return by_metric_and_node
