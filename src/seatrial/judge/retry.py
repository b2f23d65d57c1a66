"""A second measurement beside the first: what differs from run to run fails only when both fall short.

Corruption is another matter: seen once, in either of the two, it has been seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase

from seatrial.checks.base import Check
from seatrial.judge.wording import some
from seatrial.model import WORST_FIRST, Measurement, Outcome, Verdict, format_value
from seatrial.model.verdict import Retry

CHANGED = "retry"  # the fact of a second measurement that says what was different
Key = tuple[str, str]  # metric, subject
# What becomes of a FAIL, by what the second measurement says. By anything else, an ERROR say, it stays what it is.
_LIFTED = {Outcome.PASS: Outcome.WARN, Outcome.WARN: Outcome.WARN, Outcome.UNJUDGED: Outcome.UNJUDGED}


def shortfalls(check: Check, verdicts: Iterable[Verdict]) -> list[Verdict]:
    """Those that fail for want of performance, and that a second measurement may bear out or not."""
    repeatable = _Repeatable(check)
    return [one for one in verdicts if one.outcome is Outcome.FAIL and repeatable[one.metric]]


def whole(own: Sequence[Measurement], repeats: Sequence[Measurement]) -> bool:
    """Whether the second measurement, ``repeats``, was made everywhere where the first was, and nowhere else."""
    same = {one.subject for one in own} == {one.subject for one in repeats}
    return same and not any(one.error or one.skipped for one in repeats)


def weighed(
    check: Check,
    first: Sequence[Verdict],
    own: Sequence[Measurement],
    second: Sequence[Verdict],
    repeats: Sequence[Measurement],
) -> Iterable[Verdict]:
    """The verdicts on both measurements together: ``first`` judges ``own``, ``second`` judges ``repeats``."""
    repeatable = _Repeatable(check)
    if not repeats:
        failed = Outcome.FAIL  # once, for hundreds of thousands: to ask an enum for a member takes as long as a call
        return [_unrepeated(one, "") if one.outcome is failed and repeatable[one.metric] else one for one in first]
    return _together(repeatable, first, own, second, repeats)


def _together(
    repeatable: Mapping[str, bool],
    first: Sequence[Verdict],
    own: Sequence[Measurement],
    second: Sequence[Verdict],
    repeats: Sequence[Measurement],
) -> Iterator[Verdict]:
    speaks, trouble = whole(own, repeats), _trouble(repeats)
    said, before, after = _by_key(second), _values(own), _values(repeats)
    changed = dict.fromkeys(str(one.facts[CHANGED]) for one in repeats if CHANGED in one.facts)
    how = f" ({'; '.join(changed)})" if changed else ""
    short, ranks = _Short(first, second), _by_rank(own, repeats)
    for one in first:
        key = one.metric, one.subject
        if not repeatable[one.metric]:
            yield one
        elif speaks and key in said and key in before and key in after:
            if mirrored := short.with_its_rank(key, ranks):
                figures = f"{before[key]} here, then {after[mirrored]} at {mirrored[1]}"
                yield _of_the_rank(one, figures, f"{how}: {_account(said[mirrored])}")
                continue
            yield _both(one, said[key], f"{before[key]}, then {after[key]}{short.instead(key)}", how)
        else:
            yield _unrepeated(one, trouble)
    for one in second:  # of what no repetition excuses
        new = one.outcome is Outcome.FAIL and (one.metric, one.subject) not in short.first
        if new and not repeatable[one.metric]:
            yield replace(one, reason=_with(one, "seen when it was measured a second time"))


class _Repeatable(dict[str, bool]):
    """Whether a metric of ``check`` is a figure of performance: one with a baseline, or declared as one.

    Thousands of subjects ask of the same few metrics.
    """

    def __init__(self, check: Check) -> None:
        super().__init__((rule.metric, True) for rule in check.rules if rule.baseline)
        self._families = check.performance

    def __missing__(self, metric: str) -> bool:
        self[metric] = any(fnmatchcase(metric, family) for family in self._families)
        return self[metric]


class _Short:
    """What fell short each time, and where it went if it was elsewhere the second time."""

    def __init__(self, first: Iterable[Verdict], second: Iterable[Verdict]) -> None:
        self.first, self._second = (
            {(one.metric, one.subject) for one in every if one.outcome is Outcome.FAIL} for every in (first, second)
        )

    def with_its_rank(self, key: Key, ranks: Mapping[str, str]) -> Key | None:
        """Where the rank that fell short at ``key`` fell short the second time, on another device."""
        there = key[0], ranks.get(key[1], "")
        moved = key in self.first and key not in self._second and there in self._second
        return there if moved else None

    def instead(self, key: Key) -> str:
        """In words, who fell short in place of ``key`` the second time."""
        if key not in self.first or key in self._second:
            return ""
        others = sorted(subject for metric, subject in self._second - self.first if metric == key[0])
        return f"; instead {some(others, 4)} fell short" if others else ""


def _by_rank(own: Iterable[Measurement], repeats: Iterable[Measurement]) -> dict[str, str]:
    """Place → where its rank was the second time; the ranks go through a node's GPUs the other way round then."""
    second = {one.rank: one.subject for one in repeats}
    return {one.subject: second[one.rank] for one in own if one.rank is not None and one.rank in second}


def _of_the_rank(first: Verdict, figures: str, evidence: str) -> Verdict:
    """A fault that went with the rank to another device is the host's: its cores, its memory, its settings."""
    words = f"reproduced by the same rank ({figures}): it goes with the rank, not with the device"
    return replace(
        first, reason=_with(first, words), evidence=f"{first.evidence}; measured again{evidence}", retry="same_rank"
    )


def _both(first: Verdict, second: Verdict, figures: str, how: str) -> Verdict:
    """One verdict on two figures of the same metric at the same place."""
    leading = first
    retry: Retry = "not_reproduced"
    match first.outcome, second.outcome:
        case Outcome.FAIL, Outcome.FAIL:
            outcome, words, retry = Outcome.FAIL, f"reproduced ({figures})", "reproduced"
        case Outcome.FAIL, better if better in _LIFTED:
            outcome, words = _LIFTED[better], f"not reproduced ({figures}), worth looking at"
        case Outcome.FAIL, _:
            return _unrepeated(first, second.reason)
        case Outcome.PASS | Outcome.WARN, Outcome.FAIL:
            outcome, words, leading = Outcome.WARN, f"the second time only ({figures}), worth looking at", second
        case _:
            return first
    evidence = f"{_account(first)}; measured again{how}: {_account(second)}"
    return replace(leading, outcome=outcome, reason=_with(leading, words), evidence=evidence, retry=retry)


def _account(verdict: Verdict) -> str:
    """One of two that stand beside each other: a good one has no evidence."""
    return verdict.evidence or verdict.reason


def _unrepeated(verdict: Verdict, trouble: str) -> Verdict:
    """A FAIL by one measurement alone stays one."""
    if verdict.outcome is not Outcome.FAIL:
        return verdict
    words = "not repeated" + (", though it was tried" if trouble else "")
    evidence = f"{verdict.evidence}; measured again: {trouble}" if trouble else verdict.evidence
    return replace(verdict, reason=_with(verdict, words), evidence=evidence, retry="not_repeated")


def _trouble(repeats: Sequence[Measurement]) -> str:
    """What a second measurement that does not speak of all places says instead; empty where there is none."""
    told = (f"{one.subject}: {one.error or one.skipped}" for one in repeats if one.error or one.skipped)
    return next(told, f"only {', '.join(sorted({one.subject for one in repeats}))}" if repeats else "")


def _with(verdict: Verdict, words: str) -> str:
    """The reason with ``words`` behind what it says of the figure, before what that means."""
    figure, colon, meaning = verdict.reason.partition(": ")
    return f"{figure}; {words}{colon}{meaning}"


def _by_key(verdicts: Iterable[Verdict]) -> dict[Key, Verdict]:
    """The worst verdict on each metric of each place."""
    mildest_first = sorted(verdicts, key=lambda one: WORST_FIRST.index(one.outcome), reverse=True)
    return {(one.metric, one.subject): one for one in mildest_first}


def _values(measurements: Iterable[Measurement]) -> dict[Key, str]:
    metrics = (metric for measurement in measurements for metric in measurement.metrics)
    return {(metric.name, metric.subject): format_value(metric.value, metric.unit) for metric in metrics}
