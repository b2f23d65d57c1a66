"""The nouns of seatrial: frozen records that every other module reads and none mutates.

A subject is a place, written as text: ``node3``, ``node3/gpu5``, ``node3/rank1`` (a process without a GPU),
``node3->node7``, ``cluster``. Times are Unix seconds, durations seconds, sizes bytes (1 KiB = 1024 B),
bandwidths GB/s with 1 GB = 1e9 B, as nccl-tests prints them.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    PlainSerializer,
    SerializerFunctionWrapHandler,
    ValidationError,
    WrapSerializer,
    model_validator,
)
from pydantic.dataclasses import dataclass

from seatrial.model.base import Frozen as Frozen
from seatrial.model.outcome import WORST_FIRST as WORST_FIRST
from seatrial.model.outcome import BasisKind as BasisKind
from seatrial.model.outcome import Outcome as Outcome
from seatrial.model.outcome import Reason as Reason
from seatrial.model.outcome import worst as worst
from seatrial.model.telemetry import Telemetry
from seatrial.model.units import BINARY_UNITS
from seatrial.model.units import ByteSize as ByteSize
from seatrial.model.units import format_bytes as format_bytes
from seatrial.model.units import format_value as format_value
from seatrial.model.units import parse_bytes as parse_bytes
from seatrial.model.verdict import Basis as Basis
from seatrial.model.verdict import Retry as Retry
from seatrial.model.verdict import Verdict as Verdict

CLUSTER = "cluster"
ERROR_COUNTERS = "error_counters"  # a fact: what GPU and RDMA ports counted meanwhile; see discover/window.py
WITHHELD = "withheld"  # a fact: why a metric is not given, by its name
LEFT_OUT = "left_out"  # a fact: why a metric was not asked for, by its name
EXCUSED = "excused"  # a fact: why a place rightly has no metric that every other one has, by the place, or by both
GPUS_USED = "gpus_used"  # a fact: NVML's indices of the GPUs of a node that CUDA may use


class SeatrialError(Exception):
    """An error of the user's input or machine: the message says what was read, where, and what was expected."""


class UsageError(SeatrialError):
    """The command line, a trial file or a promise that the machine cannot keep. Exit code 2."""


class NoRoom(SeatrialError):
    """What was to be kept did not fit on its disk: an error of the machine's user, and no finding."""


def first_fault(error: ValidationError) -> str:
    """Where the first thing is that does not fit a record, and what is wrong with it: ``cluster.nodes: …``."""
    first = error.errors()[0]
    return f"{'.'.join(map(str, first['loc'])) or 'the whole'}: {first['msg']}"


class NotApplicable(Exception):
    """Raised by a check that cannot apply where it runs. The message is the reason shown beside SKIP."""


class Scope(StrEnum):
    """Where a check runs, and how often."""

    CONTROL = "CONTROL"  # once, where seatrial itself runs: a login node, say; no torch needed
    NODE = "NODE"  # once on every node, no torch needed
    GPU = "GPU"  # in every process on its own GPU (or its share of a CPU machine), no communication
    CLUSTER = "CLUSTER"  # in all processes together, in one process group


class Phase(StrEnum):
    """The chapters of a trial, in the order of the report."""

    ENVIRONMENT = "Environment"
    DEVICE = "GPU and host"
    INTERCONNECT = "Interconnect"
    SINGLE_GPU = "Single-GPU training"
    DISTRIBUTED = "Distributed training"


@dataclass(config=ConfigDict(extra="forbid"), frozen=True, slots=True, kw_only=True)
class Metric:
    """One measured number. ``samples`` are the single readings behind ``value``, where there are several.

    A large cluster has a million of them: each as small as a checked record gets.
    """

    name: str
    value: FiniteFloat
    unit: str
    subject: str
    samples: tuple[FiniteFloat, ...] = ()


class Fact(Frozen):
    """Something observed that is no number to judge: a version, a transport, an inventory."""

    name: str
    value: JsonValue


class Series(Frozen):
    """A curve to draw: y over x, both of one length, such as busbw over message size."""

    name: str
    subject: str
    x: tuple[FiniteFloat, ...]
    y: tuple[FiniteFloat, ...]
    x_unit: str
    y_unit: str

    @model_validator(mode="after")
    def _of_one_length(self) -> Series:
        if len(self.x) != len(self.y):
            raise ValueError(f"the curve {self.name} has {len(self.x)} values of x and {len(self.y)} of y")
        return self


class Artifact(Frozen):
    """A file that a check left in the run directory (path relative to it)."""

    path: str
    title: str


Observation = Metric | Fact | Series | Artifact


class Measurement(Frozen):
    """What one check brought back from one process. At most one of ``error`` and ``skipped`` is set."""

    check: str
    subject: str
    rank: int | None = None
    metrics: tuple[Metric, ...] = ()
    facts: dict[str, JsonValue] = {}
    series: tuple[Series, ...] = ()
    artifacts: tuple[Artifact, ...] = ()
    error: str | None = None
    skipped: str | None = None
    again: bool = Field(default=False, description="the second of two: measured because the first fell short")
    started: float = 0.0
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the check ran to its end here: nothing is left to run again."""
        return self.error is None


_LIMIT = re.compile(r"\s*(>=|<=|==|>|<)\s*(-?\d[\d_]*(?:\.\d+)?(?:[eE][-+]?\d+)?)\s*(.*?)\s*")
_COMPARE = {">=": operator.ge, ">": operator.gt, "<=": operator.le, "<": operator.lt, "==": operator.eq}


class Limit(Frozen):
    """A threshold written as in ``"> 350 GB/s"``: comparison, number, unit."""

    op: Literal[">=", ">", "<=", "<", "=="]
    value: FiniteFloat
    unit: str = ""

    @classmethod
    def parse(cls, text: object) -> Limit:
        """Read ``"> 350 GB/s"``, ``">= 1GiB"`` or ``"== 0"``. Raises ValueError on anything else."""
        match = _LIMIT.fullmatch(str(text))
        if not match:
            raise ValueError(f"{text!r} is not a threshold: expected a comparison and a number, such as '> 350 GB/s'")
        op, number, unit = match.groups()
        if unit in BINARY_UNITS:
            return cls(op=op, value=parse_bytes(f"{number}{unit}"), unit="B")
        return cls(op=op, value=float(number), unit=unit)

    def holds(self, value: float) -> bool:
        compare: Callable[[float, float], bool] = _COMPARE[self.op]
        return compare(value, self.value)

    def __str__(self) -> str:
        """Exact, so that it reads back as the same limit."""
        number = int(self.value) if self.value == int(self.value) else self.value
        return f"{self.op} {number} {self.unit}".strip()


ParsedLimit = Annotated[
    Limit,
    BeforeValidator(lambda value: value if isinstance(value, Limit | dict) else Limit.parse(value)),
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
    expect: ParsedLimit | None = None
    baseline: str | None = None
    fail_below: float = 0.90
    warn_below: float = 0.95
    breach: Literal[Outcome.FAIL, Outcome.WARN, Outcome.ERROR] = Outcome.FAIL
    where: dict[str, str] = {}
    like: dict[str, str] = {}
    signed: bool = False
    shows: tuple[str, ...] = ()
    siblings: bool = False
    mirrored: float = 0.0
    own: ParsedLimit | None = None
    if_known: bool = False
    why: str
    fix: str


class Expected(Frozen):
    """A value that good hardware reaches, for one shape of cluster, and where the number comes from."""

    gpus: int = Field(description="in the whole measurement, over all nodes")
    nodes: int
    value: FiniteFloat = Field(gt=0)
    unit: str
    source: str = Field(min_length=1)
    gpu: str = Field(default="", description="NVML's name of it, where no SKU file around it says that")
    fabric: str = Field(default="", description="class of the network between nodes, such as roce-8x400")
    floor: FiniteFloat | None = Field(
        default=None, gt=0, description="a gate in use: under it fails, whatever the rule"
    )


class Baseline(Frozen):
    """What a site's own good runs reached, learned from them. It outranks what is published of the hardware."""

    name: str
    learned_from: tuple[str, ...]
    expected: dict[str, tuple[Expected, ...]]


class Finding(Frozen):
    """A diagnosis: what is wrong, where, how sure we are, why we say so, and what to do first."""

    what: str
    where: str
    confidence: Literal["high", "medium", "low"]
    why: str
    first_command: str = ""
    fix: str = ""
    source: str = ""


class Insight(Frozen):
    """What the figures of a check say beyond its verdicts: a fitted line, the link that binds, what a gate can see."""

    check: str
    title: str
    text: str
    values: dict[str, JsonValue] = {}


class Job(Frozen):
    """One process start that runs several checks. It is all that a worker on a node gets to know."""

    name: str
    placement: Literal["control", "nodes", "ranks"]
    device: Literal["cuda", "cpu"]
    nodes: int
    ranks_per_node: int
    checks: tuple[str, ...]
    options: dict[str, dict[str, JsonValue]]
    promised_gpus: int | None
    promised_nodes: int = 1
    nodelist: str = Field(default="", description="the nodes of the jobs before it, as the scheduler names them")
    limits: dict[str, float] = Field(default={}, description="seconds for each check; after these it is given up")
    limit_s: float
    env: dict[str, str] = {}
    again: bool = Field(default=False, description="measures a second time what fell short the first time")
    telemetry_hz: float = Field(default=0, description="samples a second beside it, on each node; 0: none")

    @property
    def places(self) -> int:
        """Processes, over all nodes: each brings a measurement of every check."""
        return self.nodes * self.ranks_per_node


class JobState(StrEnum):
    """How a job ended."""

    COMPLETED = "COMPLETED"
    FAILED = "FAILED"  # a process exited with an error or was killed
    HUNG = "HUNG"  # a process went silent
    TIMEOUT = "TIMEOUT"  # alive, yet over the limit
    CANCELLED = "CANCELLED"


class JobResult(Frozen):
    """What became of one attempt at a job. ``culprit`` is the rank or node at fault, ``cause`` why."""

    job: str
    attempt: int
    launcher: str
    state: JobState
    started: float
    seconds: float
    startup_s: float
    culprit: str = ""
    cause: str = ""
    scheduler_id: str = Field(default="", description="its number in the scheduler's queue")
    nodes: str = Field(default="", description="where it ran, as the scheduler writes it: n[1-4]")


class Verb(StrEnum):
    """What a trial decides."""

    ACCEPTED = "ACCEPTED"
    REJECTED = "REJECTED"
    INCOMPLETE = "INCOMPLETE"


class Decision(Frozen):
    """The one answer, and in a sentence why; ``scope`` says in words which nodes and GPUs it is about."""

    value: Verb
    reason: str
    scope: str = ""
    cpu_only: bool = Field(default=False, description="no GPU was used: it says nothing about GPUs or a fabric")
    recorded_only: dict[str, tuple[str, ...]] = Field(
        default={}, description="by check, the metrics of performance that no rule and no threshold judged"
    )


class Timing(Frozen):
    """Seconds that one part of the trial took: a check, or what seatrial itself needed."""

    name: str
    kind: Literal["check", "overhead"]
    seconds: float


class Machine(Frozen):
    """Whose figures a trial's measurements are, so that a resumed trial never mixes those of two machines."""

    host: str = Field(description="the name of this host; empty where a scheduler chooses the nodes")
    gpus: tuple[str, ...] = Field(description="UUIDs of the GPUs that may be used")
    system: tuple[str, ...] = Field(default=(), description="versions of what was measured with: kernel, driver, torch")


class Session(Frozen):
    """One stretch of a trial: from the start of the command to its end. A resumed trial has several."""

    started: float
    seconds: float
    command: tuple[str, ...]
    stopped: str = Field(default="", description="what ended it before its time")
    overhead: tuple[Timing, ...] = ()


def _without_empty_fields(verdicts: tuple[Verdict, ...], dump: SerializerFunctionWrapHandler) -> list[dict[str, Any]]:
    """Verdicts as they are written: most fields of most verdicts are empty."""
    return [_filled(one) for one in dump(verdicts)]


def _filled(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _filled(value) if isinstance(value, dict) else value
        for name, value in record.items()
        if name in ("check", "subject") or (value is not None and value not in ("", (), []))
    }


class Trial(Frozen):
    """The whole record, the source of truth of a run: trial.json."""

    schema_version: Literal["2"] = "2"
    seatrial: str
    name: str
    command: tuple[str, ...]
    host: str
    started: float
    seconds: float
    config: dict[str, Any]
    origins: dict[str, str]
    environment: dict[str, JsonValue]
    jobs: tuple[Job, ...]
    left_out: dict[str, str] = Field(default={}, description="checks of the trial that --only or --skip left out")
    stopped: str = Field(default="", description="what ended the trial before its time")
    baseline: Baseline | None = Field(default=None, description="of the site, as it was when this was judged")
    trouble: str = Field(default="", description="why GPUs that should be there could not be used")
    sessions: tuple[Session, ...] = ()
    results: tuple[JobResult, ...]
    measurements: tuple[Measurement, ...]
    repeats: tuple[Measurement, ...] = Field(default=(), description="second measurements, of what fell short at first")
    verdicts: Annotated[tuple[Verdict, ...], WrapSerializer(_without_empty_fields)]
    findings: tuple[Finding, ...]
    insights: tuple[Insight, ...] = ()
    timings: tuple[Timing, ...]
    decision: Decision
    telemetry: Telemetry | None = Field(default=None, description="what was sampled beside the jobs")
