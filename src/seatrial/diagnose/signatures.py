"""Failure signatures: patterns of log lines, their causes and fixes, from data/signatures."""

from __future__ import annotations

import re
from bisect import bisect_right
from collections.abc import Iterable, Sequence
from functools import cache, cached_property
from itertools import accumulate
from operator import itemgetter
from typing import Literal

from seatrial.model import Frozen
from seatrial.util import data_files

# Patterns are applied to this many characters of a line, since logs may contain lines of any length
MAX_LINE = 4096


class Signature(Frozen):
    """One kind of failure; the role ``symptom`` marks a consequence of another failure."""

    id: str
    title: str
    pattern: str
    role: Literal["cause", "symptom"] = "cause"
    cause: str
    first_command: str
    fix: str
    source: str
    examples: tuple[str, ...]
    counter_examples: tuple[str, ...]

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE)

    def matches(self, line: str) -> bool:
        """Whether the pattern occurs in ``line``."""
        return self._regex.search(line[:MAX_LINE]) is not None

    def first_line(self, text: str, lines: Sequence[str], starts: Sequence[int]) -> int | None:
        """The index of the first matching line, or None; ``text`` contains ``lines``, which begin at ``starts``."""
        position = 0
        while match := self._regex.search(text, position):
            number = bisect_right(starts, match.start()) - 1
            if self.matches(lines[number]):  # else the match extends into the next line
                return number
            position = starts[number + 1]
        return None


class Match(Frozen):
    """A signature that occurs in a text, with the matching line."""

    signature: Signature
    line: str
    source: str


@cache
def signatures() -> tuple[Signature, ...]:
    """All signatures that ship with seatrial."""
    return tuple(Signature.model_validate(row) for rows in data_files.read_all("signatures") for row in rows)


def search(lines: Iterable[str], source: str) -> list[Match]:
    """One match per signature that occurs in ``lines``: its first line; ``source`` names the file or check.

    Each pattern runs once over the whole text, since a log of 4 MiB may have millions of lines.
    """
    cut_lines = [line[:MAX_LINE] for line in lines]
    starts = list(accumulate((len(line) + 1 for line in cut_lines), initial=0))
    text = "\n".join(cut_lines)
    first_lines = [(signature.first_line(text, cut_lines, starts), signature) for signature in signatures()]
    return [
        Match(signature=signature, line=cut_lines[number].strip(), source=f"{source}:{number + 1}")
        for number, signature in sorted(((n, s) for n, s in first_lines if n is not None), key=itemgetter(0))
    ]
