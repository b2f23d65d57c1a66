"""Shortened lists, errors in one line, escapes."""

from __future__ import annotations

import errno
import os

import pytest

from seatrial.util.text import and_more, cut_at_sentence, error_text, printable


def test_names_over_the_limit_are_counted() -> None:
    assert and_more(["a", "b", "c"], 2) == "a, b and 1 more"
    assert and_more(["a", "b", "c"], 2, separator="; ") == "a; b and 1 more"


def test_names_within_the_limit() -> None:
    assert and_more(["a", "b"], 2) == "a, b"
    assert and_more([], 2) == ""


@pytest.mark.parametrize(
    ("error", "text"),
    [
        (OSError(errno.ENOSPC, "No space left on device", "/x"), "/x: No space left on device"),
        (OSError(errno.EPIPE, "Broken pipe"), "Broken pipe"),
        (TimeoutError("timed out"), "timed out"),
        (ValueError(), "ValueError"),
    ],
)
def test_error_text_is_one_line(error: Exception, text: str) -> None:
    assert error_text(error) == text


def test_unprintable_characters_become_escapes() -> None:
    assert printable(os.fsdecode(b"eth\xff\n")) == r"eth\udcff\n"
    assert printable("Zürich") == "Zürich"


def test_a_long_text_ends_after_a_sentence_or_word() -> None:
    assert cut_at_sentence("All of it. Run: df -h", 21) == "All of it. Run: df -h"
    assert cut_at_sentence("All of it. Run: df -h", 20) == "All of it. …"
    assert cut_at_sentence("one two three", 12) == "one two …"
    assert cut_at_sentence("x" * 20, 10) == "x" * 9 + "…"
