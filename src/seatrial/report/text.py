"""Text functions of all reports: removal of terminal sequences and unprintable characters, dates.

Each report format (HTML, XML, Markdown) escapes its special characters itself.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime
from typing import Any

from seatrial.model import Trial

# Terminal sequences: CSI (colours, cursor), OSC (titles, links) and similar with their terminators, and escapes of two
# characters. A sequence without terminator is not matched, so that the text after it is kept.
_TERMINAL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[PX^_][^\x1b]*\x1b\\"
    r"|\x1b[ -/]*[0-OQ-WYZ`-~]"
)
# Control characters except tab and newline, direction marks, line separators, halves of surrogate pairs, and the two
# code points that XML 1.0 forbids. They are replaced by U+FFFD, which stays visible.
_UNPRINTABLE = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u2028-\u202e\u2066-\u2069\ud800-\udfff\ufffe\uffff]"
)


def clean(text: str) -> str:
    """``text`` without terminal sequences; the remaining unprintable characters are replaced by U+FFFD."""
    if text.isprintable():
        return text
    text = _TERMINAL.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNPRINTABLE.sub("\ufffd", text)


def sanitized(trial: Trial) -> Trial:
    """The trial with all strings cleaned. Every renderer except JSON calls it first."""
    return Trial.model_validate(_clean_all(trial.model_dump()))


def _clean_all(value: Any) -> Any:
    if isinstance(value, str):
        return clean(value)
    if isinstance(value, dict):
        return {_clean_all(key): _clean_all(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_clean_all(item) for item in value]
    return value


def single_line(text: str) -> str:
    """``text`` with each run of white space replaced by one blank."""
    return " ".join(text.split())


def utc(seconds: float, format: str) -> str:
    """Unix seconds as a UTC date in ``format``; empty for a number out of range, as in a damaged record."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(format)
    except (ValueError, OverflowError, OSError):
        return ""


def split_code(text: str) -> list[tuple[str, bool]]:
    """``text`` split into (piece, is_code): code, such as a command in a fix, is between backticks."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # an unpaired backtick is a plain character
        pieces[-2:] = ["`".join(pieces[-2:])]
    return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]
