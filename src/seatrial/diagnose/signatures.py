"""Failure signatures: what a line of a log means. The patterns are data, and their examples prove them."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from functools import cache, cached_property
from importlib import resources
from typing import Literal

import yaml

from seatrial.model import Frozen

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
        return re.compile(self.pattern)

    def matches(self, line: str) -> bool:
        return self._regex.search(line[:MAX_LINE]) is not None


class Match(Frozen):
    """A signature found in a text, with the line that shows it."""

    signature: Signature
    line: str
    source: str


@cache
def signatures() -> tuple[Signature, ...]:
    """Every signature that ships with seatrial."""
    folder = resources.files("seatrial") / "data" / "signatures"
    files = sorted((entry for entry in folder.iterdir() if entry.name.endswith(".yaml")), key=lambda entry: entry.name)
    return tuple(
        Signature.model_validate(row) for entry in files for row in yaml.safe_load(entry.read_text(encoding="utf-8"))
    )


def search(lines: Iterable[str], source: str) -> Iterator[Match]:
    """The first line for each signature that occurs in ``lines``; ``source`` says where they come from (``file``)."""
    open_signatures = list(signatures())
    for number, line in enumerate(lines, 1):
        for signature in [one for one in open_signatures if one.matches(line)]:
            open_signatures.remove(signature)
            yield Match(signature=signature, line=line[:MAX_LINE].strip(), source=f"{source}:{number}")
