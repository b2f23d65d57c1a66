"""Parts of the HTML report: time bar, node map, table by subject, facts, configuration."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from seatrial.model import Measurement, Metric, Outcome, Timing, Trial, format_bytes, format_value, worst
from seatrial.report.charts import Chart, Rug, charts, rug
from seatrial.report.formatting import format_range, natural_key, print_value
from seatrial.report.view import METHOD, NOT_PASSED, CheckView, Row

_DEVICE = re.compile(r"(?P<node>[^/>]+)/(?P<kind>gpu|rank)(?P<number>\d+)")


@dataclass(frozen=True)
class Part:
    """A part of the time bar. ``left`` and ``width`` are percent of the whole."""

    name: str
    kind: str
    seconds: float
    left: float
    width: float


@dataclass(frozen=True)
class TimeBar:
    """The wall time by part: checks, overhead of seatrial, and time not accounted for."""

    parts: tuple[Part, ...]
    checks: float
    outside: float

    @property
    def share(self) -> float:
        """The percentage of the time outside checks."""
        return 100 * self.outside / ((self.checks + self.outside) or 1.0)


def time_bar(trial: Trial) -> TimeBar:
    """Checks first, then overhead. Time that is not accounted for is overhead, too."""
    seconds = dict[tuple[Literal["check", "overhead"], str], float]()
    for timing in trial.timings:  # a resumed trial has several sessions
        seconds[timing.kind, timing.name] = seconds.get((timing.kind, timing.name), 0.0) + timing.seconds
    timings = [Timing(name=name, kind=kind, seconds=total) for (kind, name), total in seconds.items()]
    timings.sort(key=lambda timing: (timing.kind, -timing.seconds))
    missing = trial.seconds - sum(timing.seconds for timing in timings)
    if missing > 0.005 * trial.seconds:
        timings.append(Timing(name="not accounted for", kind="overhead", seconds=missing))
    total = sum(timing.seconds for timing in timings) or 1.0
    parts, left = [], 0.0
    for timing in timings:
        width = 100 * timing.seconds / total
        parts.append(Part(timing.name, timing.kind, timing.seconds, left, width))
        left += width
    checks = sum(timing.seconds for timing in timings if timing.kind == "check")
    return TimeBar(tuple(parts), checks, sum(timing.seconds for timing in timings) - checks)


@dataclass(frozen=True)
class GridCell:
    """A GPU or rank of the node map with its worst outcome."""

    kind: str
    number: str
    outcome: Outcome


@dataclass(frozen=True)
class Node:
    """A node of the map with its worst outcome (None without a verdict on the node itself) and its devices."""

    name: str
    outcome: Outcome | None
    devices: tuple[GridCell, ...]


def node_grid(trial: Trial) -> list[Node]:
    """All nodes with a GPU or rank that is the subject of a verdict."""
    outcomes: dict[str, list[Outcome]] = {}
    for verdict in trial.verdicts:
        outcomes.setdefault(verdict.subject, []).append(verdict.outcome)
    cells: dict[str, list[GridCell]] = {}
    for subject in sorted(outcomes, key=natural_key):
        if match := _DEVICE.fullmatch(subject):
            cell = GridCell(match["kind"], match["number"], worst(outcomes[subject]))
            cells.setdefault(match["node"], []).append(cell)
    return [Node(node, worst(outcomes[node]) if node in outcomes else None, tuple(cells[node])) for node in cells]


@dataclass(frozen=True)
class Cell:
    """One value of the table by subject."""

    value: str
    samples: str
    outcome: Outcome | None
    reason: str


@dataclass(frozen=True)
class Matrix:
    """A table with one line per subject and one column per metric."""

    columns: tuple[Row, ...]
    lines: tuple[tuple[str, Outcome, tuple[Cell | None, ...]], ...]

    @property
    def ranked(self) -> bool:
        """Whether the lines are sorted by outcome; they are not sorted by value, since the better direction differs."""
        return len({outcome for _, outcome, _ in self.lines}) > 1


def matrix(check: CheckView) -> Matrix | None:
    """A check's metrics that have several subjects, worst subject first; None without such metrics."""
    columns = tuple(row for row in check.rows if len(row.readings) > 1)
    by_subject = [{reading.subject: reading for reading in row.readings} for row in columns]
    lines = []
    for subject in check.subjects:
        readings = [column.get(subject) for column in by_subject]
        given = [verdict.outcome for reading in readings if reading for verdict in reading.verdicts]
        cells = tuple(
            _cell(reading.metric, reading.outcome, [v.message for v in reading.verdicts if v.outcome in NOT_PASSED])
            if reading
            else None
            for reading in readings
        )
        if any(cells):
            lines.append((subject, worst(given) if given else Outcome.PASS, cells))
    return Matrix(columns, tuple(lines)) if columns else None


def _cell(metric: Metric | None, outcome: Outcome | None, reasons: list[str]) -> Cell:
    if not metric:
        return Cell("not measured", "", outcome, "; ".join(reasons))
    samples = format_range(metric.samples, metric.unit) if len(metric.samples) > 1 else ""
    return Cell(print_value(metric.value, metric.unit), samples, outcome, "; ".join(reasons))


def rug_of(row: Row) -> Rug | None:
    """The strip of ticks of a row; None for a single value and for booleans."""
    if not row.range or row.unit == "bool":
        return None
    if len(row.readings) == 1:
        return rug(row.spread, [False] * len(row.spread))
    return rug(row.spread, [reading.outcome in NOT_PASSED for reading in row.readings if reading.metric])


def charts_of(check: CheckView) -> list[Chart]:
    """The charts of a check; subjects that did not pass are highlighted."""
    not_passed = frozenset(verdict.subject for verdict in check.verdicts if verdict.outcome in NOT_PASSED)
    return charts([series for measurement in check.measurements for series in measurement.series], not_passed)


@dataclass(frozen=True)
class FactRow:
    """One fact: its distinct values with their subjects, the most frequent value first."""

    name: str
    values: tuple[tuple[Any, tuple[str, ...]], ...]


def facts_of(measurements: tuple[Measurement, ...]) -> list[FactRow]:
    """The facts of a check by name, without ``method``. A fact that differs between subjects has several values."""
    facts: dict[str, dict[str, tuple[Any, list[str]]]] = {}
    for measurement in measurements:
        for name, value in measurement.facts.items():
            if name == METHOD:
                continue
            key = json.dumps(value, sort_keys=True)
            facts.setdefault(name, {}).setdefault(key, (value, []))[1].append(measurement.subject)
    rows = []
    for name, values in facts.items():
        ordered = sorted(values.values(), key=lambda entry: -len(entry[1]))
        pairs = ((value, tuple(sorted(subjects, key=natural_key))) for value, subjects in ordered)
        rows.append(FactRow(name, tuple(pairs)))
    return rows


def settings(config: dict[str, Any], origins: dict[str, str], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted name, value, origin) of each setting; a setting without an origin has that of its group."""
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
    """Whether a fact is shown as a table: a list of records, or a record of records."""
    records = list(value.values()) if isinstance(value, dict) else value
    return isinstance(records, list) and len(records) > 0 and all(isinstance(item, dict) and item for item in records)


def is_grid(value: Any) -> bool:
    """Whether a fact has one value per ordered pair of GPUs: their names and a square matrix in GB/s."""
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
    """A value as text: a number as a size if ``name`` ends with _bytes, nested values as JSON."""
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
