"""What the ranks of a running job say of themselves: their journals and pulses, read from the attempt's folder."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from seatrial.journal import Follower, Record
from seatrial.model import Measurement
from seatrial.worker import ENDING


@dataclass
class Rank:
    """One rank as the launcher sees it. ``seen`` is by our own clock: the nodes' clocks may differ from it."""

    number: int
    follower: Follower
    pulse_path: Path
    pulse: dict[str, Any] = field(default_factory=dict)
    seen: float | None = None
    subject: str = ""
    started: dict[str, float] = field(default_factory=dict)  # check → when we saw it start, by our own clock
    measured: dict[str, Measurement] = field(default_factory=dict)

    @property
    def current(self) -> str | None:
        """The check this rank has started and not yet measured."""
        return next((check for check in self.started if check not in self.measured), None)

    @property
    def at_work(self) -> bool:
        """Not yet on its way out, from where it needs no pulse."""
        return self.pulse.get("doing") != ENDING

    @property
    def failed(self) -> bool:
        """Whether it has told of an error: it ended, and is not the one that went silent."""
        return any(measured.error for measured in self.measured.values())

    @property
    def name(self) -> str:
        """As precise as what the rank has told us: ``rank 1 (node0/gpu1, pid 4711)``."""
        known = [self.subject or self.pulse.get("node", ""), f"pid {self.pulse['pid']}" if self.pulse else ""]
        return f"rank {self.number}" + (f" ({', '.join(filter(None, known))})" if any(known) else "")

    @property
    def last_words(self) -> str:
        """What it said it was doing."""
        return ": ".join(filter(None, [self.pulse.get("doing", ""), self.pulse.get("note", "")])) or "nothing yet"

    def read(self) -> list[Record]:
        """Take in what is new; the new journal records are returned."""
        self._feel_pulse()
        records = self.follower.poll()
        for record in records:
            if "start" in record:
                self.started[record["start"]] = time.monotonic()
                self.subject = record["subject"]
            else:
                measurement = Measurement.model_validate(record["measurement"])
                self.measured[measurement.check] = measurement
        return records

    def _feel_pulse(self) -> None:
        try:
            pulse = json.loads(self.pulse_path.read_text(encoding="utf-8"))
        except (OSError, ValueError):  # not there yet, or a network filesystem between two versions of it
            return
        if pulse != self.pulse:
            self.pulse, self.seen = pulse, time.monotonic()


def ranks_in(folder: Path, count: int) -> list[Rank]:
    return [
        Rank(number, Follower(folder / f"rank{number}.jsonl"), folder / f"rank{number}.alive")
        for number in range(count)
    ]
