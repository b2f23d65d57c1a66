"""Output streams: lines in a file have no trailing blanks."""

from __future__ import annotations

import io

import pytest
from rich.table import Table
from rich.text import Text

from seatrial.report.console import Stream


def table() -> Table:
    grid = Table.grid(expand=True)
    grid.add_column()
    grid.add_row("one")
    grid.add_row(Text("[two]"))
    return grid


def test_lines_in_a_file_have_no_trailing_blanks() -> None:
    file = io.StringIO()
    stream = Stream(file=file)
    stream.print(table())
    stream.print("[bold]three[/] \\[four]")
    assert file.getvalue() == "one\n[two]\nthree [four]\n"


@pytest.mark.parametrize("is_terminal", [True, False])
def test_a_mac_address_is_not_read_as_an_emoji_code(is_terminal: bool) -> None:
    file = io.StringIO()
    Stream(file=file, force_terminal=is_terminal, color_system=None).print("mac b6:cd:ab:9b:20:0e", highlight=False)
    assert file.getvalue() == "mac b6:cd:ab:9b:20:0e\n"


def test_lines_on_a_terminal_are_unchanged() -> None:
    file = io.StringIO()
    stream = Stream(file=file, force_terminal=True, color_system=None, width=20)
    stream.print(table())
    assert file.getvalue() == f"{'one':<20}\n{'[two]':<20}\n"


def test_the_width_in_COLUMNS_applies_to_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10")
    file = io.StringIO()
    stream = Stream(file=file)
    stream.print("a b c d e f g h")
    assert file.getvalue() == "a b c d e\nf g h\n"


def test_lines_in_a_file_are_not_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    file = io.StringIO()
    Stream(file=file).print("word " * 100)
    assert file.getvalue().count("\n") == 1
