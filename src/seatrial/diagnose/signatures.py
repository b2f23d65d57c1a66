"""Failure signatures: what a line of a log means. The patterns are data, and their examples prove them."""

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

# Logs are hostile: a pattern never sees more of a line than this.
MAX_LINE = 4096


class Signature(Frozen):
    """One kind of failure. ``symptom`` marks what follows from another failure and is never the cause by itself."""

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
        return self._regex.search(line[:MAX_LINE]) is not None

    def first_line(self, text: str, lines: Sequence[str], starts: Sequence[int]) -> int | None:
        """Index of the first of ``lines`` that matches. ``text`` is all of them; they begin in it at ``starts``."""
        position = 0
        while match := self._regex.search(text, position):
            number = bisect_right(starts, match.start()) - 1
            if self.matches(lines[number]):  # and not only together with the next line
                return number
            position = starts[number + 1]
        return None


class Match(Frozen):
    """A signature found in a text, with the line that shows it."""

    signature: Signature
    line: str
    source: str


@cache
def signatures() -> tuple[Signature, ...]:
    """Every signature that ships with seatrial."""
    return tuple(Signature.model_validate(row) for rows in data_files.read_all("signatures") for row in rows)


def search(lines: Iterable[str], source: str) -> list[Match]:
    """The first line for each signature that occurs in ``lines``; ``source`` says where they come from (``file``).

    Each pattern runs once over the whole text and not over each line, of which a log of 4 MiB may have millions.
    """
    kept = [line[:MAX_LINE] for line in lines]
    starts = list(accumulate((len(line) + 1 for line in kept), initial=0))
    text = "\n".join(kept)
    first = [(signature.first_line(text, kept, starts), signature) for signature in signatures()]
    return [
        Match(signature=signature, line=kept[number].strip(), source=f"{source}:{number + 1}")
        for number, signature in sorted(((n, s) for n, s in first if n is not None), key=itemgetter(0))
    ]
