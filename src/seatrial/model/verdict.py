"""A verdict and its outcome: of all records the one that a large cluster has most of."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal, TypeVar, dataclass_transform

from pydantic import ConfigDict


class Outcome(StrEnum):
    """What one verdict says. The six are never merged: "measured bad" is not "could not be measured"."""

    PASS = "PASS"
    WARN = "WARN"
    FAIL = "FAIL"
    SKIP = "SKIP"  # does not apply here; the reason says why
    UNJUDGED = "UNJUDGED"  # measured, and nothing known to judge it by
    ERROR = "ERROR"  # could not be measured


# What a second measurement said of a figure that fell short in one of two; "same_rank": the same rank fell short again,
# on another device
Retry = Literal["", "reproduced", "same_rank", "not_reproduced", "not_repeated"]

# Worst first: the order in which a report and a summary of several verdicts care.
WORST_FIRST = (Outcome.FAIL, Outcome.ERROR, Outcome.UNJUDGED, Outcome.WARN, Outcome.PASS, Outcome.SKIP)


def worst(outcomes: Iterable[Outcome]) -> Outcome:
    """The outcome that a summary shows. No outcome at all is UNJUDGED: nothing was said."""
    return min(outcomes, key=WORST_FIRST.index, default=Outcome.UNJUDGED)


_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def _record(cls: type[_T]) -> type[_T]:
    """A dataclass that mypy holds to be frozen: the guard itself, asked for each field, would take twice the time."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_record
class Verdict:
    """The judgement of one rule on one metric of one subject (or of the check as a whole: ``metric`` empty).

    ``evidence`` stands beside what somebody has to look into, and is empty of what is good.

    There are half a million of a thousand nodes: as a record like our others each would take four times the memory.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    check: str
    subject: str
    outcome: Outcome
    reason: str
    metric: str = ""
    evidence: str = ""
    fix: str = ""
    judged_by: str = ""
    retry: Retry = ""
