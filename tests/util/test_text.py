"""Shortened lists."""

from __future__ import annotations

from seatrial.util.text import and_more


def test_names_over_the_limit_are_counted() -> None:
    assert and_more(["a", "b", "c"], 2) == "a, b and 1 more"
    assert and_more(["a", "b", "c"], 2, separator="; ") == "a; b and 1 more"


def test_names_within_the_limit() -> None:
    assert and_more(["a", "b"], 2) == "a, b"
    assert and_more([], 2) == ""
