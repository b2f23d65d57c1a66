"""Search of logs for failure signatures, in constant memory and at the speed of the disk.

hyperscan finds candidates for all patterns in one pass over blocks of whole lines, by the literals of the patterns;
Python's ``re`` confirms each of them on its line. Only the first MAX_LINE bytes of a line count, so that the result
does not depend on the blocks. Lines end at a newline, carriage return or zero byte, and are numbered by newlines, as by
editors.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from functools import cache
from typing import Any, NamedTuple

from seatrial.diagnose.healthy_lines import is_healthy
from seatrial.diagnose.log_origin import LogOrigins
from seatrial.diagnose.log_text import TO_NEWLINES, line_blocks
from seatrial.diagnose.patterns import compile_patterns, literal_database
from seatrial.diagnose.signature import MAX_LINE, Signature
from seatrial.diagnose.signatures import Match, all_signatures
from seatrial.util.input_files import Readable
from seatrial.util.log_time import log_time

# Lines before a match that are searched for a time if its line has none, and the bytes of each: fewer than MAX_LINE, so
# that a cut line gives the same result
_CONTEXT_LINES = 50
_CONTEXT_BYTES = 200
# Lines with the literals of a pattern that do not match it: beyond them compiling the pattern takes less time. A reason
# that so many healthy lines have is not searched any more
_MAX_REJECTED = 5000
# Events of signatures that literals no longer decide: beyond them a database without these signatures takes less time
_MAX_IGNORED = 2_000_000


def search(file: Readable, source: str, ignore: str = "", origins: LogOrigins | None = None) -> Iterator[Match]:
    """The first line of each signature that occurs in the stream, in the order of the lines.

    ``source`` names the stream; lines that contain ``ignore`` do not count. ``origins`` reads the blocks too. Matches
    are yielded as soon as their block is read, for a log that is still written. Raises OSError if the stream cannot be
    read.
    """
    searched = all_signatures()  # sets and candidates below have the numbers of signatures in this tuple
    reasons = {number for number, each in enumerate(searched) if each.role in ("family", "general")}
    matched: set[int] = set()
    finished: set[int] = set()  # not searched any more: matched, or without use
    rejected: Counter[int] = Counter()  # signature → candidates that do not match it
    not_new: Counter[int] = Counter()  # signature → lines that match it and that other signatures name already
    database: Any = None  # an empty log needs none
    ignored_events = 0
    lines_before = 0
    context: list[bytes] = []
    for block in line_blocks(file):
        text = block.translate(TO_NEWLINES)
        if origins:
            origins.read(text, source)
        by_pattern = frozenset(number for number, lines in rejected.items() if lines > _MAX_REJECTED)
        database = database or _database(has_reasons=not reasons <= finished)
        candidates, ignored = _candidates(database, text, finished, by_pattern)
        ignored_events += ignored
        if ignored_events > _MAX_IGNORED:
            undecided = {n: each for n, each in enumerate(searched) if n not in finished | by_pattern}
            database = compile_patterns(undecided)
            ignored_events = 0
        for begin, end, number in sorted(candidates):
            signature, line = searched[number], _line_text(text, begin, end)
            if number in finished or (ignore and ignore in line):
                continue
            if not signature.matches(line):
                rejected[number] += 1
                continue
            # others that match this line are in ``matched`` by now, since families and general signatures come last
            if _is_new(signature, line, [searched[other] for other in matched]) and not (
                signature.role == "general" and _is_named_below(text, line, end, candidates)
            ):
                matched.add(number)
                finished.add(number)
                if signature.role == "root" and not reasons <= finished:
                    finished |= reasons  # not reported with a root
                    database = None
                earlier = [*context, *_last_lines(text[:begin])][-_CONTEXT_LINES:]
                line_number = lines_before + block.count(b"\n", 0, begin) + 1
                time = _latest_time(earlier, line)
                yield Match(signature=signature, line=line.strip(), source=f"{source}:{line_number}", time=time)
            else:
                not_new[number] += 1
                if not_new[number] > _MAX_REJECTED:
                    finished.add(number)
        lines_before += block.count(b"\n")
        context = [*context, *_last_lines(text)][-_CONTEXT_LINES:]


def _is_new(signature: Signature, line: str, matched: Iterable[Signature]) -> bool:
    """Whether ``signature``, which matches ``line``, adds something to the others, by their roles.

    A general signature adds nothing to another one. A family adds the reason to a failed step of the line, such as
    "MountVolume.SetUp failed for volume x: permission denied", and to a consequence on its left. Neither is searched in
    healthy lines.
    """
    if signature.role not in ("family", "general"):
        return True
    if is_healthy(line):
        return False
    if signature.role == "general":
        return not any(other.matches(line) for other in matched)
    begin, _ = signature.span(line) or (0, 0)
    for other in matched:
        span = other.span(line)
        if span is None or other.role == "step":
            continue
        _, other_end = span
        if other.role != "cascade" or other_end > begin:
            return False
    return True


class _Candidate(NamedTuple):
    """A line, by its first byte and the byte after its last one, that may match the signature with this number."""

    begin: int
    end: int
    number: int


def _line_text(text: bytes, begin: int, end: int) -> str:
    """At most MAX_LINE bytes of a line of ``text``."""
    return text[begin : min(end, begin + MAX_LINE)].decode("utf-8", errors="replace")


def _is_named_below(text: bytes, line: str, end: int, candidates: set[_Candidate]) -> bool:
    """Whether ``line`` is an error without its message, such as "RuntimeError:", and a signature matches the next line.

    ``end``: the end of ``line`` in ``text``. General signatures do not count.
    """
    if not line.rstrip().endswith(":"):
        return False
    for candidate in candidates:
        signature = all_signatures()[candidate.number]
        is_below = candidate.begin == end + 1 and signature.role != "general"
        if is_below and signature.matches(_line_text(text, candidate.begin, candidate.end)):
            return True
    return False


def _candidates(
    database: Any, block: bytes, finished: set[int], by_pattern: frozenset[int]
) -> tuple[set[_Candidate], int]:
    """The candidates for signatures not in ``finished``, and the number of events of literals that were ignored.

    ``by_pattern``: the signatures that are searched by their whole patterns and not by the literals of ``database``.
    """
    ignored_events = 0
    candidates: set[_Candidate] = set()
    seen_until: dict[int, int] = {}  # signature → end of its last line: a pattern may match many times on one line

    def on_match(number: int, _begin: int, end: int, _flags: int, _context: object) -> None:
        nonlocal ignored_events
        if number in ignored:
            ignored_events += 1
        elif end > seen_until.get(number, -1):
            line_begin = block.rfind(b"\n", 0, max(0, end - 1)) + 1
            seen_until[number] = line_end = block.find(b"\n", line_begin)
            candidates.add(_Candidate(line_begin, line_end, number))

    ignored = finished | by_pattern  # read by on_match
    database.scan(block, match_event_handler=on_match)
    ignored_literal_events = ignored_events
    if by_pattern:
        ignored = finished
        _pattern_database(by_pattern).scan(block, match_event_handler=on_match)
    return candidates, ignored_literal_events


@cache
def _database(*, has_reasons: bool) -> Any:
    """The database with the literals of all signatures; without ``has_reasons``, not of families and general errors."""
    numbered = dict(enumerate(all_signatures()))
    if has_reasons:
        return literal_database(numbered)
    specific = {number: each for number, each in numbered.items() if each.role not in ("family", "general")}
    return literal_database(specific, "patterns_of_roots")


@cache
def _pattern_database(numbers: frozenset[int]) -> Any:
    searched = all_signatures()
    return compile_patterns({number: searched[number] for number in sorted(numbers)}, by_literals=False)


def _last_lines(data: bytes) -> list[bytes]:
    """The beginnings of the last lines of ``data``, which is empty or ends with a newline."""
    lines = data.rsplit(b"\n", _CONTEXT_LINES + 1)[:-1]
    return [line[:_CONTEXT_BYTES] for line in lines[-_CONTEXT_LINES:]]


def _latest_time(earlier: list[bytes], line: str) -> float | None:
    """The time of ``line`` in Unix seconds, else of the closest line before it that has a time; None without one."""
    lines = [*(text.decode("utf-8", errors="replace") for text in earlier), line[:_CONTEXT_BYTES]]
    times = map(log_time, reversed(lines))
    return next((time for time in times if time is not None), None)
