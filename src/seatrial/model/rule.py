"""Thresholds, rules of checks, and reference values."""

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

_THRESHOLD = re.compile(r"\s*(>=|<=|==|>|<)\s*(-?\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(.*?)\s*")
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}


class Threshold(Frozen):
    """A comparison operator, a number and a unit, such as ``"> 350 GB/s"``."""

    op: Literal[">=", ">", "<=", "<", "=="]
    value: FiniteFloat
    unit: str = ""

    @classmethod
    def parse(cls, text: object) -> "Threshold":
        """The threshold in ``"> 350 GB/s"``, ``">= 1GiB"`` or ``"== 0"``. Raises ValueError for other text."""
        match = _THRESHOLD.fullmatch(str(text))
        if not match:
            raise ValueError(f"{text!r} is not a threshold: expected a comparison and a number, such as '> 350 GB/s'")
        op, number, unit = match.groups()
        if unit in BINARY_UNITS:
            return cls(op=op, value=parse_bytes(f"{number}{unit}"), unit="B")
        return cls(op=op, value=float(number), unit=unit)

    def is_met_by(self, value: float) -> bool:
        compare: Callable[[float, float], bool] = _COMPARE[self.op]
        return compare(value, self.value)

    def excludes(self, other: "Threshold") -> bool:
        """Whether the thresholds contradict each other: no value meets both."""
        if self.op == "==" or other.op == "==":
            exact, limit = (self, other) if self.op == "==" else (other, self)
            return not limit.is_met_by(exact.value)
        if self.op[0] == other.op[0]:  # two lower or two upper bounds
            return False
        lower, upper = (self, other) if self.op[0] == ">" else (other, self)
        return not (upper.is_met_by(lower.value) and lower.is_met_by(upper.value))

    def __str__(self) -> str:
        """The exact text, which ``parse`` reads back as an equal threshold."""
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{self.op} {number} {self.unit}".strip()


ParsedThreshold = Annotated[
    Threshold,
    BeforeValidator(lambda value: value if isinstance(value, Threshold | dict) else Threshold.parse(value)),
    PlainSerializer(str, return_type=str),
]


class Rule(Frozen):
    """How one metric of a check is evaluated: against a threshold, a reference value, or the peer group."""

    metric: str
    # The threshold that the value must meet, and the outcome if it does not. WARN: the node works, but the value is not
    # advisable. ERROR: the value shows that something could not be measured
    expect: ParsedThreshold | None = None
    outcome_if_violated: Literal[Outcome.FAIL, Outcome.WARN, Outcome.ERROR] = Outcome.FAIL
    # Without ``expect``: key of the reference value in SKU data and baselines, and the shares of it below which the
    # metric fails and warns
    reference: str | None = None
    fail_below: float = 0.90
    warn_below: float = 0.95
    reference_optional: bool = False  # without a reference value the metric is only recorded (SKIP)
    share_of_peak: float | None = None  # for training: FAIL below this share of the speed at the GPU's peak FLOP/s
    compare_with_peers: bool = False  # only compare with the peer group: WARN for low outliers below ``warn_below``
    # FAIL below this share of the median of the GPUs of the same model on the node, or on all nodes
    peer_fail_below: float | None = None
    # For a metric that all GPUs of a node measure concurrently: the metric that one GPU at a time measures. FAIL unless
    # the value is above ``single_fail_below`` × the value of ``single_metric`` / the number of GPUs of the node
    single_metric: str | None = None
    single_fail_below: float = 0.0
    asymmetry_limit: float = 0.0  # WARN if one direction of a pair is below this share of the other
    when: dict[str, str] = {}  # fact → value required for the rule to apply, else SKIP
    reference_when: dict[str, str] = {}  # the same for the reference value of a threshold of a trial
    min_nodes: int = 1  # with fewer than min_nodes or more than max_nodes (fact ``nodes``) the rule gives no verdict
    max_nodes: int | None = None
    default_options: tuple[str, ...] = ()  # the rule applies if the trial leaves these options of the check unchanged
    # A negative time, size, count or rate is always a measurement error. If False, any other negative value that meets
    # ``expect`` is one too
    may_be_negative: bool = False
    meaning: str  # what a bad value means
    fix: str

    @property
    def nodes_text(self) -> str:
        """The numbers of nodes that the rule is for; empty for any number."""
        if self.max_nodes is not None:
            return f"{self.min_nodes} to {self.max_nodes} nodes"
        return f"at least {self.min_nodes} nodes" if self.min_nodes > 1 else ""


class ReferenceValue(Frozen):
    """A value that good hardware reaches on a given number of GPUs and nodes, with its source."""

    gpus: int = Field(description="number of GPUs on all nodes")
    nodes: int
    value: FiniteFloat = Field(gt=0)
    unit: str
    source: str = Field(min_length=1)
    gpu: str = Field(default="", description="NVML name of the GPU; empty in SKU files")
    fabric: str = Field(default="", description="class of the network between nodes, such as roce-8x400")
    required: FiniteFloat | None = Field(
        default=None, gt=0, description="fixed minimum; it replaces the rule's fail_below"
    )
    runs: int = Field(default=0, ge=0, description="number of runs it was learned from; 0 in SKU files")


class LearnedRun(Frozen):
    """A run that a baseline was learned from, with fields that identify it after its directory was moved."""

    path: str
    host: str
    started: float
    digest: str = Field(description="SHA-256 of its metric values")

    def is_same_run(self, other: "LearnedRun") -> bool:
        """Whether both are records of one run; one of them may have been copied or edited."""
        return (self.host, self.started) == (other.host, other.started) or self.digest == other.digest


class Baseline(Frozen):
    """Reference values learned from good runs at a site, applied in addition to SKU data.

    With ``override`` they replace SKU data. Earlier versions wrote only the paths of the runs to ``learned_from``.
    """

    name: str
    learned_from: tuple[LearnedRun | str, ...]
    override: bool = False
    expected: dict[str, tuple[ReferenceValue, ...]]

    def includes(self, run: LearnedRun) -> bool:
        """Whether the baseline was, or may be, learned from ``run``: a run recorded only as a path may be any run."""
        return any(isinstance(source, str) or source.is_same_run(run) for source in self.learned_from)
