"""All shapes of the guard, by the letters of their groups; each is a record, or what the judge says without one."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from itertools import chain

from tools.records import record_paths

from seatrial.model import Trial
from tests.guard import caused, clusters, configured, contradictions, ended, retried, tools
from tests.guard.changes import record
from tests.guard.observed import Observed

LAUNCHERS = "launchers/"  # start of the names of records of each launcher
MadeShapes = Iterator[tuple[str, Trial | Observed]]


def _records(letter: str) -> Iterator[tuple[str, Trial]]:
    """The records of a group: of launchers (h), of drills (j), and all others (a)."""
    starts = {"h": LAUNCHERS, "j": tools.DRILLS}
    for name in record_paths():
        if next((group for group, start in starts.items() if name.startswith(start)), "a") == letter:
            yield name, record(name)


# Which checks would be measured again (b) is observed of every record
GROUPS: Mapping[str, Callable[[], MadeShapes]] = {
    "a": lambda: _records("a"),
    "c": retried.shapes,
    "d": clusters.shapes,
    "e": lambda: chain(configured.baseline_shapes(), configured.baselines()),
    "f": configured.shapes,
    "g": ended.shapes,
    "h": lambda: _records("h"),
    "i": lambda: chain(tools.tables(), tools.figures()),
    "j": lambda: chain(_records("j"), caused.shapes(), tools.drills()),
    "k": lambda: chain(tools.hook_exit_codes(), tools.readmit_exit_codes()),
    "m": contradictions.shapes,
}


def shapes(letter: str) -> MadeShapes:
    """The name and the record, or the observation, of each shape of a group."""
    return GROUPS[letter]()
