"""A verdict and its basis."""

from dataclasses import dataclass
from typing import Annotated, TypeVar, dataclass_transform

from pydantic import ConfigDict, Field

from seatrial.model import verdict_text
from seatrial.model.base import Frozen
from seatrial.model.outcome import BasisKind, Outcome, Reason

_T = TypeVar("_T")


@dataclass_transform(frozen_default=True)
def _record(cls: type[_T]) -> type[_T]:
    """A dataclass that only mypy treats as frozen: a check at run time would double the construction time."""
    return dataclass(slots=True, unsafe_hash=True)(cls)


@_record
class Basis:
    """The threshold or reference value of a verdict; verdicts with the same basis share one object.

    ``name``: name of the trial, site, SKU or peer group. With ``op``, the value must meet ``op expected``. Without
    ``op``, the value fails below the share ``fail_below`` of ``expected`` and warns below the share ``warn_below``. For
    OWN_MEDIAN, samples below the share ``fail_below`` are slow, see judge/samples.py. ``asymmetry_limit``: warn below
    this share of the opposite direction. ``lax_reason``: why the threshold is lax, or empty. ``exceeds``: the reference
    value that the threshold exceeds, or empty. ``arithmetic``: how the bound of the network was computed.
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
    arithmetic: str = ""

    def __str__(self) -> str:
        return verdict_text.basis_text(self)


@_record
class Retry:
    """The values of the first measurement and of its retries, in the unit of the verdict.

    ``retry_subject``: the subject of ``retry_value``, if it differs from the subject of ``first_value``.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    first_value: float
    retry_value: float
    retry_subject: str = ""
    third_value: float | None = None


class VerdictKey(Frozen):
    """The check, subject and metric of verdicts; ``metric`` is empty for verdicts on the whole check."""

    check: str
    subject: str
    metric: str = ""


@_record
class Verdict:
    """The result of one rule for one metric of one subject, or for the whole check (``metric`` is empty).

    ``ratio``: value divided by the expected value of ``basis``; if ``basis`` is a threshold, divided by the reference
    value that ``detail`` names. ``detail``: text that has no field of its own, such as an error message or the missing
    subjects. ``meaning``: what a bad value means. ``interval``: confidence interval or sample range that contains the
    threshold. ``opposite_value``: value of the opposite direction. ``evidence``: empty for good values.
    ``other_limits``: what else the value was compared with, beside ``basis``, which decided.

    A trial on a thousand nodes has half a million verdicts; a pydantic model would need four times the memory.
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
    # not written if there is none, since most verdicts have one limit
    other_limits: Annotated[tuple[Basis, ...], Field(exclude_if=lambda limits: not limits)] = ()

    @property
    def key(self) -> VerdictKey:
        """What the verdict is on."""
        return VerdictKey(check=self.check, subject=self.subject, metric=self.metric)

    @property
    def summary(self) -> str:
        """Text for display: the measured and the expected value."""
        return verdict_text.summary(self)

    @property
    def message(self) -> str:
        """Text for display: the summary and the meaning of a bad value."""
        return f"{self.summary}: {self.meaning}" if self.meaning else self.summary

    @property
    def basis_text(self) -> str:
        """Text for display: the basis."""
        return str(self.basis or "")
