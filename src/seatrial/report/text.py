"""Text from logs and tools, made harmless once, before any report prints it.

Escaping for a format (HTML, XML, Markdown) is the business of that format; this is about what no report may carry:
terminal escape sequences, control characters, and invisible marks that reorder what a person reads.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from seatrial.model import Trial

# What a terminal would obey: CSI (colours, cursor), OSC (titles, links) and its like with their terminators, and
# escapes of two characters. A sequence without its end is not matched, lest it swallow the text behind it.
_TERMINAL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[PX^_][^\x1b]*\x1b\\"
    r"|\x1b[ -/]*[0-OQ-WYZ`-~]"
)
# Control characters but tab and newline, marks of direction, line separators, halves of surrogate pairs, and the two
# code points that XML 1.0 forbids. They become U+FFFD, so that a reader sees that something stood there.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(text: str) -> str:
    """``text`` without terminal sequences, every other unprintable character replaced by U+FFFD."""
    if text.isprintable():
        return text
    text = _TERMINAL.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNPRINTABLE.sub("\ufffd", text)


def sanitized(trial: Trial) -> Trial:
    """The same trial with every string in it cleaned: the first thing each renderer does, trial.json excepted."""
    return Trial.model_validate(_clean_all(trial.model_dump()))


def _clean_all(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_clean_all(key): _clean_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean_all(item) for item in value]
    return value


def one_line(text: str) -> str:
    """``text`` with every run of white space as a single blank."""
    return " ".join(text.split())


def utc(seconds: float, format: str) -> str:
    """Unix seconds as a date; empty where a damaged record holds a number that is none."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(format)
    except (ValueError, OverflowError, OSError):
        return ""


def plural(count: int, one: str, many: str = "") -> str:
    """``1 subject``, ``2 subjects``; ``many`` where an s does not make the plural."""
    return f"{count:,} {one if count == 1 else many or f'{one}s'}"


def prose(text: str) -> list[tuple[str, bool]]:
    """Text in pieces, each with whether it stood between backticks, as commands do in reasons and fixes."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # a backtick without its partner is only a character
        pieces[-2:] = ["`".join(pieces[-2:])]
    return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]
