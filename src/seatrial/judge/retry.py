"""Combines the verdicts on a first measurement and its retries.

A performance metric FAILs if two measurements are bad and their samples are conclusive. If only one of two is bad, a
third measurement decides. Without a complete retry the first verdict is kept. Other metrics, such as data corruption,
FAIL if any measurement fails.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import takewhile
from statistics import median

from seatrial.checks.check import Check
from seatrial.model import WORST_FIRST, BasisKind, Measurement, Metric, Outcome, Reason, Retry, Verdict, node_of
from seatrial.util.grouping import grouped

CHANGE_FACT = "retry"  # fact of a retry: what differs from the first measurement
MAX_RETRIES = 2
# Metric, subject, and whether a threshold of the trial judged it: a rule of the check may judge the same metric
Key = tuple[str, str, bool]
Judge = Callable[[Sequence[Measurement]], Sequence[Verdict]]
_FAIL, _PASS, _UNJUDGED = Outcome.FAIL, Outcome.PASS, Outcome.UNJUDGED  # looked up once: enum access is slow
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
        {_key(each): each for each in judge(measured) if is_bad(each) and is_performance[each.metric]}
        for measured in rounds
    ]
    if len(rounds) == 1:
        return list(bad_by_round[0].values())
    if len(rounds) > MAX_RETRIES:
        return []
    first, second = bad_by_round
    return [verdict for key, verdict in (*first.items(), *second.items()) if (key in first) is not (key in second)]


def complete_retries(first: Sequence[Measurement], retries: Sequence[Measurement]) -> list[list[Measurement]]:
    """The retries by number, up to the first one that is incomplete or missing."""
    by_number = ([each for each in retries if each.retry == number] for number in range(1, MAX_RETRIES + 1))
    return list(takewhile(partial(covers_same_subjects, first), by_number))


def covers_same_subjects(first: Sequence[Measurement], retry: Sequence[Measurement]) -> bool:
    """Whether the retry measured the same subjects as the first measurement, without errors and skips."""
    same_subjects = {each.subject for each in first} == {each.subject for each in retry}
    return same_subjects and not any(each.error or each.skipped for each in retry)


def combined_verdicts(
    check: Check, first: Sequence[Measurement], retries: Sequence[Measurement], judge: Judge
) -> Iterator[Verdict]:
    """The verdicts on a check from its first measurements and its retries, each judged by ``judge``."""
    is_performance, first_verdicts = PerformanceMetrics(check), judge(first)
    second, third = (
        _Retry(first, [each for each in retries if (each.retry > 1) is later], judge) for later in (False, True)
    )
    for verdict in first_verdicts:
        if not is_performance[verdict.metric] or (not retries and not is_bad(verdict)):
            yield verdict
        elif second.problem or _key(verdict) not in second.verdicts or verdict.value is None:
            yield _not_retried(verdict, second.problem if retries else "")
        else:
            yield _combined(verdict, first, second, third, judge)
    if not retries:
        return
    yield from _moved_faults(first_verdicts, second, is_performance)
    # a metric that is not a performance metric FAILs if any measurement fails
    bad_first = {_key(verdict) for verdict in first_verdicts if is_bad(verdict)}
    failed = {key: each for retry in (third, second) for key, each in retry.verdicts.items() if each.outcome is _FAIL}
    for key, verdict in failed.items():
        if key not in bad_first and not is_performance[verdict.metric]:
            yield replace(verdict, evidence=f"only in the retry: {verdict.evidence}")


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


class _Retry:
    """The measurements of one retry, and its worst verdicts.

    ``problem``: why the retry is incomplete; empty if it is complete.
    """

    def __init__(self, first: Sequence[Measurement], measurements: Sequence[Measurement], judge: Judge) -> None:
        self.measurements, self.problem = measurements, ""
        if not covers_same_subjects(first, measurements):
            errors = (
                f"{each.subject}: {each.error or each.skipped}" for each in measurements if each.error or each.skipped
            )
            subjects = ", ".join(sorted({each.subject for each in measurements}))
            self.problem = next(errors, f"measured {subjects}, not the same subjects" if subjects else "not run")
        judged = judge(measurements) if measurements else ()
        mildest_first = sorted(judged, key=lambda verdict: -WORST_FIRST.index(verdict.outcome))
        self.verdicts = {_key(verdict): verdict for verdict in mildest_first}
        facts = (each.facts for each in measurements)
        changes = dict.fromkeys(str(each[CHANGE_FACT]) for each in facts if CHANGE_FACT in each)
        self.label = "retry" + (f" ({'; '.join(changes)})" if changes else "")
        # Subject → subject of the same rank in the retry: there, ranks use the GPUs of a node in reverse order
        by_rank = {each.rank: each.subject for each in measurements if each.rank is not None}
        self.same_rank_subjects = {each.subject: by_rank[each.rank] for each in first if each.rank in by_rank}


def _key(verdict: Verdict) -> Key:
    return verdict.metric, verdict.subject, verdict.basis is not None and verdict.basis.kind is BasisKind.TRIAL


def _not_retried(verdict: Verdict, problem: str) -> Verdict:
    """The verdict with the reason why there is no retry of it; a verdict that is not bad is returned unchanged."""
    if not is_bad(verdict):
        return verdict
    evidence = f"{verdict.evidence}; retry: {problem}" if problem else verdict.evidence
    return replace(verdict, reasons=(*verdict.reasons, Reason.NOT_RETRIED), evidence=evidence)


def _combined(
    first: Verdict, first_measurements: Sequence[Measurement], retry: _Retry, third_retry: _Retry, judge: Judge
) -> Verdict:
    """The verdict on all measurements of a metric of one subject.

    Two bad values are a FAIL if both are conclusive, or if their pooled samples are conclusive; otherwise UNJUDGED.
    """
    key = _key(first)
    second, third = retry.verdicts[key], None if third_retry.problem else third_retry.verdicts.get(key)
    if not is_bad(first) and not is_bad(second):
        return first

    def combined(verdict: Verdict, outcome: Outcome, reason: Reason, other: Verdict = second) -> Verdict:
        """``verdict`` with this outcome, and with the values and the evidence of all measurements."""
        evidence = f"; second {third_retry.label}: {third.evidence or third.summary}" if third else ""
        values = _values(first, other)
        return replace(
            verdict,
            outcome=outcome,
            reasons=(*verdict.reasons, reason),
            evidence=_evidence(first, retry, other) + evidence,
            retry=replace(values, third_value=third.value) if third else values,
        )

    if is_bad(first) and is_bad(second):
        both_fail = first.outcome is second.outcome is _FAIL
        pooled = None if both_fail else _pooled_verdict(key, first_measurements, retry.measurements, judge)
        is_conclusive = both_fail or (pooled is not None and pooled.outcome is _FAIL)
        shown = pooled if pooled and is_bad(pooled) else first
        return combined(shown, _FAIL if is_conclusive else _UNJUDGED, Reason.REPRODUCED)
    bad, good = (first, second) if is_bad(first) else (second, first)
    same_rank = retry.verdicts.get((key[0], retry.same_rank_subjects.get(key[1], ""), key[2]))
    if bad is first and same_rank and is_bad(same_rank):
        # the fault follows the rank to another device: a fault of the host (cores, memory, settings)
        return combined(first, _FAIL, Reason.REPRODUCED, same_rank)
    if good.outcome is _UNJUDGED:
        return combined(bad, _UNJUDGED, Reason.NOT_REPRODUCED)
    if good.outcome not in _GOOD and Reason.NO_THRESHOLD not in good.reasons:
        return _not_retried(bad, good.message)
    if third is None:
        return combined(bad, _UNJUDGED, Reason.NO_THIRD_MEASUREMENT)
    if is_bad(third):
        return combined(bad, _FAIL, Reason.REPRODUCED)
    return combined(bad, Outcome.WARN, Reason.NOT_REPRODUCED)


def _values(first: Verdict, second: Verdict) -> Retry:
    assert first.value is not None
    assert second.value is not None
    return Retry(first.value, second.value, second.subject if second.subject != first.subject else "")


def _evidence(first: Verdict, retry: _Retry, second: Verdict) -> str:
    return f"{first.evidence or first.summary}; {retry.label}: {second.evidence or second.summary}"


def _pooled_verdict(
    key: Key, first: Sequence[Measurement], second: Sequence[Measurement], judge: Judge
) -> Verdict | None:
    """The verdict on the samples of the first two measurements together."""
    more = {
        (measurement.subject, metric.name, metric.subject): metric.samples or (metric.value,)
        for measurement in second
        for metric in measurement.metrics
    }

    def pooled(subject: str, metric: Metric) -> Metric:
        others = more.get((subject, metric.name, metric.subject), ())
        samples = (*(metric.samples or (metric.value,)), *others)
        return replace(metric, value=median(samples), samples=samples)

    together = [
        each.model_copy(update={"metrics": tuple(pooled(each.subject, metric) for metric in each.metrics)})
        for each in first
    ]
    verdicts = (verdict for verdict in judge(together) if _key(verdict) == key)
    return min(verdicts, key=lambda verdict: WORST_FIRST.index(verdict.outcome), default=None)


def _moved_faults(
    first_verdicts: Iterable[Verdict], second: _Retry, is_performance: Mapping[str, bool]
) -> Iterator[Verdict]:
    """A FAIL of each node on which a metric was bad on different subjects in the two measurements."""

    def bad_by_metric_and_node(verdicts: Iterable[Verdict]) -> dict[Key, list[Verdict]]:
        bad = (each for each in verdicts if is_bad(each) and is_performance[each.metric] and "/" in each.subject)
        keys = ((_key(each), each) for each in bad)
        return grouped(((metric, node_of(subject), by_trial), each) for (metric, subject, by_trial), each in keys)

    bad_second = bad_by_metric_and_node(second.verdicts.values())
    for key, in_first in bad_by_metric_and_node(first_verdicts).items():
        in_second = bad_second.get(key, [])
        if in_second and not {verdict.subject for verdict in in_first} & {verdict.subject for verdict in in_second}:
            bad, elsewhere = in_first[0], in_second[0]
            yield replace(
                bad,
                subject=key[1],
                outcome=_FAIL,
                reasons=(*bad.reasons, Reason.REPRODUCED),
                evidence=_evidence(bad, second, elsewhere),
                retry=_values(bad, elsewhere),
            )
