"""What the ranks of a running job say of themselves: their journals and pulses, read from the attempt's folder.

The journal is exact and is believed; the pulse is up to a second older, and only its note says more. Neither is trusted
to be well formed: another version of the worker, or a broken filesystem, may have written it.
"""

from __future__ import annotations

import json
import reprlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from seatrial.model import Job, Measurement
from seatrial.util.journal import Follower, Record
from seatrial.worker import TERMINATING, Heartbeat


@dataclass
class Rank:
    """One rank as the launcher sees it. ``seen`` is by our own clock: the nodes' clocks may differ from it."""

    number: int
    checks: tuple[str, ...]  # of the job: it may speak of no others
    follower: Follower
    pulse_path: Path
    pulse: Heartbeat | None = None
    seen: float | None = None
    subject: str = ""
    started: dict[str, float] = field(default_factory=dict)  # check → when we saw it start, by our own clock
    measured: dict[str, Measurement] = field(default_factory=dict)
    done: bool = False
    damage: str = ""  # what it wrote that cannot be read: after that its journal is not whole

    @property
    def current(self) -> str | None:
        """The check this rank has started and not yet measured."""
        return next((check for check in self.started if check not in self.measured), None)

    @property
    def is_terminating(self) -> bool:
        """Whether it was told to end, by SIGTERM."""
        return self.pulse is not None and self.pulse.doing == TERMINATING

    @property
    def is_working(self) -> bool:
        """Neither done nor ending, from where it needs no pulse."""
        return not self.done and not self.is_terminating

    @property
    def is_exiting(self) -> bool:
        """Whether its last word was of an error, after which it may have ended."""
        return self.current is None and any(measured.error for measured in list(self.measured.values())[-1:])

    @property
    def failed(self) -> bool:
        """Whether it has told of an error: it ended, and is not the one that went silent."""
        return any(measured.error for measured in self.measured.values())

    @property
    def name(self) -> str:
        """As precise as what the rank has told us: ``rank 1 (node0/gpu1, pid 4711)``."""
        place = self.subject or (self.pulse.node if self.pulse else "")
        known = [place, f"pid {self.pulse.pid}" if self.pulse else ""]
        return f"rank {self.number}" + (f" ({', '.join(filter(None, known))})" if any(known) else "")

    @property
    def last_status(self) -> str:
        """What it was doing: the check by its journal, with the pulse's note where that speaks of the same."""
        said, note = (self.pulse.doing, self.pulse.note) if self.pulse else ("", "")
        if self.current:
            return ": ".join(filter(None, [self.current, note if said == self.current else ""]))
        if self.measured and (said in self.checks or self.is_terminating):
            return f"the end of {list(self.measured)[-1]}"
        return said or "nothing yet"

    def read(self) -> list[Measurement]:
        """Take in what is new; the new measurements are returned. See ``damage`` for what could not be taken in."""
        self._feel_pulse()
        before = len(self.measured)
        for record in self.follower.poll():
            self.seen = time.monotonic()
            if not self._take_in(record):
                self.damage = self.damage or f"no record of this job: {reprlib.repr(record)}"
        self.damage = self.damage or "; ".join(self.follower.complaints[:1])
        return list(self.measured.values())[before:]

    def _take_in(self, record: Record) -> bool:
        """Whether it is a record that a rank of this job writes at this point."""
        match record:
            case {"start": str(check), "subject": str(subject)} if check in self.checks:
                self.started[check], self.subject = time.monotonic(), subject
            case {"measurement": dict(fields)}:
                return self._take_measurement(fields)
            case {"done": float()}:
                self.done = True
            case _:
                return False
        return True

    def _take_measurement(self, fields: Record) -> bool:
        try:
            measurement = Measurement.model_validate(fields)
        except ValidationError:
            return False
        if measurement.check != self.current or measurement.rank != self.number:
            return False
        self.measured[measurement.check] = measurement
        return True

    def _feel_pulse(self) -> None:
        try:
            pulse = Heartbeat.model_validate(json.loads(self.pulse_path.read_bytes()))
        except (OSError, ValueError, RecursionError):  # not there yet, between two versions of it, or no sign of life
            return
        if pulse != self.pulse:
            self.pulse, self.seen = pulse, time.monotonic()


def ranks_in(folder: Path, job: Job) -> list[Rank]:
    return [
        Rank(number, job.checks, Follower(folder / f"rank{number}.jsonl"), folder / f"rank{number}.heartbeat.json")
        for number in range(job.nodes * job.ranks_per_node)
    ]
