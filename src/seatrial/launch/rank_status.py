"""State of the ranks of a running job, read from their journals and heartbeat files in the attempt's folder.

The journal takes precedence. The heartbeat, which is written once a second, adds progress, pid and node. Both are
validated, since another version of the worker may have written them, or a broken file system damaged them.
"""

from __future__ import annotations

import reprlib
import time
from dataclasses import dataclass, field
from pathlib import Path

from pydantic import ValidationError

from seatrial.model import Job, Measurement
from seatrial.util.input_files import read_json
from seatrial.util.journal import JournalReader, Record
from seatrial.worker import TERMINATING, Heartbeat


@dataclass
class Rank:
    """State of one rank. Times are by the monotonic clock of this host, since the nodes' clocks may differ."""

    number: int
    checks: tuple[str, ...]  # the checks of the job; a record of any other check is invalid
    journal: JournalReader
    heartbeat_path: Path
    heartbeat: Heartbeat | None = None
    last_seen: float | None = None  # time at which its last new record or heartbeat was read
    subject: str = ""
    started: dict[str, float] = field(default_factory=dict)  # check → time at which its start was read
    measured: dict[str, Measurement] = field(default_factory=dict)  # check → its measurement, in order of time
    done: bool = False
    damage: str = ""  # description of the first invalid record; empty if all are valid

    @property
    def current_check(self) -> str | None:
        """The check that this rank has started and not measured."""
        return next((check for check in self.started if check not in self.measured), None)

    @property
    def is_terminating(self) -> bool:
        """Whether the rank has received SIGTERM."""
        return self.heartbeat is not None and self.heartbeat.status == TERMINATING

    @property
    def heartbeat_expected(self) -> bool:
        """Whether the rank writes heartbeats: it is neither done nor terminating."""
        return not self.done and not self.is_terminating

    @property
    def exit_expected(self) -> bool:
        """Whether the process is likely to exit: its last check ended with an error, and no other check has started."""
        last_measurement = next(reversed(self.measured.values()), None)
        return self.current_check is None and last_measurement is not None and bool(last_measurement.error)

    @property
    def failed(self) -> bool:
        """Whether any of its checks ended with an error."""
        return any(measured.error for measured in self.measured.values())

    @property
    def name(self) -> str:
        """The rank with its subject (or else its node) and pid, if known: ``rank 1 (node0/gpu1, pid 4711)``."""
        subject = self.subject or (self.heartbeat.node if self.heartbeat else "")
        details = [subject, f"pid {self.heartbeat.pid}" if self.heartbeat else ""]
        return f"rank {self.number}" + (f" ({', '.join(filter(None, details))})" if any(details) else "")

    @property
    def last_status(self) -> str:
        """The current check, with its progress if the heartbeat is of this check.

        Without a current check, the phase of the process, such as ``startup``.
        """
        status, progress = (self.heartbeat.status, self.heartbeat.progress) if self.heartbeat else ("", "")
        if self.current_check:
            is_of_this_check = status == self.current_check
            return f"{self.current_check}: {progress}" if is_of_this_check and progress else self.current_check
        if self.measured and (status in self.checks or self.is_terminating):
            return f"teardown after {list(self.measured)[-1]}"
        return status or "startup"

    def read(self) -> list[Measurement]:
        """Read new records and the heartbeat; return the new measurements. Invalid records set ``damage``."""
        self._read_heartbeat()
        count_before = len(self.measured)
        for record in self.journal.poll():
            self.last_seen = time.monotonic()
            if not self._add_record(record):
                self.damage = self.damage or f"record of another job or version: {reprlib.repr(record)}"
        self.damage = self.damage or "; ".join(self.journal.warnings[:1])
        return list(self.measured.values())[count_before:]

    def _add_record(self, record: Record) -> bool:
        """Apply a record; return False if a rank of this job cannot write it at this point."""
        match record:
            case {"start": str(check), "subject": str(subject)} if check in self.checks:
                self.started[check], self.subject = time.monotonic(), subject
            case {"measurement": dict(fields)}:
                return self._add_measurement(fields)
            case {"done": float()}:
                self.done = True
            case _:
                return False
        return True

    def _add_measurement(self, fields: Record) -> bool:
        try:
            measurement = Measurement.model_validate(fields)
        except ValidationError:
            return False
        if measurement.check != self.current_check or measurement.rank != self.number:
            return False
        self.measured[measurement.check] = measurement
        return True

    def _read_heartbeat(self) -> None:
        try:
            heartbeat = Heartbeat.model_validate(read_json(self.heartbeat_path))
        except (OSError, ValueError):  # absent, or damaged: counts as no heartbeat
            return
        if heartbeat != self.heartbeat:
            self.heartbeat, self.last_seen = heartbeat, time.monotonic()


def read_ranks(folder: Path, job: Job) -> list[Rank]:
    """Return one Rank per process of ``job``, whose files are in ``folder``."""
    return [
        Rank(number, job.checks, JournalReader(folder / f"rank{number}.jsonl"), folder / f"rank{number}.heartbeat.json")
        for number in range(job.nodes * job.ranks_per_node)
    ]
