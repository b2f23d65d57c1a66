"""The record of a trial: configuration, measurements, verdicts, findings and decision."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import fields
from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import (
    Field,
    JsonValue,
    WrapSerializer,
    model_validator,
)

from seatrial.model.base import Duration, Frozen
from seatrial.model.job import Job, JobResult, MissingNode
from seatrial.model.measurement import Measurement, Metric
from seatrial.model.outcome import Outcome
from seatrial.model.rule import Baseline
from seatrial.model.telemetry import Telemetry
from seatrial.model.topology import Topology
from seatrial.model.verdict import Verdict, VerdictKey
from seatrial.util.secrets import redacted

# Value in Trial.excluded_checks: the typical duration of the check does not fit into --time-limit
TIME_LIMIT = "--time-limit"
# Precedes the command of a new run in Trial.stop_reason, if no --resume can continue the run
NEW_RUN = "start a new run: "
# Suffix of a name in Trial.shared_facts: the fact is a list of objects, which have these items in common
OF_EACH_ITEM = "[]"
_FIELDS = [field.name for field in fields(Metric)]

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

    def explaining(self, verdicts: Iterable[Verdict]) -> "Finding":
        """The finding with ``verdicts`` as those that follow from it or are its evidence, each once."""
        return self.model_copy(update={"explains": tuple(dict.fromkeys(verdict.key for verdict in verdicts))})

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
    unknown_gpus: tuple[str, ...] = Field(default=(), description="GPU models without SKU data: no published figures")
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


def _drop_empty(record: Mapping[str, Any]) -> dict[str, Any]:
    """A verdict as it is written to trial.json: without empty fields, except ``check`` and ``subject``."""
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
    units: dict[str, dict[str, str]] = Field(
        default={}, description="only in files: the unit of each metric of ``measurements``, by check"
    )
    shared_facts: dict[str, dict[str, Any]] = Field(
        default={}, description="only in files: facts that measurements have in common, by ``shares`` or by check"
    )
    retries: tuple[Measurement, ...] = Field(default=(), description="second and third measurements of checks")
    localization: tuple[Measurement, ...] = Field(
        default=(), description="search for slow nodes after the checks of the trial; of its verdicts only FAILs count"
    )
    verdicts: Annotated[tuple[Verdict, ...], WrapSerializer(lambda verdicts, dump: [*map(_drop_empty, dump(verdicts))])]
    findings: tuple[Finding, ...]
    insights: tuple[Insight, ...] = ()
    timings: tuple[Timing, ...]
    decision: Decision
    telemetry: Telemetry | None = Field(default=None, description="samples taken while the jobs ran")
    manifest: dict[str, str] = Field(
        default={}, description="file of the run directory with results → SHA-256, when this record was made"
    )

    @property
    def new_run_command(self) -> str:
        """The command of a new run, if no --resume can continue this one; else empty."""
        return self.stop_reason.partition(NEW_RUN)[2]

    @property
    def topology(self) -> Topology | None:
        """The switches and racks of the nodes, if a job knows them."""
        return next((job.topology for job in self.jobs if job.topology), None)

    def as_stored(self) -> "Trial":
        """The trial as it is written to trial.json: units, and facts that many processes report, are there once.

        A metric has no subject if it is that of its measurement. Verdicts with PASS are not there: the judge gives them
        again.
        """
        units, groups = _units(self.measurements), _groups(self.measurements)
        facts = {key: [self.measurements[n].facts for n in numbers] for key, numbers in groups.items()}
        shared = {key: _shared(of_group) for key, of_group in facts.items() if len(of_group) > 1}
        keys = {n: key for key, numbers in groups.items() for n in numbers}
        stored = []
        for n, each in enumerate(self.measurements):
            of_check = units.get(each.check, {})
            metrics = tuple(_short(metric, each.subject, of_check) for metric in each.metrics)
            own: dict[str, Any] = {}
            if key := keys.get(n):
                own = {"facts": _own(each.facts, shared.get(key, {})), "shares": key if key != each.check else ""}
            stored.append(each.model_copy(update={"metrics": metrics, **own}))
        verdicts = tuple(verdict for verdict in self.verdicts if verdict.outcome is not Outcome.PASS)
        changed = {"measurements": tuple(stored), "units": units, "shared_facts": shared, "verdicts": verdicts}
        return self.model_copy(update=changed)

    @model_validator(mode="after")
    def _complete_measurements(self) -> "Trial":
        """Undo ``as_stored`` in the measurements of a file."""
        for measurement in self.measurements:
            units = self.units.get(measurement.check, {})
            for metric in measurement.metrics:
                object.__setattr__(metric, "subject", metric.subject or measurement.subject)
                object.__setattr__(metric, "unit", metric.unit or units.get(metric.name, ""))
            if measurement.has_shared_facts:
                key = measurement.shares or measurement.check
                _add_shared(measurement.facts, self.shared_facts.get(key, {}), key)
                object.__setattr__(measurement, "shares", "")
        self.units.clear()
        self.shared_facts.clear()
        return self


def _groups(measurements: Sequence[Measurement]) -> dict[str, list[int]]:
    """Key of shared facts → the numbers of the measurements of a check that have facts of the same names.

    The key of the largest group of a check is the name of the check.
    """
    by_names: dict[str, dict[frozenset[str], list[int]]] = {}
    for n, measurement in enumerate(measurements):
        if measurement.has_shared_facts:
            by_names.setdefault(measurement.check, {}).setdefault(frozenset(measurement.facts), []).append(n)
    return {
        check if rank == 0 else f"{check} {rank + 1}": group
        for check, groups in by_names.items()
        for rank, group in enumerate(sorted(groups.values(), key=len, reverse=True))
    }


def _units(measurements: Iterable[Measurement]) -> dict[str, dict[str, str]]:
    """Check → metric → unit, without metrics that have several units."""
    found: dict[str, dict[str, set[str]]] = {}
    for measurement in measurements:
        of_check = found.setdefault(measurement.check, {}) if measurement.metrics else {}
        for metric in measurement.metrics:
            of_check.setdefault(metric.name, set()).add(metric.unit)
    return {
        check: {name: unit for name, (unit, *others) in of_check.items() if unit and not others}
        for check, of_check in found.items()
    }


def _short(metric: Metric, subject: str, units: Mapping[str, str]) -> Metric:
    """The metric without its unit, and without its subject if it is that of the measurement."""
    changed = {"unit": "" if metric.name in units else metric.unit}
    changed["subject"] = "" if metric.subject == subject else metric.subject
    short = object.__new__(Metric)  # dataclasses.replace() would validate a million metrics again
    for name in _FIELDS:
        object.__setattr__(short, name, changed[name] if name in changed else getattr(metric, name))
    return short


def _shared(facts: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What all have in common: equal facts; of a fact that is an object, its common items.

    Of lists of objects, such as GPUs, ``NAME[]`` has the items that are equal in all objects of all lists.
    """
    shared: dict[str, Any] = {}
    for name, first in facts[0].items():
        if name.endswith(OF_EACH_ITEM):
            continue
        text = repr(first)  # since True == 1 == 1.0
        if all(name in each and repr(each[name]) == text for each in facts):
            shared[name] = first
        elif isinstance(first, dict) and all(isinstance(each.get(name), dict) for each in facts):
            shared |= {name: common} if (common := _shared([each[name] for each in facts])) else {}
        elif objects := [item for each in facts for item in _objects(each.get(name))]:
            shared |= {name + OF_EACH_ITEM: common} if (common := _shared(objects)) else {}
    return shared


def _own(facts: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """The facts without what is shared."""
    own: dict[str, Any] = {}
    for name, fact in facts.items():
        common = shared.get(name)
        if isinstance(common, dict) and isinstance(fact, dict):
            own |= {name: rest} if (rest := _own(fact, common)) else {}
        elif name not in shared:
            of_items, objects = shared.get(name + OF_EACH_ITEM), _objects(fact)
            own[name] = [_own(item, of_items) for item in objects] if of_items and objects else fact
    return own


def _add_shared(facts: dict[str, Any], shared: Mapping[str, Any], check: str) -> None:
    """Add what is shared to the facts of a measurement. Raises ValueError for a ``NAME[]`` that is not an object."""
    for name, value in shared.items():
        own = facts.get(name)
        if name.endswith(OF_EACH_ITEM):
            if not isinstance(value, dict):
                raise ValueError(f"shared fact {name} of {check} is {value!r}, not an object")
            for item in _objects(facts.get(name.removesuffix(OF_EACH_ITEM))):
                _add_shared(item, value, check)
        elif isinstance(value, dict) and isinstance(own, dict):
            _add_shared(own, value, check)
        else:
            facts[name] = value


def _objects(fact: Any) -> list[dict[str, JsonValue]]:
    return fact if isinstance(fact, list) and all(isinstance(item, dict) for item in fact) else []
