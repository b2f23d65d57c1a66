"""Removal of terminal sequences and unprintable characters; other text functions."""

from __future__ import annotations

import io
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from seatrial import report
from seatrial.report.terminal import summary
from seatrial.report.text import clean, split_code
from seatrial.util.text import INVISIBLE, plural
from tests.report import samples


@pytest.mark.parametrize(
    ("raw", "expected"),
    [
        ("plain", "plain"),
        ("\x1b[1;31mred\x1b[0m", "red"),
        ("\x9b31mred", "red"),
        ("\x1b]8;;http://x\x07link\x1b]8;;\x07", "link"),
        ("\x1b]0;title\x1b\\text", "text"),
        ("\x1bPq#0\x1b\\text", "text"),
        ("\x1bcreset", "reset"),
        ("\x1b]0;no end, then evidence", "\ufffd]0;no end, then evidence"),
        ("50%\r100%\r\ndone", "50%\n100%\ndone"),
        ("a\x00b\x08c\x7f", "a\ufffdb\ufffdc\ufffd"),
        ("\u202egnp.exe", "\ufffdgnp.exe"),
        ("tab\tand\nnewline", "tab\tand\nnewline"),
        ("مرحبا שלום", "مرحبا שלום"),
        ("half \ud800", "half \ufffd"),
        ("pass\u200bed\u2060 \ufeffall\u00ad", "pass\ufffded\ufffd \ufffdall\ufffd"),
        ("tag \U000e0041", "tag \ufffd"),
        ("caf\u00e9\u00a05 \U0001f600\ufe0f", "caf\u00e9\u00a05 \U0001f600\ufe0f"),
    ],
)
def test_terminal_sequences_and_unprintable_characters_are_removed(raw: str, expected: str) -> None:
    assert clean(raw) == expected


@given(st.text())
def test_cleaned_text_has_no_control_characters(text: str) -> None:
    cleaned = clean(text)
    assert all(character in "\t\n" or ord(character) >= 32 for character in cleaned)
    assert not set(cleaned) & {"\x1b", "\x7f", "\x9b", "\u2028", "\u202e", "\u2066", "\u200b", "\u2060", "\ufeff"}
    cleaned.encode()
    assert clean(cleaned) == cleaned


@pytest.mark.parametrize("format", ["terminal", *(name for name in report.FORMATS if name not in ("json", "summary"))])
def test_no_report_has_invisible_characters_of_a_log(format: str) -> None:
    trial, file = samples.hostile(), io.StringIO()
    if format == "terminal":
        summary(trial, Console(file=file, width=200), verbose=True)
    text = file.getvalue() or report.render(trial, format)
    own = re.sub("(?<=[@#])\u200b", "", text)  # Markdown: no mention, and no link to an issue
    assert "PA" in own
    assert not re.search(f"[{INVISIBLE}]", own)


@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("run `ls`, then `df -h`", [("run ", False), ("ls", True), (", then ", False), ("df -h", True)]),
        ("a ` alone", [("a ` alone", False)]),
        ("`x` and ` alone", [("x", True), (" and ` alone", False)]),
        ("", []),
    ],
)
def test_code_is_between_backticks(text: str, pieces: list[tuple[str, bool]]) -> None:
    assert split_code(text) == pieces


def test_plural() -> None:
    assert plural(1, "process", "processes") == "1 process"
    assert plural(2, "process", "processes") == "2 processes"
    assert plural(1200, "node") == "1,200 nodes"
