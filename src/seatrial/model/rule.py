"""Thresholds, rules of checks, and reference values."""

import difflib
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


Severity = Literal[Outcome.FAIL, Outcome.WARN, Outcome.ERROR]
BASES = ("reference", "peers", "bound", "gemm", "all_reduce", "opposite")
REFERENCE, PEERS, BOUND, GEMM, ALL_REDUCE, OPPOSITE = BASES
# Ends of a base: another metric of the same GPU, divided by the GPUs of the node or as it is
_PER_GPU, _SAME_GPU = " / gpus", " of the GPU"
_SHARE = re.compile(rf"(>=|>) (\d+(?:\.\d+)?) ({'|'.join(BASES)}|\S+(?:{_PER_GPU}|{_SAME_GPU}))")
STEP_TIME = "step_time_without_communication"  # of a training whose efficiency is compared with an all-reduce
_NODES = re.compile(r"nodes (>=|<) (\d+)")
_FACT = re.compile(r"(\w+) == (.+)")
_DEFAULT = re.compile(r"(\w+) is the default")


class Limit(Threshold):
    """``value OP share × base``: a good value meets it.

    ``base``: empty (``value`` is a number in ``unit``), one of BASES, or another metric: ``h2d_single / gpus`` or
    ``d2h_single of the GPU``.
    ``outcome``: of a violation. WARN: the node works, but the value is not advisable. ERROR: the value shows that
    something could not be measured.
    """

    base: str = ""
    outcome: Severity = Outcome.FAIL

    @classmethod
    def of(cls, text: str, outcome: Severity) -> "Limit":
        """The limit in ``== 0 errors``, ``yes``, ``no`` or ``>= 0.90 reference``. Raises ValueError for other text."""
        if share := _SHARE.fullmatch(text):
            return cls(op=share[1], value=float(share[2]), base=share[3], outcome=outcome)
        threshold = Threshold.parse({"yes": "== 1 bool", "no": "== 0 bool"}.get(text, text))
        if near := difflib.get_close_matches(threshold.unit.rpartition(" ")[2], BASES, 1, cutoff=0.75):
            raise ValueError(f"{text!r} has no known base: expected a share of one, such as '>= 0.90 {near[0]}'")
        return cls(**dict(threshold), outcome=outcome)

    @property
    def single_metric(self) -> str:
        """The metric in a base such as ``h2d_single / gpus``; else empty."""
        return self.base.removesuffix(_PER_GPU).removesuffix(_SAME_GPU) if " " in self.base else ""

    @property
    def is_per_gpu(self) -> bool:
        """Whether the metric in the base is divided by the number of GPUs on the node."""
        return self.base.endswith(_PER_GPU)


class Condition(Frozen):
    """When a rule applies. ``facts``: fact → required value; another value makes the rule SKIP.

    With fewer than ``min_nodes`` or more than ``max_nodes`` (fact ``nodes``) the rule gives no verdict.
    ``default_options``: the options of the check that the trial must leave unchanged, else the rule is SKIP.
    """

    facts: dict[str, str] = {}
    min_nodes: int = 1
    max_nodes: int | None = None
    default_options: tuple[str, ...] = ()

    @classmethod
    def of(cls, text: str) -> "Condition":
        """The condition in ``device == cuda and nodes >= 2 and sizes is the default``. Raises ValueError."""
        facts: dict[str, str] = {}
        nodes: dict[str, int] = {}
        defaults = []
        for part in text.split(" and ") if text else ():
            if match := _NODES.fullmatch(part):
                nodes |= {"min_nodes": int(match[2])} if match[1] == ">=" else {"max_nodes": int(match[2]) - 1}
            elif match := _DEFAULT.fullmatch(part):
                defaults.append(match[1])
            elif (match := _FACT.fullmatch(part)) and match[1] != "nodes":
                facts[match[1]] = match[2]
            else:
                raise ValueError(f"{part!r} is no condition: expected FACT == VALUE or nodes >= NUMBER")
        return cls(facts=facts, **nodes, default_options=tuple(defaults))

    def includes(self, nodes: object) -> bool:
        """Whether the number of nodes is in range; anything else than a number is."""
        return type(nodes) is not int or self.min_nodes <= nodes <= (self.max_nodes or nodes)

    def __str__(self) -> str:
        texts = [f"{name} == {value}" for name, value in self.facts.items()]
        texts += [f"nodes >= {self.min_nodes}"] if self.min_nodes > 1 else []
        texts += [f"nodes < {self.max_nodes + 1}"] if self.max_nodes is not None else []
        return " and ".join([*texts, *(f"{name} is the default" for name in self.default_options)])


class Rule(Frozen):
    """The limits that one metric must meet under one condition.

    ``reference``: key of the reference value in SKU data and baselines, empty without one. ``reference_when``: of a
    threshold of a trial: the facts required for the reference value to apply. ``meaning``: what a bad value means.
    """

    metric: str
    limits: tuple[Limit, ...] = ()
    when: Condition = Condition()
    reference: str = ""
    reference_when: dict[str, str] = {}
    meaning: str
    fix: str

    @property
    def threshold(self) -> Limit | None:
        """The limit that is a number, if any."""
        return next((limit for limit in self.limits if not limit.base), None)

    def share(self, base: str, outcome: Outcome = Outcome.FAIL) -> float | None:
        """The share of ``base`` below which the rule has this outcome; None without such a limit."""
        found = (limit.value for limit in self.limits if (limit.base, limit.outcome) == (base, outcome))
        return next(found, None)

    @property
    def single(self) -> Limit | None:
        """The limit relative to another metric of the same GPU, if any."""
        return next((limit for limit in self.limits if limit.single_metric), None)

    @property
    def other_metrics(self) -> set[str]:
        """The metrics of the same check with which this one is compared."""
        of_gpu = {self.single.single_metric} if self.single else set[str]()
        return of_gpu | ({STEP_TIME} if self.share(ALL_REDUCE) else set())

    @property
    def only_warns_by_peers(self) -> bool:
        """Whether the rule compares with peers, and with no reference value."""
        return self.share(PEERS, Outcome.WARN) is not None


class ReferenceValue(Frozen):
    """A value that good hardware reaches on a given number of GPUs and nodes, with its source."""

    gpus: int = Field(description="number of GPUs on all nodes")
    nodes: int
    value: FiniteFloat = Field(gt=0)
    unit: str
    source: str = Field(min_length=1)
    gpu: str = Field(default="", description="NVML name of the GPU; empty in SKU files")
    fabric: str = Field(default="", description="class of the network between nodes, such as roce-8x400")
    algorithm: Literal["", "Ring", "NVLS"] = Field(default="", description="NCCL's algorithm; empty: any")
    required: FiniteFloat | None = Field(default=None, gt=0, description="fixed minimum, one more limit than the share")
    warns_only: bool = Field(
        default=False, description="several nodes, one document: below it WARN; FAIL by the bound of the network"
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

    With ``override`` they replace SKU data.
    """

    name: str
    learned_from: tuple[LearnedRun, ...]
    override: bool = False
    expected: dict[str, tuple[ReferenceValue, ...]]

    def includes(self, run: LearnedRun) -> bool:
        """Whether the baseline was learned from ``run``."""
        return any(source.is_same_run(run) for source in self.learned_from)
