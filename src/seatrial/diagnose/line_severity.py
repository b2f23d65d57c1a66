"""Whether a line is of a failure: signs of one, and lines that healthy programs print too (data/healthy_lines.yaml)."""

from __future__ import annotations

import re
from functools import cache, lru_cache

from seatrial.diagnose.signature import MAX_LINE
from seatrial.util import data_files

# A severity, an exception class or an exit code
_SIGN = re.compile(
    r"(?i:\b(?:error|err|fatal|critical|panic\w{0,4}|fail\w{0,5}|abort\w{0,3}|exception|traceback|cannot|can't|unable|denied"
    r"|refused|killed|died|crash\w{0,3}|could ?n[o']t|could not|did not|rejected|lost|errno|err)\b)"
    r"|\w(?:Error|Exception)\b|\bNCCL WARN\b|^E\d{4} |\bWarning {2}"
    r"|(?i:\bexit(?:ed)?(?: with)?(?:[ _]?(?:exit )?(?:code|status))?[ =:]{1,3}-?[1-9]|\brc ?= ?-?[1-9])",
    re.ASCII,
)
_PROGRAM = re.compile(r"^(?:\S{1,100} ){0,6}?[\w./@:+-]{1,60}(?:\[\d{1,9}\]|\(\d{0,9}\))?: \S", re.ASCII)


@lru_cache(maxsize=16)  # several families ask for one line
def is_healthy(line: str) -> bool:
    """Whether the line has a level below error, or says that the program continues or that nothing failed."""
    return _expression().search(line[:MAX_LINE]) is not None


@lru_cache(maxsize=16)
def has_failure_sign(line: str) -> bool:
    """Whether the line has a word that a program gives an error."""
    return _SIGN.search(line[:MAX_LINE]) is not None


def has_program(line: str) -> bool:
    """Whether the line begins with the name of a program or daemon, as its messages do."""
    return _PROGRAM.match(line[:MAX_LINE]) is not None


@cache
def _expression() -> re.Pattern[str]:
    patterns = [row["pattern"] for row in data_files.read("healthy_lines.yaml")]
    # a flag at the beginning of a pattern holds for its group only
    groups = (f"(?i:{each[4:]})" if each.startswith("(?i)") else f"(?:{each})" for each in patterns)
    return re.compile("|".join(groups), re.ASCII)
