"""A second measurement beside the first: what differs from run to run fails only when both fall short.

Corruption is another matter: seen once, in either of the two, it has been seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from seatrial.checks.base import Check
from seatrial.model import WORST_FIRST, Measurement, Outcome, Reason, Retry, Verdict

CHANGED = "retry"  # the fact of a second measurement that says what was different
_FAIL = Outcome.FAIL  # once: to ask an enum for a member takes as long as a call
# What becomes of a FAIL, by what the second measurement says. By anything else, an ERROR say, it stays what it is.
_LIFTED = {Outcome.PASS: Outcome.WARN, Outcome.WARN: Outcome.WARN, Outcome.UNJUDGED: Outcome.UNJUDGED}


def retryable_failures(check: Check, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that fail for want of performance, and that a second measurement may bear out or not."""
    repeatable = _Repeatable(check)
    return [one for one in verdicts if one.outcome is _FAIL and repeatable[one.metric]]


def covers_same_subjects(own: Sequence[Measurement], repeats: Sequence[Measurement]) -> bool:
    """Whether the second measurement, ``repeats``, was made everywhere where the first was, and nowhere else."""
    same = {one.subject for one in own} == {one.subject for one in repeats}
    return same and not any(one.error or one.skipped for one in repeats)


def combined_verdicts(
    check: Check,
    first: Sequence[Verdict],
    own: Sequence[Measurement],
    second: Sequence[Verdict],
    repeats: Sequence[Measurement],
) -> Iterator[Verdict]:
    """The verdicts on both measurements together: ``first`` judges ``own``, ``second`` judges ``repeats``."""
    repeatable = _Repeatable(check)
    complete, trouble = covers_same_subjects(own, repeats), _trouble(repeats)
    changes = dict.fromkeys(str(one.facts[CHANGED]) for one in repeats if CHANGED in one.facts)
    how = "measured again" + (f" ({'; '.join(changes)})" if changes else "")
    mildest_first = sorted(second, key=lambda one: WORST_FIRST.index(one.outcome), reverse=True)
    again = {(one.metric, one.subject): one for one in mildest_first}  # the worst verdict on each
    failed, failed_again = (
        {(one.metric, one.subject) for one in every if one.outcome is _FAIL} for every in (first, second)
    )
    subject_again = _subject_of_rank(own, repeats)
    for one in first:
        if not (repeats or one.outcome is _FAIL) or not repeatable[one.metric]:
            yield one
            continue
        key = one.metric, one.subject
        moved = one.metric, subject_again.get(one.subject, "")
        if not complete or key not in again or one.value is None:
            yield _not_repeated(one, trouble)
        elif key in failed and key not in failed_again and moved in failed_again:
            # with the rank to another device: a fault of the host, its cores, its memory, its settings
            yield _both(one, again[moved], _FAIL, Reason.REPRODUCED_ON_OTHER_DEVICE, how, subject=moved[1])
        else:
            others = failed_again - failed if key in failed and key not in failed_again else set()
            instead = tuple(sorted(subject for metric, subject in others if metric == one.metric))
            yield _weighed(one, again[key], how, instead)
    for one in second:  # of what no repetition excuses
        if one.outcome is _FAIL and (one.metric, one.subject) not in failed and not repeatable[one.metric]:
            yield replace(one, reasons=(*one.reasons, Reason.FAILED_IN_RETRY_ONLY))


class _Repeatable(dict[str, bool]):
    """Whether a metric of ``check`` is a figure of performance: one with a baseline, or declared as one.

    Thousands of subjects ask of the same few metrics.
    """

    def __init__(self, check: Check) -> None:
        super().__init__((rule.metric, True) for rule in check.rules if rule.reference)
        self._families = check.performance_metrics

    def __missing__(self, metric: str) -> bool:
        self[metric] = any(fnmatchcase(metric, family) for family in self._families)
        return self[metric]


def _trouble(repeats: Sequence[Measurement]) -> str:
    """Why a second measurement is not one of all places; empty where there is none."""
    errors = (f"{one.subject}: {one.error or one.skipped}" for one in repeats if one.error or one.skipped)
    return next(errors, f"only {', '.join(sorted({one.subject for one in repeats}))}" if repeats else "")


def _subject_of_rank(own: Iterable[Measurement], repeats: Iterable[Measurement]) -> dict[str, str]:
    """Place → where its rank was the second time; the ranks go through a node's GPUs the other way round then."""
    second = {one.rank: one.subject for one in repeats}
    return {one.subject: second[one.rank] for one in own if one.rank is not None and one.rank in second}


def _not_repeated(verdict: Verdict, trouble: str) -> Verdict:
    """A FAIL by one measurement alone stays one."""
    if verdict.outcome is not _FAIL:
        return verdict
    reason = Reason.RETRY_FAILED if trouble else Reason.NOT_RETRIED
    evidence = f"{verdict.evidence}; measured again: {trouble}" if trouble else verdict.evidence
    return replace(verdict, reasons=(*verdict.reasons, reason), evidence=evidence)


def _weighed(first: Verdict, second: Verdict, how: str, instead: tuple[str, ...]) -> Verdict:
    """One verdict on two values of the same metric at the same place."""
    match first.outcome, second.outcome:
        case Outcome.FAIL, Outcome.FAIL:
            return _both(first, second, _FAIL, Reason.REPRODUCED, how)
        case Outcome.FAIL, better if better in _LIFTED:
            return _both(first, second, _LIFTED[better], Reason.NOT_REPRODUCED, how, instead=instead)
        case Outcome.FAIL, _:
            return _not_repeated(first, second.message)
        case Outcome.PASS | Outcome.WARN, Outcome.FAIL:
            return _both(first, second, Outcome.WARN, Reason.FAILED_IN_RETRY_ONLY, how)
    return first


def _both(
    first: Verdict,
    second: Verdict,
    outcome: Outcome,
    reason: Reason,
    how: str,
    subject: str = "",
    instead: tuple[str, ...] = (),
) -> Verdict:
    """The verdict that fell short, with the values of both measurements."""
    assert first.value is not None
    assert second.value is not None
    leading = second if reason is Reason.FAILED_IN_RETRY_ONLY else first
    accounts = [one.evidence or one.summary for one in (first, second)]  # a good one has no evidence
    return replace(
        leading,
        outcome=outcome,
        reasons=(*leading.reasons, reason),
        evidence=f"{accounts[0]}; {how}: {accounts[1]}",
        retry=Retry(first.value, second.value, subject, instead),
    )
