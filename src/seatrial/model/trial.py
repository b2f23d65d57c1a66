"""The record of a trial, and what is decided on it."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    WrapSerializer,
)

from seatrial.model.base import Frozen
from seatrial.model.job import Job, JobResult
from seatrial.model.measurement import Measurement
from seatrial.model.rule import Baseline
from seatrial.model.telemetry import Telemetry
from seatrial.model.verdict import Verdict


class Finding(Frozen):
    """A diagnosis: what is wrong, where, how sure we are, why we say so, and what to do first."""

    title: str
    subject: str
    confidence: Literal["high", "medium", "low"]
    evidence: str
    first_command: str = ""
    fix: str = ""
    source: str = ""


class Insight(Frozen):
    """What the figures of a check say beyond its verdicts: a fitted line, the link that binds, what a gate can see."""

    check: str
    title: str
    text: str
    values: dict[str, JsonValue] = {}


class DecisionValue(StrEnum):
    """What a trial decides."""

    ACCEPTED = "ACCEPTED"
    REJECTED = "REJECTED"
    INCOMPLETE = "INCOMPLETE"


class Decision(Frozen):
    """The one answer, and in a sentence why; ``scope`` says in words which nodes and GPUs it is about."""

    value: DecisionValue
    reason: str
    tested_hardware: str = ""
    cpu_only: bool = Field(default=False, description="no GPU was used: it says nothing about GPUs or a fabric")
    metrics_without_threshold: dict[str, tuple[str, ...]] = Field(
        default={}, description="by check, the metrics of performance that no rule and no threshold judged"
    )


class Timing(Frozen):
    """Seconds that one part of the trial took: a check, or what seatrial itself needed."""

    name: str
    kind: Literal["check", "overhead"]
    seconds: float


class Session(Frozen):
    """One stretch of a trial: from the start of the command to its end. A resumed trial has several."""

    started: float
    seconds: float
    command: tuple[str, ...]
    stop_reason: str = Field(default="", description="what ended it before its time")
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
    excluded_checks: dict[str, str] = Field(
        default={}, description="checks of the trial that --only or --skip left out"
    )
    stop_reason: str = Field(default="", description="what ended the trial before its time")
    baseline: Baseline | None = Field(default=None, description="of the site, as it was when this was judged")
    gpu_error: str = Field(default="", description="why GPUs that should be there could not be used")
    sessions: tuple[Session, ...] = ()
    results: tuple[JobResult, ...]
    measurements: tuple[Measurement, ...]
    retries: tuple[Measurement, ...] = Field(default=(), description="second measurements, of what fell short at first")
    verdicts: Annotated[tuple[Verdict, ...], WrapSerializer(_without_empty_fields)]
    findings: tuple[Finding, ...]
    insights: tuple[Insight, ...] = ()
    timings: tuple[Timing, ...]
    decision: Decision
    telemetry: Telemetry | None = Field(default=None, description="what was sampled beside the jobs")
