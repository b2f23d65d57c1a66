"""Text functions of all reports: removal of terminal sequences and unprintable characters, dates.

Each report format (HTML, XML, Markdown, …) cleans text and escapes its special characters where text leaves.
"""

from __future__ import annotations

import re
from datetime import UTC, datetime

from seatrial.util.text import INVISIBLE

# Terminal sequences: CSI (colours, cursor), OSC (titles, links) and similar with their terminators, and escapes of two
# characters. A sequence without terminator is not matched, so that the text after it is kept.
_TERMINAL = re.compile(
    r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]"
    r"|\x1b\][^\x07\x1b]*(?:\x07|\x1b\\)"
    r"|\x1b[PX^_][^\x1b]*\x1b\\"
    r"|\x1b[ -/]*[0-OQ-WYZ`-~]"
)
# Control and invisible characters except tab and newline, line separators, halves of surrogate pairs, and the two code
# points that XML 1.0 forbids. They are replaced by U+FFFD, which stays visible.
_UNPRINTABLE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\ud800-\udfff\ufffe\uffff{INVISIBLE}]")
UNKNOWN_TIME = "unknown time"


def clean(text: str) -> str:
    """``text`` without terminal sequences; the remaining unprintable characters are replaced by U+FFFD."""
    if text.isprintable():
        return text
    text = _TERMINAL.sub("", text).replace("\r\n", "\n").replace("\r", "\n")
    return _UNPRINTABLE.sub("\ufffd", text)


def single_line(text: str) -> str:
    """``text`` as ``clean`` returns it, with each run of white space replaced by one blank."""
    return " ".join(clean(text).split())


def utc(seconds: float, format: str) -> str:
    """Unix seconds as a UTC date in ``format``; "unknown time" for a number out of range, as in a damaged record."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(format)
    except (ValueError, OverflowError, OSError):
        return UNKNOWN_TIME


def split_code(text: str) -> list[tuple[str, bool]]:
    """``text`` split into (piece, is_code): code, such as a command in a fix, is between backticks."""
    pieces = text.split("`")
    if len(pieces) % 2 == 0:  # an unpaired backtick is a plain character
        pieces[-2:] = ["`".join(pieces[-2:])]
    return [(piece, index % 2 == 1) for index, piece in enumerate(pieces) if piece]
