"""The first lines of a log that look like errors, for a log without a known failure. Such lines are not causes."""

from __future__ import annotations

import re
from collections.abc import Iterator
from itertools import islice

from seatrial.diagnose.log_text import TO_NEWLINES, line_blocks
from seatrial.util.input_files import Readable
from seatrial.util.secrets import redacted

MAX_LINES = 5  # lines of a log that are reported
_MAX_BYTES = 2**24  # bytes of a log that are searched, at about 30 MB/s
_MAX_TEXT = 300  # characters of a line that are reported
_ERROR = re.compile(
    rb"\b(?:error|fatal|critical|panic|traceback)\b|\w(?:error|exception):|(?<!\b0 )\bfailed\b(?![=:] ?0\b)"
    rb"|\bexit(?:ed)?(?: with)?(?:[ _]?(?:code|status))?[ =:]{1,3}-?[1-9]",
    re.IGNORECASE,
)


def first_errors(file: Readable, source: str) -> list[tuple[str, str]]:
    """(source with line number, text) of the first lines with an error. Raises OSError if ``file`` cannot be read."""
    return list(islice(_errors(file, source), MAX_LINES))


def _errors(file: Readable, source: str) -> Iterator[tuple[str, str]]:
    lines_before = bytes_before = 0
    for block in line_blocks(file):
        text, position = block.translate(TO_NEWLINES), 0
        while match := _ERROR.search(text, position):
            # Every block ends with a line end, so that ``end`` is never -1
            begin, end = text.rfind(b"\n", 0, match.start()) + 1, text.find(b"\n", match.start())
            line = text[begin:end].decode("utf-8", errors="replace").strip()
            line_number = lines_before + block.count(b"\n", 0, begin) + 1
            yield f"{source}:{line_number}", redacted(line)[:_MAX_TEXT]
            position = end + 1
        lines_before += block.count(b"\n")
        bytes_before += len(block)
        if bytes_before >= _MAX_BYTES:
            return
