"""Append-only JSON lines that survive a crash: each record is on disk before the next step begins."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import sys
from pathlib import Path
from typing import Any

Record = dict[str, Any]


class Journal:
    """A file of JSON lines with one writer. Every ``append`` is flushed and fsynced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._mend_last_line()
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Record) -> None:
        """Write one record. Raises OSError when the disk is full or read-only: what was written before stays."""
        self._file.write(json.dumps(record, allow_nan=False) + "\n")
        self._file.flush()
        os.fsync(self._file.fileno())

    def fileno(self) -> int:
        return self._file.fileno()

    def _mend_last_line(self) -> None:
        """End a line that a crash cut off, so that the next record does not continue it."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        with self.path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def lock(descriptor: int, path: Path) -> bool:
    """Whether this process alone has the file until it ends, or closes it; ``path`` is its name, for the user.

    A filesystem that knows no locks, as Lustre mounted without ``-o flock``, keeps nobody out: that is said on standard
    error. Raises OSError.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        print(f"seatrial: {path}: no locks here, so that nothing keeps another seatrial out", file=sys.stderr)
    return True


def read(path: Path) -> tuple[list[Record], list[str]]:
    """The records of a journal, and a complaint for every line that is no JSON object (a cut-off line, say)."""
    records, complaints = [], []
    for number, line in enumerate(path.read_bytes().splitlines() if path.is_file() else (), 1):
        if not line.strip():
            continue
        record = _record(line)
        if record is None:
            complaints.append(f"{path}:{number}: not a complete record, left out: {_shown(line)}")
        else:
            records.append(record)
    return records, complaints


def _record(line: bytes) -> Record | None:
    """The JSON object in a line; None when there is anything else in it, however deep or strange."""
    try:
        record = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError):
        return None
    return record if isinstance(record, dict) else None


def _shown(line: bytes) -> str:
    return repr(line[:60].decode("utf-8", errors="replace"))


class Follower:
    """Reads what has been added to a journal since the last look, complete lines only.

    ``complaints`` gathers the lines that are no JSON object: whoever follows must not take the rest for the whole.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.complaints: list[str] = []
        self._offset = 0

    def poll(self) -> list[Record]:
        if not self.path.is_file():  # not there yet; what is no file (a pipe would hold us) is never there
            return []
        with self.path.open("rb") as file:
            file.seek(self._offset)
            chunk = file.read()
        complete = chunk[: chunk.rfind(b"\n") + 1]
        self._offset += len(complete)
        records = [(line, _record(line)) for line in complete.splitlines() if line.strip()]
        self.complaints += [f"no record in this line: {_shown(line)}" for line, record in records if record is None]
        return [record for _, record in records if record is not None]
