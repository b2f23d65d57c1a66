"""A verdict: of all records the one that a large cluster has most of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar, dataclass_transform

from pydantic import ConfigDict

from seatrial.model import verdict_text
from seatrial.model.outcome import BasisKind, Outcome, Reason

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def _record(cls: type[_T]) -> type[_T]:
    """A dataclass that mypy holds to be frozen: the guard itself, asked for each field, would take twice the time."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_record
class Basis:
    """What a value is judged by; one object for all verdicts of a kind.

    ``name``: of the trial, site, SKU, group of peers, or source. With ``op`` a value must hold ``op expected``; without
    it the value fails under the share ``fail_below`` of ``expected`` and warns under ``warn_below``. ``asymmetry``: it
    warns under this share of the opposite direction. ``lax``: why the threshold tests hardly anything; ``beyond``: the
    known good value that the threshold exceeds. Both are empty for other thresholds.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    kind: BasisKind
    name: str = ""
    expected: float | None = None
    unit: str = ""
    op: str = ""
    source: str = ""
    fail_below: float | None = None
    warn_below: float | None = None
    asymmetry_limit: float | None = None
    lax_reason: str = ""
    exceeds: str = ""

    def __str__(self) -> str:
        return verdict_text.basis_text(self)


@_record
class Retry:
    """The value of the first measurement and of the second, in the unit of the verdict.

    ``subject``: where the same rank was the second time, if on another device. ``instead``: subjects that failed only
    the second time.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    first_value: float
    retry_value: float
    retry_subject: str = ""
    failed_only_in_retry: tuple[str, ...] = ()


@_record
class Verdict:
    """The judgement of one rule on one metric of one subject (or of the check as a whole: ``metric`` empty).

    ``share`` is the value as a share of what ``basis`` expects. ``detail`` holds what no field can: an error message,
    the places that are missing. ``why``: what a bad value means. ``interval``: of the value, where the threshold is in
    it. ``opposite``: the value of the opposite direction of a pair. ``evidence`` is empty of what is good.

    There are half a million of a thousand nodes: as a record like our others each would take four times the memory.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    check: str
    subject: str
    outcome: Outcome
    metric: str = ""
    reasons: tuple[Reason, ...] = ()
    detail: str = ""
    value: float | None = None
    unit: str = ""
    basis: Basis | None = None
    ratio: float | None = None
    meaning: str = ""
    evidence: str = ""
    fix: str = ""
    interval: tuple[float, float] | None = None
    opposite_value: float | None = None
    retry: Retry | None = None

    @property
    def summary(self) -> str:
        """What was measured and what is expected, as text to show. No code reads it."""
        return verdict_text.summary(self)

    @property
    def message(self) -> str:
        """The statement, and what it means, as text to show. No code reads it."""
        return f"{self.summary}: {self.meaning}" if self.meaning else self.summary

    @property
    def basis_text(self) -> str:
        """The basis as text to show. No code reads it."""
        return str(self.basis or "")
