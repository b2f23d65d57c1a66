"""Mutations of records, as JSON, and the evidence on which an acceptance rests."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hypothesis import strategies as st
from pydantic import ValidationError

from seatrial.checks import catalog
from seatrial.checks.check import SkipIf
from seatrial.model import BasisKind, Outcome, Scope, Trial, UsageError, Verdict
from seatrial.pipeline.rejudge import rejudge
from seatrial.pipeline.run_directory import load_trial

# Whether facts are mutated as well: only if each rule treats a missing, null or retyped fact that it needs as ERROR
MUTATE_FACTS = True
# What the judge reads; measurements are drawn more often, since they are the evidence
SECTIONS = (*["measurements"] * 6, "jobs", "jobs", "config", "results", "retries", "excluded_checks")
KINDS = ("drop", "null", "retype", "rename", "rescale", "empty", "duplicate")
_FACTORS = (0.0, -1.0, 1e-3, 0.5, 2.0, 1e3)
_DEPTH = 4  # one draw in so many mutates a container, the others something inside it
_GOOD = (Outcome.PASS, Outcome.WARN)
_REFUSED = "refused"

Json = Any
Path_ = tuple[str | int, ...]


@dataclass
class Record:
    """An accepted record: its JSON, without what the judge computes, and the trial judged by this version."""

    document: dict[str, Json]
    judged: Trial
    # index of the measurement and of its metric, and the good verdict on it
    good_metrics: list[tuple[int, int, Verdict]] = field(default_factory=list)

    @classmethod
    def load(cls, path: Path) -> Record:
        computed = ("verdicts", "findings", "insights", "timings", "sessions")
        trial = load_trial(path).model_copy(update=dict.fromkeys(computed, ()) | {"telemetry": None})
        record = cls(json.loads(trial.model_dump_json()), rejudge(trial))
        good = {
            (item.check, item.metric, item.subject): item for item in record.judged.verdicts if item.outcome in _GOOD
        }
        for number, measurement in enumerate(record.document["measurements"]):
            for index, metric in enumerate(measurement.get("metrics", ())):
                if verdict := good.get((measurement["check"], metric["name"], metric["subject"])):
                    record.good_metrics.append((number, index, verdict))
        return record


def judged(document: Json) -> Trial | None:
    """The judged record, None if it is refused; any other exception is a bug of the judge."""
    try:
        return rejudge(Trial.model_validate(document))
    except (ValidationError, UsageError):
        return None


def decision(document: Json) -> str:
    trial = judged(document)
    return trial.decision.value.value if trial else _REFUSED


def evidence(trial: Trial) -> Counter[tuple[object, ...]]:
    """The ranks measured and the limits met, by required check; thresholds of the trial are no evidence."""
    required = {name for name, setting in trial.config["checks"].items() if setting.get("required", True)}
    found = Counter[tuple[object, ...]]((item.check, item.rank, bool(item.skipped)) for item in trial.measurements)
    for verdict in trial.verdicts:
        for basis in (verdict.basis, *verdict.other_limits) if verdict.outcome in _GOOD else ():
            if basis and basis.kind is not BasisKind.TRIAL:
                found[verdict.check, verdict.metric, basis.kind] += 1
    return Counter({item: count for item, count in found.items() if item[0] in required})


@st.composite
def mutations(draw: st.DrawFn, document: dict[str, Json]) -> tuple[str, dict[str, Json]]:
    """The kind of a mutation anywhere in the record, and the mutated copy, which shares what is unchanged."""
    kind = draw(st.sampled_from(KINDS))
    path: Path_ = (draw(st.sampled_from(SECTIONS)),)
    node = document.get(str(path[0]), ())
    while keys := [*_keys(node)]:
        if len(path) > 1 and not draw(st.integers(0, _DEPTH - 1)):
            break
        path = (*path, keys[draw(st.integers(0, len(keys) - 1))])
        node = node[path[-1]]
    return kind, _mutated(document, path, kind, draw(st.sampled_from(_FACTORS)))


def _keys(node: Json) -> Iterator[str | int]:
    if isinstance(node, dict):
        yield from (key for key in node if MUTATE_FACTS or key != "facts")
    elif isinstance(node, list):
        yield from range(len(node))


def _mutated(document: Json, path: Path_, kind: str, factor: float) -> Json:
    """A copy of the document in which the entry at ``path`` is mutated."""
    *parents, key = path
    parent = document
    for name in parents:
        parent = parent[name]
    if isinstance(parent, dict):
        changed: Json = _mutated_mapping(parent, str(key), kind, factor)
    else:
        changed = _mutated_list(parent, int(key), kind, factor)
    return replaced(document, tuple(parents), changed)


def _mutated_mapping(parent: dict[str, Json], key: str, kind: str, factor: float) -> dict[str, Json]:
    if key not in parent:  # an earlier mutation dropped it
        return parent
    if kind == "drop":
        return {name: value for name, value in parent.items() if name != key}
    if kind == "rename":
        return {f"{name}_renamed" if name == key else name: value for name, value in parent.items()}
    if kind == "duplicate":
        return parent | {f"{key}_copy": parent[key]}
    return parent | {key: _CHANGES[kind](parent[key], factor)}


def _mutated_list(parent: list[Json], key: int, kind: str, factor: float) -> list[Json]:
    if kind == "drop":
        return parent[:key] + parent[key + 1 :]
    if kind == "duplicate":
        return [*parent, parent[key]]
    return [*parent[:key], _CHANGES[kind](parent[key], factor), *parent[key + 1 :]]


def replaced(node: Json, path: Path_, value: Json) -> Json:
    """A copy of ``node`` with ``value`` at ``path``."""
    if not path:
        return value
    copy: Json = dict(node) if isinstance(node, dict) else list(node)
    copy[path[0]] = replaced(copy[path[0]], path[1:], value)
    return copy


def _retyped(value: Json) -> Json:
    if isinstance(value, dict):
        return [*value.values()]
    if isinstance(value, list):
        return {str(number): item for number, item in enumerate(value)}
    return 7 if isinstance(value, str) else f"{value} units"


def _rescaled(value: Json, factor: float) -> Json:
    """``value`` with all its numbers multiplied, except in facts."""
    if isinstance(value, dict):
        return {key: item if key == "facts" else _rescaled(item, factor) for key, item in value.items()}
    if isinstance(value, list):
        return [_rescaled(item, factor) for item in value]
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return type(value)(value * factor) if is_number else value


def _renamed(value: Json) -> Json:
    """``value`` with another name, check or subject, if it has one."""
    if isinstance(value, dict):
        named = next((key for key in ("name", "check", "subject") if key in value), None)
        return {**value, named: f"{value[named]}_renamed"} if named else value
    return f"{value}_renamed" if isinstance(value, str) else value


_CHANGES: dict[str, Callable[[Json, float], Json]] = {
    "null": lambda _value, _factor: None,
    "retype": lambda value, _factor: _retyped(value),
    "rename": lambda value, _factor: _renamed(value),
    "rescale": _rescaled,
    "empty": lambda value, _factor: type(value)() if isinstance(value, dict | list | str) else 0,
}


def lost_or_bad(record: Record, number: int, index: int, verdict: Verdict) -> dict[str, dict[str, Json]]:
    """Kind → the record without one good metric, its measurement, its rank or its job, or with a bad value."""
    document = record.document
    measurements: list[Json] = document["measurements"]
    measurement = measurements[number]
    metrics, metric, check = measurement.get("metrics", ()), measurement.get("metrics", ())[index], measurement["check"]
    job = next(place for place, job in enumerate(document["jobs"]) if check in job["checks"])

    def with_measurement(**changes: Json) -> Json:
        return replaced(document, ("measurements", number), measurement | changes)

    def with_metric(**changes: Json) -> Json:
        return replaced(document, ("measurements", number, "metrics", index), metric | changes)

    others = [item for place, item in enumerate(measurements) if place != number]
    of_others = [item for item in measurements if item["check"] != check]
    settings = {name: setting for name, setting in document["config"]["checks"].items() if name != check}
    planned = [name for name in document["jobs"][job]["checks"] if name != check]
    found = {
        "metric dropped": with_measurement(metrics=metrics[:index] + metrics[index + 1 :]),
        "metric renamed": with_metric(name=f"{metric['name']}_renamed"),
        "metric in another unit": with_metric(unit=f"{metric['unit']} per hour"),
        "value is null": with_metric(value=None),
        "value is text": with_metric(value="fast"),
        "metrics emptied": with_measurement(metrics=[]),
        "skipped beside metrics": with_measurement(skipped="no reason"),
        "error": with_measurement(error="lost"),
        "measurement dropped": document | {"measurements": others},
        "measurement of another check": with_measurement(check="host.unheard_of"),
        "measurement of another rank": with_measurement(rank=(measurement["rank"] or 0) + 64),
        "measured nowhere": document | {"measurements": of_others},
        "check dropped from config": replaced(document, ("config", "checks"), settings),
        "check excluded": document | {"excluded_checks": {check: "--skip"}},
        "check dropped from its job": replaced(document, ("jobs", job, "checks"), planned),
        "check dropped from config and job": replaced(
            replaced(document, ("jobs", job, "checks"), planned), ("config", "checks"), settings
        ),
        "job dropped": document | {"jobs": [item for place, item in enumerate(document["jobs"]) if place != job]},
    }
    if catalog()[check].scope is not Scope.CONTROL:  # a CONTROL check may name any node of the scheduler
        found["metric of an unknown GPU"] = with_metric(subject="elsewhere/gpu7")
    if SkipIf.UNVERIFIED not in catalog()[check].skip_if:
        skipped = [{**item, "metrics": [], "skipped": "no reason"} for item in measurements if item["check"] == check]
        found["skipped on all ranks"] = document | {"measurements": of_others + skipped}
    if document["jobs"][job]["placement"] == "ranks":
        first = [item for item in measurements if item["rank"] in (0, None)]
        fewer = replaced(document, ("jobs", job, "ranks_per_node"), 1) | {"measurements": first}
        found["fewer ranks"] = fewer
        found["fewer ranks, one per node"] = replaced(fewer, ("jobs", job, "placement"), "nodes")
        unpromised = [{**item, "expected_gpus": None} for item in fewer["jobs"]]
        found["fewer ranks, none promised"] = replaced(
            fewer | {"jobs": unpromised}, ("config", "cluster", "gpus_per_node"), None
        )
    if (value := _bad_value(verdict)) is not None:
        bad = {**metric, "value": value, "samples": [value] * len(metric.get("samples", ()))}
        found["bad value"] = with_metric(**bad)
        found["bad value beside the good one"] = with_measurement(metrics=[*metrics, bad])
        found["bad value before the good one"] = with_measurement(metrics=[bad, *metrics])
    return found


def _bad_value(verdict: Verdict) -> float | None:
    """A value that the rules of the check do not accept; None if a bad value is only a warning."""
    basis, rules = verdict.basis, catalog()[verdict.check].rules
    outcomes = {limit.outcome for rule in rules if rule.metric == verdict.metric for limit in rule.limits}
    if basis is None or basis.expected is None or not (outcomes - {Outcome.WARN} or basis.kind is BasisKind.TRIAL):
        return None
    if basis.op in ("<", "<="):
        return 100 * abs(basis.expected) + 1e9
    if basis.op == "==":
        return basis.expected + 1
    return 0.01 * basis.expected if basis.expected > 0 else basis.expected - 1
