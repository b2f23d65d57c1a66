"""The metrics, facts, series and artifacts that a check returns."""

from enum import StrEnum
from operator import not_

from pydantic import (
    ConfigDict,
    Field,
    JsonValue,
    model_validator,
)
from pydantic.dataclasses import dataclass

from seatrial.model.base import Count, Frozen, Number, RetryNumber, Seconds

CLUSTER = "cluster"  # subject of values that all nodes have in common
ERROR_COUNTERS = "error_counters"  # fact: error counters of GPUs and RDMA ports, see telemetry/error_counts.py
JOB_FAILURES = "job_failures"  # fact: known causes why pods that the check creates do not start, as JobFailure
FAILED_RANK = "failed_rank"  # fact: the rank of a program that failed first, and its node
GPUS_USED = "gpus_used"  # fact: NVML indices of the GPUs that CUDA may use on a node
PORTS_USED = "ports_used"  # fact of a CLUSTER check: node → names of the RDMA ports that the check measures


def node_of(subject: str) -> str:
    """The node of a subject such as ``n0/gpu1``."""
    return subject.partition("/")[0]


def ends(subject: str) -> tuple[str, ...]:
    """Both ends of a pair: ``n/gpu0->gpu1`` gives n/gpu0 and n/gpu1; a subject that is no pair gives itself."""
    first, arrow, second = subject.partition("->")
    if not arrow:
        return (subject,)
    node, slash, _ = first.partition("/")
    return first, second if "/" in second or not slash else f"{node}/{second}"


class Scope(StrEnum):
    """The hosts and the number of processes on which a check runs."""

    CONTROL = "CONTROL"  # once, on the host that runs seatrial, such as a login node; without torch
    NODE = "NODE"  # once on every node; without torch
    GPU = "GPU"  # in one process per GPU (without GPUs: in each CPU process), without communication
    CLUSTER = "CLUSTER"  # in all processes, in one process group


class Phase(StrEnum):
    """The sections of a trial, in the order of the report."""

    ENVIRONMENT = "Environment"
    DEVICE = "GPU and host"
    INTERCONNECT = "Interconnect"
    SINGLE_GPU = "Single-GPU training"
    DISTRIBUTED = "Distributed training"


@dataclass(config=ConfigDict(extra="forbid", defer_build=True), frozen=True, slots=True, kw_only=True)
class Metric:
    """One measured value; ``samples`` holds the individual readings if there are several.

    A value with samples, and the samples, have seven significant digits. A large cluster has a million metrics, hence
    ``slots``; fields without content are not written. ``unit`` and ``subject`` are empty only in files: see
    ``Trial.as_stored``.
    """

    name: str
    value: Number
    unit: str = Field(default="", exclude_if=not_)
    subject: str = Field(default="", exclude_if=not_)
    samples: tuple[Number, ...] = Field(default=(), exclude_if=not_)
    evidence: JsonValue = Field(
        default=None, exclude_if=lambda evidence: evidence is None
    )  # shown if a limit is violated


class Why(StrEnum):
    """Why a metric has no value."""

    DOES_NOT_APPLY = "does not apply"
    NOT_PERMITTED = "not permitted"  # this user may not read it, or what was read is not known
    UNREADABLE = "cannot be read"
    NOT_REQUESTED = "not requested"  # not in the options, or the network is too slow


@dataclass(config=ConfigDict(extra="forbid", defer_build=True), frozen=True, slots=True, kw_only=True)
class Absent:
    """A metric without a value, and the reason. ``instead``: the metric that its rules judge instead."""

    metric: str
    why: Why
    reason: str
    subject: str = ""  # empty: all subjects of the measurement
    instead: str = ""


class Fact(Frozen):
    """An observation that is not a metric: a version, a transport, an inventory."""

    name: str
    value: JsonValue


class Series(Frozen):
    """A curve y(x), such as busbw over message size; ``x`` and ``y`` have the same length."""

    name: str
    subject: str
    x: tuple[Number, ...]
    y: tuple[Number, ...]
    x_unit: str
    y_unit: str

    @model_validator(mode="after")
    def _check_lengths(self) -> "Series":
        if len(self.x) != len(self.y):
            raise ValueError(f"series {self.name} has {len(self.x)} x values and {len(self.y)} y values")
        return self


class Artifact(Frozen):
    """A file that a check wrote; the path is relative to the run directory."""

    path: str
    title: str


Observation = Metric | Absent | Fact | Series | Artifact


class Measurement(Frozen):
    """The result of one check in one process; at most one of ``error`` and ``skipped`` is set.

    Fields without content are not written.
    """

    check: str
    subject: str
    rank: Count | None = None
    gpu_uuid: str = Field(default="", description="UUID of the rank's GPU; empty without a GPU", exclude_if=not_)
    metrics: tuple[Metric, ...] = Field(default=(), exclude_if=not_)
    absent: tuple[Absent, ...] = Field(default=(), exclude_if=not_)
    facts: dict[str, JsonValue] = Field(default={}, exclude_if=not_)
    shares: str = Field(
        default="",
        description="only in files: the key of Trial.shared_facts; empty: the name of the check",
        exclude_if=not_,
    )
    series: tuple[Series, ...] = Field(default=(), exclude_if=not_)
    artifacts: tuple[Artifact, ...] = Field(default=(), exclude_if=not_)
    error: str | None = Field(default=None, exclude_if=not_)
    skipped: str | None = Field(default=None, exclude_if=not_)
    retry: RetryNumber = Field(
        default=0, description="0: first measurement; 1 and 2: retries, made because of a bad value", exclude_if=not_
    )
    started: Seconds = 0.0
    seconds: Seconds = 0.0

    @model_validator(mode="after")
    def _has_no_value_beside_its_absence(self) -> "Measurement":
        absent = {(each.metric, each.subject) for each in self.absent}
        for metric in self.metrics if absent else ():
            if not absent.isdisjoint(((metric.name, metric.subject), (metric.name, ""))):
                raise ValueError(f"{metric.name} of {metric.subject} has a value, and a reason why it has none")
        return self

    @property
    def finished(self) -> bool:
        """Whether the check ended without an error; a resumed trial does not repeat such a check."""
        return self.error is None

    @property
    def has_shared_facts(self) -> bool:
        """Whether facts of this measurement may be in ``Trial.shared_facts``."""
        return not (self.error or self.skipped)
