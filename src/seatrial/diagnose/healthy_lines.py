"""Lines that healthy programs print too, from data/healthy_lines.yaml."""

from __future__ import annotations

import re
from functools import cache, lru_cache

from seatrial.diagnose.signature import MAX_LINE
from seatrial.util import data_files


@lru_cache(maxsize=16)  # several families ask for one line
def is_healthy(line: str) -> bool:
    """Whether the line has a level below error, or says that the program continues or that nothing failed."""
    return _expression().search(line[:MAX_LINE]) is not None


@cache
def _expression() -> re.Pattern[str]:
    rows = data_files.read("healthy_lines.yaml")
    return re.compile("|".join(_with_local_flags(row["pattern"]) for row in rows), re.ASCII)


def _with_local_flags(pattern: str) -> str:
    """The pattern as a group; a flag at its beginning holds for the group only."""
    return f"(?i:{pattern[4:]})" if pattern.startswith("(?i)") else f"(?:{pattern})"
