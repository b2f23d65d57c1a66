"""Thresholds, the rules of checks, and the reference values that rules compare with."""

from __future__ import annotations

import operator
import re
from collections.abc import Callable
from typing import Annotated, Literal

from pydantic import (
    BeforeValidator,
    Field,
    FiniteFloat,
    PlainSerializer,
)

from seatrial.model.base import Frozen
from seatrial.model.outcome import Outcome
from seatrial.model.units import BINARY_UNITS, parse_bytes

_LIMIT = re.compile(r"\s*(>=|<=|==|>|<)\s*(-?\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(.*?)\s*")
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}


class Threshold(Frozen):
    """A threshold written as in ``"> 350 GB/s"``: comparison, number, unit."""

    op: Literal[">=", ">", "<=", "<", "=="]
    value: FiniteFloat
    unit: str = ""

    @classmethod
    def parse(cls, text: object) -> Threshold:
        """Read ``"> 350 GB/s"``, ``">= 1GiB"`` or ``"== 0"``. Raises ValueError on anything else."""
        match = _LIMIT.fullmatch(str(text))
        if not match:
            raise ValueError(f"{text!r} is not a threshold: expected a comparison and a number, such as '> 350 GB/s'")
        op, number, unit = match.groups()
        if unit in BINARY_UNITS:
            return cls(op=op, value=parse_bytes(f"{number}{unit}"), unit="B")
        return cls(op=op, value=float(number), unit=unit)

    def is_met_by(self, value: float) -> bool:
        compare: Callable[[float, float], bool] = _COMPARE[self.op]
        return compare(value, self.value)

    def __str__(self) -> str:
        """Exact, so that it reads back as the same limit."""
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{self.op} {number} {self.unit}".strip()


ParsedThreshold = Annotated[
    Threshold,
    BeforeValidator(lambda value: value if isinstance(value, Threshold | dict) else Threshold.parse(value)),
    PlainSerializer(str, return_type=str),
]


class Rule(Frozen):
    """How one metric of a check is judged: against ``expect``, or against ``baseline``, a key of the SKU data.

    A baseline holds an expected value; under ``fail_below`` of it the metric fails, under ``warn_below`` it warns.
    ``where`` names facts that must hold for the rule to apply; where they do not, the verdict is SKIP.
    ``breach``, what a broken ``expect`` means: FAIL, WARN of what is unwise but works, ERROR of what was not measured.
    ``like`` names facts under which ``baseline`` is of the same thing, where ``expect`` judges whatever they are.
    ``signed``: the metric may be below 0. Of any other such a value is an ERROR, not a good one.
    ``shows`` names facts that belong to the evidence of a breach: which rank, which pid, what the driver said.
    ``siblings``: judged by the others of this trial alone; what is under ``warn_below`` of their median, and far from
    them, warns. ``mirrored``: a pair of which one order is under that share of the other warns.
    ``own`` is what the check asks by itself where a trial asks something else. ``if_known``: where nobody knows what
    good hardware reaches, the figure is recorded and not judged, by its siblings neither, and it is said so.
    """

    metric: str
    expect: ParsedThreshold | None = None
    reference: str | None = None
    fail_below: float = 0.90
    warn_below: float = 0.95
    outcome_if_violated: Literal[Outcome.FAIL, Outcome.WARN, Outcome.ERROR] = Outcome.FAIL
    applies_if: dict[str, str] = {}
    reference_if: dict[str, str] = {}
    may_be_negative: bool = False
    evidence_facts: tuple[str, ...] = ()
    compare_with_peers: bool = False
    asymmetry_limit: float = 0.0
    check_threshold: ParsedThreshold | None = None
    reference_optional: bool = False
    meaning: str
    fix: str


class ReferenceValue(Frozen):
    """A value that good hardware reaches, for one shape of cluster, and where the number comes from."""

    gpus: int = Field(description="in the whole measurement, over all nodes")
    nodes: int
    value: FiniteFloat = Field(gt=0)
    unit: str
    source: str = Field(min_length=1)
    gpu: str = Field(default="", description="NVML's name of it, where no SKU file around it says that")
    fabric: str = Field(default="", description="class of the network between nodes, such as roce-8x400")
    required: FiniteFloat | None = Field(
        default=None, gt=0, description="a gate in use: under it fails, whatever the rule"
    )


class Baseline(Frozen):
    """What a site's own good runs reached, learned from them. It outranks what is published of the hardware."""

    name: str
    learned_from: tuple[str, ...]
    expected: dict[str, tuple[ReferenceValue, ...]]
