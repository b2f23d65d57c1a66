"""Mutations of a record as JSON, and the evidence on which its decision rests."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from hypothesis import strategies as st

from seatrial.model import BasisKind, Outcome, Trial

# Facts are observations, too: switched on when a null, missing or retyped fact is an ERROR of each rule that needs it
MUTATE_FACTS = False
# Sections of a record that the judge reads; measurements are drawn more often, since they hold the evidence
SECTIONS = ("measurements", "measurements", "measurements", "measurements", "jobs", "config", "results", "retries")
KINDS = ("drop", "null", "retype", "rename", "rescale", "empty", "duplicate")
_FACTORS = (0, -1, 1e-3, 0.5, 2, 1e3)
_STOP_SHARE = 4  # of the draws, one in so many mutates the container and not something in it

Json = Any
Key = str | int
Evidence = frozenset[tuple[object, ...]]


def evidence(trial: Trial) -> Evidence:
    """The measured places and the good verdicts of the trial's required checks; thresholds are a wish, no evidence."""
    required = {name for name, setting in trial.config["checks"].items() if setting.get("required", True)}
    measured = {("measured", item.check, item.subject, item.rank, bool(item.skipped)) for item in trial.measurements}
    verdicts = {
        ("judged", verdict.check, verdict.subject, verdict.metric)
        for verdict in trial.verdicts
        if verdict.outcome in (Outcome.PASS, Outcome.WARN)
        and verdict.basis
        and verdict.basis.kind is not BasisKind.TRIAL
    }
    return frozenset(item for item in measured | verdicts if item[1] in required)


@st.composite
def mutated(draw: st.DrawFn, document: Mapping[str, Json]) -> tuple[str, tuple[Key, ...], dict[str, Json]]:
    """The kind and the place of a mutation of ``document``, and the mutated copy; it shares all that is unchanged."""
    kind, section = draw(st.sampled_from(KINDS)), draw(st.sampled_from(SECTIONS))
    path: list[Key] = [section]
    node = document[section]
    while keys := [*_children(node)]:
        if len(path) > 1 and not draw(st.integers(0, _STOP_SHARE - 1)):
            break
        path.append(draw(st.sampled_from(keys)))
        node = node[path[-1]]
    factor = draw(st.sampled_from(_FACTORS)) if kind == "rescale" else 1
    return kind, tuple(path), _changed(document, path, kind, factor)


def set_at(node: Json, path: tuple[Key, ...], value: Json) -> Json:
    """A copy of ``node`` with ``value`` at ``path``."""
    if not path:
        return value
    copy = dict(node) if isinstance(node, Mapping) else list(node)
    copy[path[0]] = set_at(copy[path[0]], path[1:], value)
    return copy


def _children(node: Json) -> Iterator[Key]:
    if isinstance(node, Mapping):
        yield from (key for key in node if MUTATE_FACTS or key != "facts")
    elif isinstance(node, list):
        yield from range(len(node))


def _changed(node: Json, path: list[Key], kind: str, factor: float) -> Json:
    """A copy of ``node`` in which the entry at ``path`` is mutated."""
    copy = dict(node) if isinstance(node, Mapping) else list(node)
    key, *rest = path
    if rest:
        copy[key] = _changed(copy[key], rest, kind, factor)
        return copy
    value = copy[key]
    match kind:
        case "drop":
            del copy[key]
        case "null":
            copy[key] = None
        case "retype":
            copy[key] = _retyped(value)
        case "empty":
            copy[key] = type(value)() if isinstance(value, dict | list | str) else 0
        case "rescale" if isinstance(value, int | float) and not isinstance(value, bool):
            copy[key] = value * factor
        case "rescale":
            copy[key] = _rescaled(value, factor)
        case "rename" if isinstance(copy, dict):
            copy = {f"{name}_renamed" if name == key else name: item for name, item in copy.items()}
        case "rename":
            copy[key] = f"{value}_renamed" if isinstance(value, str) else _renamed(value)
        case "duplicate" if isinstance(copy, list):
            copy.append(value)
        case "duplicate":
            copy[f"{key}_copy"] = value
    return copy


def _retyped(value: Json) -> Json:
    match value:
        case bool():
            return str(value)
        case int() | float():
            return f"{value} units"
        case str():
            return 7
        case dict():
            return [*value.values()]
        case list():
            return dict(zip(map(str, value), value, strict=True))
    return "something"


def _rescaled(value: Json, factor: float) -> Json:
    """``value`` with its numbers multiplied, so that the value of a metric and its samples agree."""
    if isinstance(value, dict):
        return {key: _rescaled(item, factor) for key, item in value.items() if key != "facts"} | _facts(value)
    if isinstance(value, list):
        return [_rescaled(item, factor) for item in value]
    return value * factor if isinstance(value, float) else value


def _facts(value: dict[str, Json]) -> dict[str, Json]:
    return {"facts": value["facts"]} if "facts" in value else {}


def _renamed(value: Json) -> Json:
    """``value`` with another name, check or subject, if it has one."""
    if isinstance(value, dict):
        name = next((key for key in ("name", "check", "subject") if key in value), None)
        return {**value, name: f"{value[name]}_renamed"} if name else value
    return value
