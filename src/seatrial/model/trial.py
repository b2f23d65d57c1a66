"""The record of a trial: configuration, measurements, verdicts, findings and decision."""

from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    JsonValue,
    SerializerFunctionWrapHandler,
    WrapSerializer,
    model_validator,
)

from seatrial.model.base import Duration, Frozen
from seatrial.model.job import Job, JobResult, MissingNode
from seatrial.model.measurement import Measurement
from seatrial.model.outcome import Outcome
from seatrial.model.rule import Baseline
from seatrial.model.telemetry import Telemetry
from seatrial.model.verdict import Verdict
from seatrial.util.secrets import redacted

# Value in Trial.excluded_checks: the typical duration of the check does not fit into --time-limit
TIME_LIMIT = "--time-limit"
# Suffix of a name in Trial.shared_facts: the fact is a list of objects, which have these items in common
OF_EACH_ITEM = "[]"

Confidence = Literal["high", "medium", "low"]
Action = Literal[
    "none",
    "retry-job",
    "fix-config",
    "fix-environment",
    "restart-service",
    "reset-gpu",
    "reboot-node",
    "replace-hardware",
    "check-cable",
    "call-vendor",
]


class VerdictKey(Frozen):
    """The check, subject and metric of verdicts; ``metric`` is empty for verdicts on the whole check."""

    check: str
    subject: str
    metric: str = ""

    @classmethod
    def from_verdict(cls, verdict: Verdict) -> "VerdictKey":
        return cls(check=verdict.check, subject=verdict.subject, metric=verdict.metric)


class Finding(Frozen):
    """A diagnosis: the fault, its location, the confidence, the evidence and the first command to run.

    ``cause``: the kind of cause, for programs; empty for a finding that locates a fault or matches a log line.
    ``signature``: the id of the failure signature that a log line matches; empty if there is none, and in old records.
    ``explains``: the verdicts that follow from the cause, and the verdicts that are its evidence. ``confirmed_by``:
    findings from logs that show the same cause at the same place.
    """

    title: str
    subject: str
    confidence: Confidence
    evidence: str
    first_command: str = ""
    fix: str = ""
    source: str = ""
    cause: str = ""
    signature: str = ""
    explains: tuple[VerdictKey, ...] = ()
    action: Action | None = None
    confirmed_by: tuple["Finding", ...] = ()

    def without_secrets(self, values: Mapping[str, str]) -> "Finding":
        """The finding in which secrets are replaced; ``values``: see util.secrets.redacted."""
        return Finding.model_validate(redacted(self.model_dump(), values))


class Insight(Frozen):
    """A result beyond verdicts: a latency fit, the limiting link, the smallest fault a threshold detects."""

    check: str
    title: str
    text: str
    values: dict[str, JsonValue] = {}


class DecisionValue(StrEnum):
    """The decision values of a trial."""

    ACCEPTED = "ACCEPTED"
    REJECTED = "REJECTED"
    INCOMPLETE = "INCOMPLETE"


class ReasonCode(StrEnum):
    """Why a decision is INCOMPLETE, for programs; ``Decision.reason`` has the text of all reasons."""

    NO_GPU = "no_gpu"  # no GPU was used, and the trial does not set cluster.gpus_per_node to 0


class Decision(Frozen):
    """The decision on a trial and its reason; ``tested_hardware`` describes the nodes and GPUs as text."""

    value: DecisionValue
    reason: str
    reason_code: ReasonCode | None = None
    tested_hardware: str = ""
    cpu_only: bool = Field(default=False, description="no GPU was used, so GPUs and fabric are not tested")
    unknown_gpus: tuple[str, ...] = Field(
        default=(), description="GPU models without SKU data; their verdicts are UNJUDGED"
    )
    metrics_without_threshold: dict[str, tuple[str, ...]] = Field(
        default={}, description="performance metrics that no rule or threshold evaluated, by check"
    )


class Timing(Frozen):
    """The duration of a check, or of overhead of seatrial itself."""

    name: str
    kind: Literal["check", "overhead"]
    seconds: Duration


class Session(Frozen):
    """One run of the command; a resumed trial has several sessions."""

    started: Duration
    seconds: Duration
    command: tuple[str, ...]
    stop_reason: str = Field(default="", description="why the session ended early")
    overhead: tuple[Timing, ...] = ()


def _without_empty_fields(verdicts: tuple[Verdict, ...], dump: SerializerFunctionWrapHandler) -> list[dict[str, Any]]:
    """The verdicts as they are written to trial.json: without empty fields, except ``check`` and ``subject``."""
    return [_drop_empty(verdict) for verdict in dump(verdicts)]


def _drop_empty(record: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: _drop_empty(value) if isinstance(value, dict) else value
        for name, value in record.items()
        if name in ("check", "subject") or (value is not None and value not in ("", (), []))
    }


class Trial(Frozen):
    """The complete record of a trial, written to trial.json.

    ``origins``: dotted key of ``config`` → the file, option or variable that set it. ``environment``: facts of the host
    that ran seatrial, and of the nodes.
    """

    schema_version: Literal["4"] = "4"
    rewritten_from: str = Field(default="", description="schema version and SHA-256 of the original record")
    seatrial: str = Field(description="version of seatrial")
    name: str
    command: tuple[str, ...]
    host: str
    started: Duration
    seconds: Duration
    config: dict[str, Any]
    origins: dict[str, str]
    environment: dict[str, JsonValue]
    jobs: tuple[Job, ...]
    excluded_checks: dict[str, str] = Field(
        default={}, description=f"check → the option that excluded it (--only, --skip or {TIME_LIMIT})"
    )
    stop_reason: str = Field(default="", description="why the trial ended early")
    baseline: Baseline | None = Field(default=None, description="the site baseline used for these verdicts")
    gpu_error: str = Field(default="", description="why the expected GPUs were not usable")
    missing_nodes: tuple[MissingNode, ...] = Field(default=(), description="nodes that jobs could not get, or lost")
    sessions: tuple[Session, ...] = ()
    results: tuple[JobResult, ...]
    measurements: tuple[Measurement, ...]
    shared_facts: dict[str, dict[str, Any]] = Field(
        default={}, description="only in files: facts that all successful measurements of a check have, by check"
    )
    retries: tuple[Measurement, ...] = Field(default=(), description="second and third measurements of checks")
    localization: tuple[Measurement, ...] = Field(
        default=(), description="search for slow nodes after the checks of the trial; of its verdicts only FAILs count"
    )
    verdicts: Annotated[tuple[Verdict, ...], WrapSerializer(_without_empty_fields)]
    findings: tuple[Finding, ...]
    insights: tuple[Insight, ...] = ()
    timings: tuple[Timing, ...]
    decision: Decision
    telemetry: Telemetry | None = Field(default=None, description="samples taken while the jobs ran")
    manifest: dict[str, str] = Field(
        default={}, description="file of the run directory with results → SHA-256, when this record was made"
    )

    def as_stored(self) -> "Trial":
        """The trial as it is written to trial.json: values of facts that many processes report are there once.

        Verdicts with PASS are not there: the judge gives them again.
        """
        by_check: dict[str, list[Measurement]] = {}
        for measurement in self.measurements:
            if measurement.has_shared_facts:
                by_check.setdefault(measurement.check, []).append(measurement)
        shared = {check: _shared(group) for check, group in by_check.items() if len(group) > 1}
        measurements = (
            measurement.model_copy(update={"facts": _own(measurement.facts, shared[measurement.check])})
            if measurement.has_shared_facts and measurement.check in shared
            else measurement
            for measurement in self.measurements
        )
        verdicts = (verdict for verdict in self.verdicts if verdict.outcome is not Outcome.PASS)
        changed = {"measurements": tuple(measurements), "shared_facts": shared, "verdicts": tuple(verdicts)}
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _give_shared_facts_to_all(self) -> "Trial":
        for measurement in self.measurements if self.shared_facts else ():
            if measurement.has_shared_facts:
                for name, value in self.shared_facts.get(measurement.check, {}).items():
                    if name.endswith(OF_EACH_ITEM):
                        if not isinstance(value, dict):
                            raise ValueError(f"shared fact {name} of {measurement.check} is {value!r}, not an object")
                        for item in _objects(measurement.facts.get(name.removesuffix(OF_EACH_ITEM))):
                            item.update(value)
                    else:
                        measurement.facts[name] = value
        self.shared_facts.clear()
        return self


def _shared(group: Sequence[Measurement]) -> dict[str, Any]:
    """Facts that are equal in all measurements; of lists of objects, such as GPUs, the items equal in all objects."""
    shared: dict[str, Any] = _intersection([measurement.facts for measurement in group])
    for name in group[0].facts.keys() - shared.keys():
        objects = [item for measurement in group for item in _objects(measurement.facts.get(name))]
        if objects and (common := _intersection(objects)):
            shared[name + OF_EACH_ITEM] = common
    return shared


def _own(facts: Mapping[str, JsonValue], shared: Mapping[str, Any]) -> dict[str, JsonValue]:
    """The facts without what is shared."""
    own = {name: fact for name, fact in facts.items() if name not in shared}
    for name, fact in own.items():
        if (common := shared.get(name + OF_EACH_ITEM)) and (objects := _objects(fact)):
            own[name] = [{key: value for key, value in item.items() if key not in common} for item in objects]
    return own


def _objects(fact: Any) -> list[dict[str, JsonValue]]:
    return fact if isinstance(fact, list) and all(isinstance(item, dict) for item in fact) else []


def _intersection(objects: Sequence[Mapping[str, JsonValue]]) -> dict[str, JsonValue]:
    texts = {name: repr(value) for name, value in objects[0].items()}  # since True == 1 == 1.0
    for each in objects[1:]:
        for name in [name for name, text in texts.items() if name not in each or repr(each[name]) != text]:
            del texts[name]
    return {name: objects[0][name] for name in texts}
