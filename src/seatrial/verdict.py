"""A verdict and its outcome: of all records the one that a large cluster has most of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from enum import StrEnum

from pydantic import ConfigDict


class Outcome(StrEnum):
    """What one verdict says. The six are never merged: "measured bad" is not "could not be measured"."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"  # does not apply here; the reason says why
    UNJUDGED = "UNJUDGED"  # measured, and nothing known to judge it by
    ERROR = "ERROR"  # could not be measured


# Worst first: the order in which a report and a summary of several verdicts care.
WORST_FIRST = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN, Outcome.PASS, Outcome.SKIP)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome that a summary shows. No outcome at all is UNJUDGED: nothing was said."""
    return min(outcomes, key=WORST_FIRST.index, default=Outcome.UNJUDGED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """The judgement of one rule on one metric of one subject (or of the check as a whole: ``metric`` empty).

    There are half a million of a thousand nodes: as a record like our others each would take four times the memory.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    check: str
    subject: str
    metric: str = ""
    outcome: Outcome
    reason: str
    evidence: str = ""
    remedy: str = ""
    judged_by: str = ""

    @classmethod
    def made(
        cls,
        check: str,
        subject: str,
        metric: str,
        outcome: Outcome,
        reason: str,
        evidence: str = "",
        remedy: str = "",
        judged_by: str = "",
    ) -> Verdict:
        """The same in a third of the time: past the guard of a frozen record, which each field asks."""
        one: Verdict = object.__new__(cls)
        _check(one, check)
        _subject(one, subject)
        _metric(one, metric)
        _outcome(one, outcome)
        _reason(one, reason)
        _evidence(one, evidence)
        _remedy(one, remedy)
        _judged_by(one, judged_by)
        return one


_check, _subject, _metric, _outcome, _reason, _evidence, _remedy, _judged_by = (
    getattr(Verdict, field.name).__set__ for field in fields(Verdict)
)
