"""A process start, how it ended, and on which machine."""

from __future__ import annotations

from enum import StrEnum
from typing import Literal

from pydantic import (
    Field,
    JsonValue,
)

from seatrial.model.base import Frozen


class Job(Frozen):
    """One process start that runs several checks. It is all that a worker on a node gets to know."""

    name: str
    placement: Literal["control", "nodes", "ranks"]
    device: Literal["cuda", "cpu"]
    nodes: int
    ranks_per_node: int
    checks: tuple[str, ...]
    options: dict[str, dict[str, JsonValue]]
    expected_gpus: int | None
    expected_nodes: int = 1
    nodelist: str = Field(default="", description="the nodes of the jobs before it, as the scheduler names them")
    limits: dict[str, float] = Field(default={}, description="seconds for each check; after these it is given up")
    limit_s: float
    env: dict[str, str] = {}
    retry: bool = Field(default=False, description="measures a second time what fell short the first time")
    telemetry_hz: float = Field(default=0, description="samples a second beside it, on each node; 0: none")

    @property
    def process_count(self) -> int:
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
    failed_subject: str = ""
    cause: str = ""
    scheduler_id: str = Field(default="", description="its number in the scheduler's queue")
    nodelist: str = Field(default="", description="where it ran, as the scheduler writes it: n[1-4]")


class Machine(Frozen):
    """Whose figures a trial's measurements are, so that a resumed trial never mixes those of two machines."""

    host: str = Field(description="the name of this host; empty where a scheduler chooses the nodes")
    gpus: tuple[str, ...] = Field(description="UUIDs of the GPUs that may be used")
    versions: tuple[str, ...] = Field(
        default=(), description="versions of what was measured with: kernel, driver, torch"
    )
