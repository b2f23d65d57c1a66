"""What one check returned: metrics, facts, series and artifacts of one subject."""

from __future__ import annotations

from enum import StrEnum

from pydantic import (
    ConfigDict,
    Field,
    FiniteFloat,
    JsonValue,
    model_validator,
)
from pydantic.dataclasses import dataclass

from seatrial.model.base import Frozen

CLUSTER = "cluster"
ERROR_COUNTERS = "error_counters"  # a fact: what GPU and RDMA ports counted meanwhile; see telemetry/error_counts.py
NOT_REPORTED = "not_reported"  # a fact: why a metric is not given, by its name
NOT_REQUESTED = "not_requested"  # a fact: why a metric was not asked for, by its name
EXEMPT = "exempt"  # a fact: why a place rightly has no metric that every other one has, by the place, or by both
GPUS_USED = "gpus_used"  # a fact: NVML's indices of the GPUs of a node that CUDA may use


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
    retry: bool = Field(default=False, description="the second of two: measured because the first fell short")
    started: float = 0.0
    seconds: float = 0.0

    @property
    def finished(self) -> bool:
        """Whether the check ran to its end here: nothing is left to run again."""
        return self.error is None
