"""Journals: files of JSON lines to which records are appended. A record survives a crash once ``append`` returned.

Each line has the SHA-256 of its record. A line that was cut or changed is not a record.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import json
import os
import sys
from pathlib import Path
from typing import Any

from seatrial.util.files import atomic_write
from seatrial.util.input_files import MAX_LINE_BYTES, MAX_RECORD_BYTES, open_file, parse_json, read_bytes

Record = dict[str, Any]
_DIGEST_KEY = ', "sha256": "'  # before the last value of each line


class Journal:
    """A file of JSON lines with one writer; every ``append`` is flushed and fsynced."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self._terminate_last_line()
        self._file = path.open("a", encoding="utf-8")

    def append(self, record: Record) -> None:
        """Write one record. Raises OSError if the disk is full or read-only; earlier records remain."""
        self._file.write(record_line(record))
        self._file.flush()
        os.fsync(self._file.fileno())

    def fileno(self) -> int:
        return self._file.fileno()

    def _terminate_last_line(self) -> None:
        """End a line that a crash truncated, so that the next record starts on a new line."""
        if not self.path.exists() or not self.path.stat().st_size:
            return
        with self.path.open("rb+") as file:
            file.seek(-1, os.SEEK_END)
            if file.read(1) != b"\n":
                file.write(b"\n")


def record_line(record: Record) -> str:
    """Return the line of a record: its JSON, with the SHA-256 of this JSON as the last value of the object."""
    text = json.dumps(record, allow_nan=False)
    return f'{text[:-1]}{_DIGEST_KEY}{hashlib.sha256(text.encode()).hexdigest()}"}}\n'


def lock(descriptor: int, path: Path) -> bool:
    """Lock an open file until it is closed; return False if another process holds the lock. Raises OSError.

    On a file system without locks (Lustre mounted without ``-o flock``) this prints a warning that names ``path`` and
    returns True.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in (errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        message = "the file system has no locks; do not start a second seatrial with this directory"
        print(f"seatrial: {path}: {message}", file=sys.stderr)
    return True


def is_locked(path: Path) -> bool:
    """Return whether another process holds the lock of the file; False if that cannot be known."""
    try:
        with open_file(path) as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        pass
    return False


def read(path: Path) -> tuple[list[Record], list[str]]:
    """Return the records of a journal, and one warning for each line that is not as it was written.

    Both are empty if there is no such file. Raises OSError, also if the journal is larger than MAX_RECORD_BYTES.
    """
    records, warnings = [], []
    lines = read_bytes(path, MAX_RECORD_BYTES).splitlines() if path.is_file() else []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            records.append(_record(line))
        except ValueError as problem:
            warnings.append(f"{path}:{number}: damaged record ignored: {problem}")
    return records, warnings


def truncate(path: Path, count: int) -> None:
    """Keep the first ``count`` records of a journal, and all lines that are not as they were written."""
    kept = []
    for line in path.read_bytes().splitlines(keepends=True):
        is_intact = _is_intact(line)
        if count or not is_intact:
            kept.append(line)
            count -= is_intact
    atomic_write(path, b"".join(kept))


def with_new_digests(original: bytes, changed: bytes) -> bytes:
    """The changed lines of a journal with the SHA-256 of their new record, unless the original was cut or changed."""
    lines = []
    for before, line in zip(original.splitlines(keepends=True), changed.splitlines(keepends=True), strict=True):
        start, separator, _ = line.rpartition(_DIGEST_KEY.encode())
        if line != before and _is_intact(before):
            line = start + separator + hashlib.sha256(start + b"}").hexdigest().encode() + b'"}\n'
        lines.append(line)
    return b"".join(lines)


def _is_intact(line: bytes) -> bool:
    try:
        return bool(_record(line.rstrip(b"\n")))
    except ValueError:
        return False


def _record(line: bytes) -> Record:
    """Return the record in a line. Raises ValueError, with the start of the line, if it is not as it was written."""
    excerpt = repr(line[:60].decode("utf-8", errors="replace"))
    start, separator, digest = line.rpartition(_DIGEST_KEY.encode())
    text = start + b"}" if separator else line
    try:
        record = parse_json(text)
    except ValueError as error:
        raise ValueError(f"{error}: {excerpt}") from error
    if not isinstance(record, dict):
        raise ValueError(f"not a JSON object: {excerpt}")
    if digest != b'%b"}' % hashlib.sha256(text).hexdigest().encode():
        raise ValueError(f"cut or changed, by its SHA-256: {excerpt}")
    return record


class JournalReader:
    """Reads the complete lines that were appended to a journal since the last poll.

    ``warnings``: one for each line that is not as it was written. The records of such lines are missing.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.warnings: list[str] = []
        self._offset = 0

    def poll(self) -> list[Record]:
        """Return the new records; each line that is not as it was written adds a warning instead."""
        if not self.path.is_file():  # absent, or not a regular file: reading a pipe would block
            return []
        with open_file(self.path) as file:
            file.seek(self._offset)
            chunk = file.read(MAX_LINE_BYTES)
        complete = chunk[: chunk.rfind(b"\n") + 1]
        if not complete and len(chunk) == MAX_LINE_BYTES:
            self.warnings.append(f"a line of more than {MAX_LINE_BYTES} bytes")
            complete = chunk
        self._offset += len(complete)
        records = []
        for line in complete.splitlines():
            try:
                records += [_record(line)] if line.strip() else []
            except ValueError as problem:
                self.warnings.append(str(problem))
        return records
