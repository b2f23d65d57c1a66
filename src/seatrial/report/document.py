"""A result other than a trial, as sections of lines and tables: for a terminal, as Markdown and as an HTML page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from rich.console import Console
from rich.text import Text

from seatrial.report.tables import STYLES, Table, print_tables
from seatrial.report.text import clean, single_line


@dataclass(frozen=True)
class Section:
    """Lines of text, then a table, below a title."""

    title: str
    lines: Sequence[str] = ()
    table: Table | None = None


@dataclass(frozen=True)
class Document:
    """``kind``: what it is, such as Comparison. ``result``: in one sentence; ``decision``: the value for its colour."""

    kind: str
    result: str
    decision: str
    sections: Sequence[Section]


def print_document(document: Document, console: Console) -> None:
    """Print the sections, then the result."""
    for section in document.sections:
        console.print(Text(section.title, "bold"))
        for line in section.lines:
            console.print(Text(f"  {single_line(clean(line))}"), soft_wrap=True)
        print_tables([section.table] if section.table else [], console)
        console.print()
    console.print(Text(single_line(clean(document.result)), STYLES[document.decision]))
