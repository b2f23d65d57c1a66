"""Search of logs for failure signatures, in constant memory and at the speed of the disk.

hyperscan finds candidates for all patterns in one pass over blocks of whole lines; Python's ``re`` confirms each of
them on its line. Only the first MAX_LINE bytes of a line count, so that the result does not depend on the blocks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from functools import cache
from typing import Any, Protocol

from seatrial.diagnose.signature import MAX_LINE, Signature
from seatrial.diagnose.signatures import Match, signatures
from seatrial.model import UsageError
from seatrial.util.log_time import log_time

BLOCK_BYTES = 2**20
# Lines before a match that are searched for a time if its line has none, and the bytes of each: fewer than MAX_LINE, so
# that a cut line gives the same result
_CONTEXT_LINES = 50
_CONTEXT_BYTES = 200


class Readable(Protocol):
    """A binary stream."""

    def read(self, size: int, /) -> bytes: ...


def search(file: Readable, source: str, ignore: str = "") -> Iterator[Match]:
    """The first line of each signature that occurs in the stream, in the order of the lines.

    ``source`` names the stream; lines that contain ``ignore`` do not count. Matches are yielded as soon as their block
    is read, for a log that is still written. Raises OSError if the stream cannot be read.
    """
    database, all_signatures = _database(), signatures()
    matched: set[int] = set()
    lines_before = 0
    context: list[bytes] = []
    for block in line_blocks(file):
        for begin, end, number in sorted(_candidates(database, block, matched)):
            line = block[begin : min(end, begin + MAX_LINE)].decode("utf-8", errors="replace")
            if number not in matched and all_signatures[number].matches(line) and not (ignore and ignore in line):
                matched.add(number)
                earlier = [*context, *_last_lines(block[:begin])][-_CONTEXT_LINES:]
                line_number = lines_before + block.count(b"\n", 0, begin) + 1
                yield Match(
                    signature=all_signatures[number],
                    line=line.strip(),
                    source=f"{source}:{line_number}",
                    time=_latest_time(earlier, line),
                )
        lines_before += block.count(b"\n")
        context = [*context, *_last_lines(block)][-_CONTEXT_LINES:]


def line_blocks(file: Readable) -> Iterator[bytes]:
    """The stream as blocks of whole lines; a line that is longer than a block is cut to MAX_LINE bytes."""
    rest, is_cut = b"", False
    while chunk := file.read(BLOCK_BYTES):
        if is_cut:
            newline = chunk.find(b"\n")
            if newline < 0:
                continue
            chunk, is_cut = chunk[newline:], False
        data = rest + chunk
        end = data.rfind(b"\n") + 1
        rest = data[end:]
        if end:
            yield data[:end]
        if len(rest) > max(MAX_LINE, BLOCK_BYTES):
            rest, is_cut = rest[:MAX_LINE], True
    if rest:
        yield rest + b"\n"


def _candidates(database: Any, block: bytes, matched: set[int]) -> set[tuple[int, int, int]]:
    """(begin of the line, end of the line, signature) of each line that may match a signature not in ``matched``."""
    candidates: set[tuple[int, int, int]] = set()
    seen_until: dict[int, int] = {}  # signature → end of its last line: a pattern may match many times on one line

    def on_match(number: int, _begin: int, end: int, _flags: int, _context: object) -> None:
        if number not in matched and end > seen_until.get(number, -1):
            line_begin = block.rfind(b"\n", 0, max(0, end - 1)) + 1
            seen_until[number] = line_end = block.find(b"\n", line_begin)
            candidates.add((line_begin, line_end, number))

    database.scan(block, match_event_handler=on_match)
    return candidates


@cache
def _database() -> Any:
    """The patterns of all signatures, compiled once: this takes about two seconds."""
    import hyperscan  # not needed to run a trial without failures

    all_signatures = signatures()
    database = hyperscan.Database()
    flags = hyperscan.HS_FLAG_MULTILINE | hyperscan.HS_FLAG_PREFILTER  # prefilter: lookarounds match too much here
    try:
        database.compile(
            expressions=[_expression(signature) for signature in all_signatures],
            ids=list(range(len(all_signatures))),
            elements=len(all_signatures),
            flags=[flags] * len(all_signatures),
        )
    except hyperscan.error as error:
        raise UsageError(f"a signature has a pattern that the search of logs does not support: {error}") from error
    return database


def _expression(signature: Signature) -> bytes:
    # hyperscan has no named groups of Python's form
    return re.sub(r"\(\?P<\w+>", "(?:", signature.pattern).encode()


def _last_lines(data: bytes) -> list[bytes]:
    """The beginnings of the last lines of ``data``, which is empty or ends with a newline."""
    lines = data.rsplit(b"\n", _CONTEXT_LINES + 1)[:-1]
    return [line[:_CONTEXT_BYTES] for line in lines[-_CONTEXT_LINES:]]


def _latest_time(earlier: list[bytes], line: str) -> float | None:
    """The time of ``line``, or of the closest line before it that has one."""
    lines = [*(text.decode("utf-8", errors="replace") for text in earlier), line[:_CONTEXT_BYTES]]
    return next((seconds for text in reversed(lines) if (seconds := log_time(text)) is not None), None)
