"""Failure signatures: patterns of log lines, their causes and fixes, from data/signatures."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterable
from functools import cache, cached_property
from typing import Literal

from pydantic import Field

from seatrial.diagnose.xid import xid_rows
from seatrial.model import Frozen
from seatrial.model.trial import Action
from seatrial.util import data_files

# Patterns are applied to this many bytes of a line, since logs may contain lines of any length
MAX_LINE = 4096
Role = Literal["root", "cascade", "confirmation", "advice"]


class Signature(Frozen):
    """One kind of failure.

    Role ``root``: a cause. ``cascade``: a consequence of another failure, reported if the log has no root.
    ``confirmation``: evidence of a failure that other lines name. ``advice``: text that a program prints with many
    failures. The last two are never reported alone.
    """

    id: str
    title: str
    pattern: str
    role: Role = "root"
    cause: str
    first_command: str
    fix: str
    action: Action
    source: str
    examples: tuple[str, ...] = Field(min_length=1)
    counter_examples: tuple[str, ...] = Field(min_length=1)

    @cached_property
    def _regex(self) -> re.Pattern[str]:
        return re.compile(self.pattern, re.MULTILINE | re.ASCII)

    def matches(self, line: str) -> bool:
        """Whether the pattern occurs in ``line``."""
        return self._regex.search(line[:MAX_LINE]) is not None

    def filled(self, text: str, line: str) -> str:
        """``text`` with the named groups of the pattern, such as ``{bdf}``, replaced by their values in ``line``.

        The values are quoted for a shell, since a user may paste the command and anybody may write a line of a log.
        """
        match = self._regex.search(line[:MAX_LINE])
        for name, value in (match.groupdict() if match else {}).items():
            text = text.replace(f"{{{name}}}", shlex.quote(value or ""))
        return text


class Match(Frozen):
    """A signature that occurs in a text, with the matching line; ``time``: Unix seconds, None if unknown."""

    signature: Signature
    line: str
    source: str
    time: float | None = None


@cache
def signatures() -> tuple[Signature, ...]:
    """All signatures that ship with seatrial, and those of the site."""
    shipped = [row for rows in data_files.read_all("signatures") for row in rows]
    return tuple(Signature.model_validate(row) for row in [*shipped, *xid_rows()])


def search_lines(lines: Iterable[str], source: str) -> list[Match]:
    """One match per signature that occurs in a short text such as an error; ``source`` names the check."""
    found: dict[str, Match] = {}
    for number, line in enumerate(lines, 1):
        for signature in signatures():
            if signature.id not in found and signature.matches(line):
                text = line[:MAX_LINE].strip()
                found[signature.id] = Match(signature=signature, line=text, source=f"{source}:{number}")
    return list(found.values())
