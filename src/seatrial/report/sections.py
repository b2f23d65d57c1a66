"""Sections of the HTML report: time bar, node map, table by subject, distributions, charts, facts, configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

from seatrial.model import Measurement, Outcome, Timing, Topology, Trial, format_bytes, format_value, worst
from seatrial.report.charts import Chart, Limit, Rug, charts, rug
from seatrial.report.figures import NOT_PASSED, Figure
from seatrial.report.formatting import family, natural_key, print_value, size_in_name
from seatrial.report.view import METHOD, CheckView

MAX_NODES = 64  # the map of more nodes shows only those on which something is bad
_DEVICE = re.compile(r"(?P<node>[^/>]+)/(?P<kind>gpu|rank)(?P<index>\d+)")


@dataclass(frozen=True)
class TimeBarPart:
    """A check or an overhead in the time bar; ``left`` and ``width`` are in percent of the bar."""

    name: str
    kind: Literal["check", "overhead"]
    seconds: float
    left: float
    width: float


@dataclass(frozen=True)
class TimeBar:
    """The wall time of a trial, divided into checks and overhead: checks first, then overhead."""

    parts: tuple[TimeBarPart, ...]
    check_seconds: float
    overhead_seconds: float

    @property
    def overhead_percent(self) -> float:
        """The overhead in percent of the wall time."""
        return 100 * self.overhead_seconds / ((self.check_seconds + self.overhead_seconds) or 1.0)


def time_bar(trial: Trial) -> TimeBar:
    """The time bar of ``trial``. Wall time that no timing covers is overhead if it exceeds 0.5 % of the duration."""
    sums = dict[tuple[Literal["check", "overhead"], str], float]()  # (kind, name) → seconds
    for timing in trial.timings:  # a resumed trial has several sessions
        sums[timing.kind, timing.name] = sums.get((timing.kind, timing.name), 0.0) + timing.seconds
    timings = [Timing(name=name, kind=kind, seconds=seconds) for (kind, name), seconds in sums.items()]
    timings.sort(key=lambda timing: (timing.kind, -timing.seconds))
    untimed_seconds = trial.seconds - sum(timing.seconds for timing in timings)
    if untimed_seconds > 0.005 * trial.seconds:
        timings.append(Timing(name="not accounted for", kind="overhead", seconds=untimed_seconds))
    total_seconds = sum(timing.seconds for timing in timings)
    parts, left = [], 0.0
    for timing in timings:
        width = 100 * timing.seconds / (total_seconds or 1.0)
        parts.append(TimeBarPart(timing.name, timing.kind, timing.seconds, left, width))
        left += width
    check_seconds = sum(timing.seconds for timing in timings if timing.kind == "check")
    return TimeBar(tuple(parts), check_seconds, total_seconds - check_seconds)


@dataclass(frozen=True)
class MappedDevice:
    """A GPU or rank of the node map with its worst outcome."""

    kind: str  # gpu or rank
    index: str  # NVML index of the GPU, or the rank
    outcome: Outcome


@dataclass(frozen=True)
class MappedNode:
    """A node of the node map: the worst outcome of the node itself (None without a verdict on it), and its devices."""

    name: str
    outcome: Outcome | None
    devices: tuple[MappedDevice, ...]

    @property
    def is_bad(self) -> bool:
        return any(outcome in NOT_PASSED for outcome in (self.outcome, *(device.outcome for device in self.devices)))


def node_map(trial: Trial) -> list[MappedNode]:
    """All nodes with a GPU or rank that is the subject of a verdict."""
    outcomes: dict[str, list[Outcome]] = {}
    for verdict in trial.verdicts:
        outcomes.setdefault(verdict.subject, []).append(verdict.outcome)
    devices: dict[str, list[MappedDevice]] = {}
    for subject in sorted(outcomes, key=natural_key):
        if match := _DEVICE.fullmatch(subject):
            device = MappedDevice(match["kind"], match["index"], worst(outcomes[subject]))
            devices.setdefault(match["node"], []).append(device)
    return [
        MappedNode(node, worst(outcomes[node]) if node in outcomes else None, tuple(of_node))
        for node, of_node in devices.items()
    ]


@dataclass(frozen=True)
class NodeGroup:
    """The nodes of one leaf switch or rack; ``name`` is empty without a topology.

    ``healthy_count``, ``bad_count``: number of nodes without and with a problem that a map of many nodes leaves out.
    """

    name: str
    nodes: tuple[MappedNode, ...]
    healthy_count: int = 0
    bad_count: int = 0


def node_groups(trial: Trial) -> list[NodeGroup]:
    """The nodes of the node map, by leaf switch and rack."""
    topology = next((job.topology for job in trial.jobs if job.topology), None)
    groups: dict[str, list[MappedNode]] = {}
    for node in node_map(trial):
        groups.setdefault(_place(topology, node.name) if topology else "", []).append(node)
    if sum(map(len, groups.values())) <= MAX_NODES:
        return [NodeGroup(name, tuple(nodes)) for name, nodes in groups.items()]
    reduced = []
    for name, nodes in groups.items():
        bad = [node for node in nodes if node.is_bad]
        shown = tuple(bad[: MAX_NODES // len(groups) + 1])
        reduced.append(NodeGroup(name, shown, len(nodes) - len(bad), len(bad) - len(shown)))
    return reduced


def _place(topology: Topology, node: str) -> str:
    """The switch and the rack of a node as text."""
    leaf, rack = topology.leaf(node), topology.rack(node)
    names = [f"switch {leaf}" if leaf and leaf != rack else "", f"rack {rack}" if rack else ""]
    return ", ".join(filter(None, names)) or "not in the topology"


class SubjectTable(NamedTuple):
    """The values of several figures on the same subjects; a value is empty for a figure that a subject lacks.

    ``rows``: (subject, [(value as text, outcome if the subject did not pass)]).
    """

    figures: list[Figure]
    rows: list[tuple[str, list[tuple[str, Outcome | None]]]]


def subject_table(check: CheckView) -> SubjectTable | None:
    """The figures of a check that have several subjects; None without such figures."""
    columns = [figure for figure in check.figures if len(figure.metrics) > 1]
    shown = set(check.shown_subjects)
    bad = {(v.metric, v.subject): v.outcome for v in reversed(check.verdicts) if v.outcome in NOT_PASSED}
    values = {
        (metric.name, metric.subject): print_value(metric.value, metric.unit)
        for figure in columns
        for metric in figure.metrics
        if metric.subject in shown
    }
    rows = []
    for subject in check.shown_subjects:
        keys = [(figure.metric, subject) for figure in columns]
        if any(key in values for key in keys):
            rows.append((subject, [(values.get(key, ""), bad.get(key)) for key in keys]))
    return SubjectTable(columns, rows) if rows else None


def make_rug(figure: Figure) -> Rug | None:
    """The distribution of a figure with its limit; None for booleans, and for values that are equal."""
    if len(set(figure.values)) < 2 or figure.unit == "bool":
        return None
    return rug(figure.values, figure.limit, figure.expected, figure.op)


def make_charts(check: CheckView) -> list[Chart]:
    """The charts of a check; subjects that did not pass are highlighted. Limits are marked at their sizes."""
    not_passed = frozenset(verdict.subject for verdict in check.verdicts if verdict.outcome in NOT_PASSED)
    marks = [
        Limit(family(figure.metric), float(size), figure.limit, figure.expected)
        for figure in check.figures
        if figure.limit is not None and (size := size_in_name(figure.metric))
    ]
    return charts([series for measurement in check.measurements for series in measurement.series], not_passed, marks)


class FactValue(NamedTuple):
    """A value of a fact, and the subjects that reported it."""

    value: Any
    subjects: tuple[str, ...]


@dataclass(frozen=True)
class FactRow:
    """One fact with its different values, the most frequent first."""

    name: str
    values: tuple[FactValue, ...]


def fact_rows(measurements: tuple[Measurement, ...]) -> list[FactRow]:
    """The facts of a check, without ``method``. A fact that differs between subjects has several values."""
    values: dict[str, Any] = {}  # value as JSON → value
    facts: dict[str, dict[str, list[str]]] = {}  # fact → value as JSON → subjects
    for measurement in measurements:
        for name, value in measurement.facts.items():
            if name != METHOD:
                key = f"text {value}" if isinstance(value, str) else json.dumps(value, sort_keys=True)
                values[key] = value
                facts.setdefault(name, {}).setdefault(key, []).append(measurement.subject)
    rows = []
    for name, subjects_by_key in facts.items():
        # the subjects of a fact that is the same everywhere are not shown
        is_shown = len(subjects_by_key) > 1
        fact_values = [
            FactValue(values[key], tuple(sorted(subjects, key=natural_key) if is_shown else subjects))
            for key, subjects in subjects_by_key.items()
        ]
        fact_values.sort(key=lambda fact_value: -len(fact_value.subjects))
        rows.append(FactRow(name, tuple(fact_values)))
    return rows


def settings(config: dict[str, Any], origins: dict[str, str], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted name, value, origin) of each setting; the origin may be that of the nearest parent key."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from settings(value, origins, f"{name}.")
        else:
            yield name, value if isinstance(value, str) else pretty(value), _origin(name, origins)


def _origin(name: str, origins: dict[str, str]) -> str:
    while name not in origins and "." in name:
        name = name.rpartition(".")[0]
    return origins.get(name, "not recorded")


def is_table(value: Any) -> bool:
    """Whether a fact is shown as a table: it is a list of records, or a mapping to records."""
    records = list(value.values()) if isinstance(value, dict) else value
    return isinstance(records, list) and len(records) > 0 and all(isinstance(item, dict) and item for item in records)


def is_pair_table(value: Any) -> bool:
    """Whether a fact is a bandwidth table of GPU pairs: names of GPUs, and a square matrix in GB/s."""
    if not isinstance(value, dict) or set(value) != {"gpus", "gb_s"}:
        return False
    names, rows = value["gpus"], value["gb_s"]
    if not isinstance(names, list) or not isinstance(rows, list):
        return False
    return len(rows) == len(names) and all(isinstance(row, list) and len(row) == len(names) for row in rows)


def columns(records: list[dict[str, Any]]) -> list[str]:
    """All keys of the records, in the order of their first occurrence."""
    return list(dict.fromkeys(key for record in records for key in record))


def pretty(value: Any, name: str = "") -> str:
    """A value as text: a number in binary units if ``name`` ends with _bytes, nested values as JSON."""
    if isinstance(value, str):
        return value
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int | float):
        return _number(value, name)
    if isinstance(value, list) and all(isinstance(item, str | int | float) for item in value):
        return ", ".join(pretty(item) for item in value) or "none"
    if value is None or value == {}:
        return "–" if value is None else "none"
    return json.dumps(value, indent=1, ensure_ascii=False, default=str)


def _number(value: float, name: str) -> str:
    if name.endswith("_bytes"):
        return format_bytes(value)
    return str(value) if isinstance(value, int) else format_value(value, "")
