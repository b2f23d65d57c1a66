"""Tables as text, for terminals and pages: one model for facts, checks, reference values and lists of results."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich import table as rich_table
from rich.console import Console
from rich.text import Text

from seatrial.model import DecisionValue, Measurement, Outcome, format_bytes, format_value
from seatrial.report.formatting import natural_key
from seatrial.report.text import clean, single_line
from seatrial.util.text import and_more

STYLES: Mapping[str, str] = {
    Outcome.PASS: "green",
    Outcome.WARN: "yellow",
    Outcome.FAIL: "bold red",
    Outcome.SKIP: "dim",
    Outcome.UNJUDGED: "bold cyan",
    Outcome.ERROR: "bold magenta",
    "slower": "bold red",  # effects of a comparison
    "faster": "green",
    DecisionValue.ACCEPTED: "bold green",
    DecisionValue.REJECTED: "bold red",
    DecisionValue.INCOMPLETE: "bold yellow",
}
MAX_ALIGNED = 32  # characters of a column that is aligned with those of other tables
MAX_VALUES = 8  # different values of a fact in one table
_NUMBER = re.compile(r"[<>=≥≤]*\s?-?[\d.,]+( ?\S+)?|–?")  # a value, a limit or an empty cell
_EMPTY: tuple[object, ...] = (None, "", [], {})
_MAX_NAMED = 3  # subjects of a value of a fact


@dataclass(frozen=True)
class Table:
    """Rows of cells below a title, with or without a heading of each column."""

    title: str
    rows: Sequence[Sequence[str]]
    header: Sequence[str] = ()

    @property
    def text(self) -> str:
        """The title, and the rows in aligned columns."""
        rows = [[single_line(cell) for cell in row] for row in (self.header, *self.rows) if row]
        widths = [max(map(len, column)) for column in zip(*rows, strict=False)]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) for row in rows]
        return "\n".join(line.rstrip() for line in ([clean(self.title)] if self.title else []) + lines)


def print_tables(tables: Sequence[Table], console: Console) -> None:
    """Print tables with aligned columns; a terminal wraps the cells, and shows outcomes in colour.

    The columns of tables with the same number of columns and no heading have the same width, except the last one.
    """
    widths: dict[tuple[int, int], int] = {}
    for row in (row for table in tables if not table.header for row in table.rows):
        for n, cell in enumerate(row[:-1]):
            widths[len(row), n] = min(max(len(cell), widths.get((len(row), n), 0)), MAX_ALIGNED)
    for table in tables:
        if table.title:
            console.print(Text(" ".join(clean(table.title).splitlines()), "bold"), soft_wrap=True)
        indent = "  " if table.title else ""
        grid = rich_table.Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, show_header=False)
        for n, column in enumerate(zip(*table.rows, strict=True)):
            width = widths.get((len(table.rows[0]), n), 0) + (0 if n else len(indent))
            is_number = bool(table.header) and all(_NUMBER.fullmatch(cell) for cell in column)
            grid.add_column(min_width=width, justify="right" if is_number else "left", overflow="fold")
        for row in filter(None, (table.header, *table.rows)):
            is_header = row is table.header
            cells = [Text(single_line(cell), "dim" if is_header else STYLES.get(cell, "")) for cell in row]
            grid.add_row(Text(indent) + cells[0], *cells[1:])
        if table.rows:
            console.print(grid)


def fact_tables(facts: Mapping[str, Any], title: str = "") -> Iterator[Table]:
    """A table with one row for each plain value or mapping, then tables of the lists of records in them."""
    rows = []
    inner = []
    for key, value in facts.items():
        name = f"{title} {key}".strip()
        if records := _records(value):
            filled = {key for record in records for key, value in record.items() if value not in _EMPTY}
            keys = [key for key in dict.fromkeys(key for record in records for key in record) if key in filled]
            cells = [[fact_text(record.get(key, ""), key) for key in keys] for record in records]
            inner.append(Table(name, cells, [key.removesuffix("_bytes") for key in keys]))
        elif isinstance(value, dict):
            plain = {key: each for key, each in value.items() if not _is_nested(each)}
            nested = {key: each for key, each in value.items() if _is_nested(each)}
            if text := _pairs(plain):
                rows.append((key, text))
            inner.extend(fact_tables(nested, name))
        elif value not in _EMPTY:
            rows.append((key.removesuffix("_bytes"), fact_text(value, key)))
    if rows:
        yield Table(title, rows)
    yield from inner


def shared_facts(measurements: Iterable[Measurement], omitted: str = "") -> list[Table]:
    """The facts of several measurements: those that all share, and the different values of the others by subject."""
    by_name: dict[str, dict[str, tuple[Any, list[str]]]] = {}
    texts: dict[int, str] = {}  # id → JSON: facts that a record has once are one object
    for measurement in measurements:
        for name, value in measurement.facts.items():
            if name != omitted:
                key = texts.get(id(value)) or texts.setdefault(id(value), json.dumps(value, sort_keys=True))
                by_name.setdefault(name, {}).setdefault(key, (value, []))[1].append(measurement.subject)
    shared = {name: value for name, values in by_name.items() if len(values) == 1 for value, _ in values.values()}
    tables = list(fact_tables(shared))
    rows = []
    for name, values in by_name.items():
        ordered = sorted(values.values(), key=lambda each: -len(each[1]))
        for value, subjects in ordered[:MAX_VALUES] if len(ordered) > 1 else ():
            named = and_more(sorted(subjects, key=natural_key), _MAX_NAMED)
            rows.append((name, named, fact_text(value, name)))
        if len(ordered) > MAX_VALUES:
            rows.append((name, f"and {len(ordered) - MAX_VALUES} more values in trial.json", ""))
    return [*tables, Table("different values", rows)] if rows else tables


def settings(config: Mapping[str, Any], origins: Mapping[str, str], prefix: str = "") -> Iterator[tuple[str, str, str]]:
    """(dotted name, value, origin) of each setting; the origin may be that of the nearest parent key."""
    for key, value in config.items():
        name = f"{prefix}{key}"
        if isinstance(value, dict) and value:
            yield from settings(value, origins, f"{name}.")
        else:
            while name not in origins and "." in name:
                name = name.rpartition(".")[0]
            yield f"{prefix}{key}", fact_text(value, key) or "none", origins.get(name, "not recorded")


def fact_text(value: Any, name: str = "") -> str:
    """A value on one line: numbers in binary units if ``name`` ends with _bytes, mappings as pairs."""
    if isinstance(value, dict):
        return f"({_pairs(value)})" if value else ""
    if isinstance(value, list):
        if any(isinstance(item, dict) for item in value):
            return str(len(value))  # records have a table of their own, but not in a cell
        return ", ".join(map(fact_text, value))
    if isinstance(value, bool) or value is None:
        return {True: "yes", False: "no", None: "–"}[value]
    if isinstance(value, int | float) and name.endswith("_bytes"):
        return format_bytes(value)
    return format_value(value, "") if isinstance(value, float) else str(value)


def _pairs(facts: Mapping[str, Any]) -> str:
    """``key value`` pairs on one line, without empty values."""
    return ", ".join(
        f"{key.removesuffix('_bytes')} {fact_text(value, key)}" for key, value in facts.items() if value not in _EMPTY
    )


def _is_nested(value: Any) -> bool:
    return bool(_records(value)) or (isinstance(value, dict) and bool(value))


def _records(value: Any) -> list[dict[str, Any]]:
    """The records of a list, or of a matrix of bandwidths between named GPUs; empty for another value."""
    if isinstance(value, list) and value and all(isinstance(item, dict) for item in value):
        return value
    if isinstance(value, dict) and set(value) == {"gpus", "gb_s"}:
        names, rates = value["gpus"], value["gb_s"]
        if isinstance(names, list) and isinstance(rates, list) and all(isinstance(row, list) for row in rates):
            return [
                {"GB/s": name, **dict(zip(names, row, strict=False))} for name, row in zip(names, rates, strict=False)
            ]
    return []
