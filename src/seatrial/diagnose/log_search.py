"""Search of logs for failure signatures, in constant memory and at the speed of the disk.

hyperscan finds candidates for all patterns in one pass over blocks of whole lines, by the literals of the patterns;
Python's ``re`` confirms each of them on its line. Only the first MAX_LINE bytes of a line count, so that the result
does not depend on the blocks. Lines end at a newline, carriage return or zero byte, and are numbered by newlines, as by
editors.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, partial
from io import BytesIO
from typing import Any, NamedTuple

from seatrial.diagnose.line_severity import has_failure_sign, has_program, is_healthy
from seatrial.diagnose.log_origin import LogOrigins
from seatrial.diagnose.log_text import TO_NEWLINES, line_blocks
from seatrial.diagnose.patterns import cached_database, compile_patterns, reduced_database
from seatrial.diagnose.signature import MAX_LINE, Match, Signature, place_of
from seatrial.diagnose.signatures import LAST_ROLES, all_signatures
from seatrial.util.input_files import Readable
from seatrial.util.log_time import log_time

# Lines before a match that may have its time, the title of its block or the frames of its traceback, and the bytes of
# each: fewer than MAX_LINE, so that a cut line gives the same result
_CONTEXT_LINES = 300
_TIME_LINES = 50
_CONTEXT_BYTES = 200
# Lines with the literals of a pattern that do not match it: beyond them compiling the pattern takes less time
_MAX_REJECTED = 5000
# Events of signatures that literals no longer decide: beyond them a database without these signatures takes less time
_MAX_IGNORED = 1_500_000
_MAX_PLACES = 16  # devices or nodes of one failure that are reported
_MAX_ERROR_LINES = 20  # different lines of a log that only look like errors
# Lines after which a signature is not searched any more: they name no new place, are healthy, or, of a reason or a line
# that only looks like an error, do not match
_MAX_REPEATED = 500
_MAX_HEALTHY = 5000
_MAX_NO_ERRORS = 50_000
_NUMBERS = re.compile(r"[0-9a-fA-F]*\d[0-9a-fA-F]*")  # also addresses; lines that differ in them only are equal
# A file of an installed package, or of a framework that is used from its source folder. Ray only relays exceptions
_FRAME = re.compile(
    r'(?:File "|│ )[^"\s]{0,200}?/(?:(?:site|dist)-packages/(?!ray/)'
    r"|(?=(?:megatron|nemo|torchtitan|verl|axolotl|llamafactory|trl)/))(\w{1,60})"
)
# Findings that seatrial printed into the log quote the lines of another one
_OWN_OUTPUT = re.compile(r"^ {2}(?:cause {6}|run first {2}|fix {8})|; confidence: (?:low|medium|high)\)\s{0,3}$")
_REASONS = ("family", "general", "error_line")  # not reported with a root


def search(file: Readable, source: str, ignore: str = "", origins: LogOrigins | None = None) -> Iterator[Match]:
    """The first line of each signature that occurs in the stream, in the order of the lines.

    Of a signature that names a place, the first line of each place; of lines that only look like errors, the first
    different ones. ``source`` names the stream; lines that contain ``ignore`` do not count. ``origins`` reads the
    blocks too. Matches are yielded as soon as their block is read, for a log that is still written. Raises OSError if
    the stream cannot be read.
    """
    state = _Search(source, ignore)
    for block in line_blocks(file):
        text = block.translate(TO_NEWLINES)
        if origins:
            origins.read(text, source)
        yield from state.matches(block, text)


def search_text(text: str, source: str) -> list[Match]:
    """The first match of each root, step or cascade in a text such as an error; ``source`` names its check."""
    matches: dict[str, Match] = {}
    for match in search(BytesIO(text.encode(errors="replace")), source) if text else ():
        if match.signature.role not in LAST_ROLES:
            matches.setdefault(match.signature.id, match)
    return list(matches.values())


class _Candidate(NamedTuple):
    """A line, by its first byte and the byte after its last one, that may match the signature with this number."""

    begin: int
    end: int
    number: int


@dataclass
class _Search:
    """What was found in the blocks before; numbers of signatures are those of all_signatures."""

    source: str
    ignore: str
    _database: Any = None  # an empty log needs none
    _ignored_events: int = 0  # since the last database
    _has_root: bool = False  # reasons are not searched any more
    _finished: set[int] = field(default_factory=set)  # not searched any more: matched, or without use
    _rejected: Counter[int] = field(default_factory=Counter)  # signature → candidates that do not match it
    _matched: dict[int, set[str]] = field(default_factory=dict)  # signature → its places, or texts of error lines
    _not_new: Counter[int] = field(default_factory=Counter)  # signature → lines that match it and add nothing
    _lines_before: int = 0
    _context: list[bytes] = field(default_factory=list)

    def matches(self, block: bytes, text: bytes) -> Iterator[Match]:
        """The new matches in a block; ``text``: the block with newlines only."""
        candidates = self._candidates(text)
        for begin, end, number in sorted(candidates):
            signature, line = all_signatures()[number], _line_text(text, begin, end)
            if number in self._finished or (self.ignore and self.ignore in line) or _OWN_OUTPUT.search(line):
                continue
            above = cache(partial(self._above, text, begin))
            values = signature.values(line, above)
            if values is None:
                self._reject(number, signature)
                continue
            key = _NUMBERS.sub("", line) if signature.role == "error_line" else place_of(values)
            if not self._is_new(number, line, key) or (
                signature.role in _REASONS and not _is_failure(signature, text, begin, end, candidates)
            ):
                self._add_repeated(number, signature)
                continue
            self._add(number, signature, key)
            line_number = self._lines_before + block.count(b"\n", 0, begin) + 1
            frames = _FRAME.findall("\n".join(above())) if signature.role in ("general", "family") else []
            yield Match(
                signature=signature,
                line=line.strip(),
                source=f"{self.source}:{line_number}",
                values=values,
                time=_latest_time(above()[-_TIME_LINES:], line),
                raised_in=frames[-1] if frames else "",
            )
        self._lines_before += block.count(b"\n")
        self._context = [*self._context, *_last_lines(text)][-_CONTEXT_LINES:]

    def _candidates(self, text: bytes) -> set[_Candidate]:
        """The lines of a block that may match, for each signature that is still searched."""
        by_pattern = frozenset(number for number, lines in self._rejected.items() if lines > _MAX_REJECTED)
        if self._ignored_events > _MAX_IGNORED:
            self._ignored_events, numbered = 0, dict(enumerate(all_signatures()))
            useless = (self._finished - _revocable()) | by_pattern
            self._database = reduced_database(numbered, sorted(numbered.keys() - useless))
        self._database = self._database or _database(has_reasons=not self._has_root)
        candidates: set[_Candidate] = set()
        seen_until: dict[int, int] = {}  # signature → end of its last line: a pattern may match many times on one line
        ignored_events, ignored = 0, self._finished | by_pattern

        def on_match(number: int, _begin: int, end: int, _flags: int, _context: object) -> None:
            nonlocal ignored_events
            if number in ignored:
                ignored_events += 1
            elif end > seen_until.get(number, -1):
                line_begin = text.rfind(b"\n", 0, max(0, end - 1)) + 1
                seen_until[number] = line_end = text.find(b"\n", line_begin)
                candidates.add(_Candidate(line_begin, line_end, number))

        self._database.scan(text, match_event_handler=on_match)
        self._ignored_events += ignored_events
        if by_pattern:
            ignored = self._finished
            _pattern_database(by_pattern).scan(text, match_event_handler=on_match)
        return candidates

    def _above(self, text: bytes, begin: int) -> list[str]:
        lines = [*self._context, *_last_lines(text[:begin])][-_CONTEXT_LINES:]
        return [line.decode("utf-8", errors="replace") for line in lines]

    def _reject(self, number: int, signature: Signature) -> None:
        self._rejected[number] += 1
        if self._rejected[number] > _MAX_NO_ERRORS and signature.role in _REASONS:
            self._finished.add(number)

    def _add_repeated(self, number: int, signature: Signature) -> None:
        self._not_new[number] += 1
        limit = _MAX_REPEATED if number in self._matched else _MAX_HEALTHY
        if self._not_new[number] > (_MAX_NO_ERRORS if signature.role == "error_line" else limit):
            self._finished.add(number)

    def _add(self, number: int, signature: Signature, key: str) -> None:
        """Note a match, and which signatures need no further search because of it."""
        if signature.role == "recovery":
            for ended in self._ended_by(signature):
                del self._matched[ended]
                self._finished.discard(ended)
            return
        keys = self._matched.setdefault(number, set())
        keys.add(key)
        if not key or len(keys) >= (_MAX_ERROR_LINES if signature.role == "error_line" else _MAX_PLACES):
            self._finished.add(number)
        if signature.role == "root" and not signature.requires and number not in _revocable() and not self._has_root:
            self._has_root, self._database = True, None
            self._finished |= {other for other, each in enumerate(all_signatures()) if each.role in _REASONS}

    def _ended_by(self, recovery: Signature) -> list[int]:
        return [each for each in self._matched if recovery.confirms_signature(all_signatures()[each].id)]

    def _is_new(self, number: int, line: str, key: str) -> bool:
        """Whether the signature, which matches ``line``, adds something to the others, by their roles.

        A general signature or error line adds nothing to another one. A family adds the reason to a failed step of the
        line, such as "MountVolume.SetUp failed for volume x: permission denied", and to a consequence on its left. None
        of them is searched in healthy lines. Others that match the line are known by now, since these come last.
        """
        signature = all_signatures()[number]
        if key in self._matched.get(number, ()):
            return False
        if signature.role == "recovery":
            return bool(self._ended_by(signature))
        if signature.role not in _REASONS:
            return True
        if is_healthy(line):
            return False
        known = (all_signatures()[each] for each in self._matched)
        others = [each for each in known if each.role not in ("error_line", "fact", "recovery")]
        if signature.role != "family":
            return not any(other.matches(line) for other in others)
        begin, _ = signature.span(line) or (0, 0)
        spans = ((other.role, other.span(line)) for other in others if other.role != "step")
        return not any(span and (role != "cascade" or span[1] > begin) for role, span in spans)


def _line_text(text: bytes, begin: int, end: int) -> str:
    """At most MAX_LINE bytes of a line of ``text``."""
    return text[begin : min(end, begin + MAX_LINE)].decode("utf-8", errors="replace")


def _is_failure(signature: Signature, text: bytes, begin: int, end: int, candidates: set[_Candidate]) -> bool:
    """Whether a line of ``text`` or one beside it has a sign of a failure, and the next line does not name it.

    A message of a program is one too, since families match words of errors only; its neighbours need not be of errors.

    An error without its message, such as "RuntimeError:", is named by a signature that matches the next line.
    """
    line = _line_text(text, begin, end)
    if signature.role != "family" and line.rstrip().endswith(":"):
        for candidate in candidates:
            other = all_signatures()[candidate.number]
            is_below = candidate.begin == end + 1 and other.role not in ("general", "error_line", "fact")
            if is_below and other.matches(_line_text(text, candidate.begin, candidate.end)):
                return False
    above = text.rfind(b"\n", 0, max(0, begin - 1)) + 1
    below = text.find(b"\n", end + 1)
    beside = (_line_text(text, above, begin), _line_text(text, end + 1, below) if below > 0 else "")
    return has_program(line) or any(map(has_failure_sign, (line, *beside)))


@cache
def _database(*, has_reasons: bool) -> Any:
    """The database of all signatures, by literals; without ``has_reasons``, not of those that a root hides."""
    numbered = dict(enumerate(all_signatures()))
    if has_reasons:
        return cached_database(numbered)
    specific = {number: each for number, each in numbered.items() if each.role not in _REASONS}
    return cached_database(specific, "patterns_of_roots")


@cache
def _pattern_database(numbers: frozenset[int]) -> Any:
    searched = all_signatures()
    return compile_patterns({number: searched[number] for number in sorted(numbers)}, by_literals=False)


@cache
def _revocable() -> frozenset[int]:
    """The signatures that a recovery can end."""
    recoveries = [each for each in all_signatures() if each.role == "recovery"]
    ended = (any(each.confirms_signature(other.id) for each in recoveries) for other in all_signatures())
    return frozenset(number for number, is_ended in enumerate(ended) if is_ended)


def _last_lines(data: bytes) -> list[bytes]:
    """The beginnings of the last lines of ``data``, which is empty or ends with a newline."""
    lines = data.rsplit(b"\n", _CONTEXT_LINES + 1)[:-1]
    return [line[:_CONTEXT_BYTES] for line in lines[-_CONTEXT_LINES:]]


def _latest_time(earlier: list[str], line: str) -> float | None:
    """The time of ``line`` in Unix seconds, else of the closest line before it that has a time; None without one."""
    times = map(log_time, reversed([*earlier, line[:_CONTEXT_BYTES]]))
    return next((time for time in times if time is not None), None)
