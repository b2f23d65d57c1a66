"""Probes of a shared filesystem: whether processes on several nodes see each other's writes and locks.

All ranks call a probe together; its steps run concurrently on the participants only: one rank per node
(``SharedFolder.run_on_all``, one_rank_per_node.py). A probe returns None, or a text that names the participants and the
failure. If a step fails or hangs on a participant, all ranks raise ParticipantError.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import mmap
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from seatrial.bench.one_rank_per_node import group_by_text
from seatrial.bench.storage import SharedFolder, write_and_sync
from seatrial.util.grouping import grouped

# Longest wait for files of other nodes. It is shorter than the 30 s for which NFS may hide a new name by default
# (acdirmin, nfs(5)): a file that is hidden for longer counts as not visible
VISIBILITY_TIMEOUT_S = 5.0
POLL_S = 0.001
ATTEMPTS = 5  # a probe is inconclusive if in none of its attempts two participants access the file at the same time
REPLACE_S = 0.2  # duration of the first attempt of the rename probe
PAGE_RECORDS = 1024  # records of 4 bytes in a file of one page
MIN_REPLACEMENTS = 100  # minimum per attempt; on a slow filesystem they take longer than REPLACE_S
RECORDS = 50  # appended by each participant
RECORD_BYTES = 64  # size of a record, and of the content of other small files
APPEND_INTERVAL_S = 0.001  # so that the records of a participant are written separately
LOCK_TURNS = 20  # turns of each of two participants; with more participants, each has fewer turns
LOCK_HOLD_S = 0.001  # how long a participant holds the lock in each turn
LOCK_TIMEOUT_S = 20.0  # longest wait for the lock, which each participant holds for LOCK_HOLD_S only


class InconclusiveProbe(Exception):
    """A probe was inconclusive; raised on all ranks."""


def write_random(path: Path) -> str:
    """Write random bytes and return their SHA-256."""
    data = os.urandom(RECORD_BYTES)
    write_and_sync(path, data)
    return _digest(data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def visibility_failure(folder: SharedFolder) -> str | None:
    """Check that every participant reads what every participant wrote: a visible file name alone is no proof."""
    digests = folder.run_on_all(lambda: write_random(folder.file("mark")))
    visible_writers = folder.run_on_all(lambda: tuple(sorted(wait_for_contents(folder.files("mark"), digests))))
    readers_by_writers = grouped((writers, reader) for reader, writers in enumerate(visible_writers))
    texts = [
        f"{folder.join_names(readers)} saw only files of {folder.join_names(writers) or 'no node'}"
        for writers, readers in readers_by_writers.items()
        if len(writers) < len(folder.names)
    ]
    return "; ".join(texts) or None


def visibility_delays(folder: SharedFolder) -> list[float]:
    """Seconds until each participant sees the files of all participants, at most VISIBILITY_TIMEOUT_S.

    All participants look up the names before the files exist, as a program that waits for a file does. The time starts
    when the last writer has reported that its file is closed. The reader's clock measures start and end.
    """
    folder.run_on_all(lambda: [path.exists() for path in folder.files("late")])
    digests = folder.run_on_all(lambda: write_random(folder.file("late")))

    def delay() -> float:
        delays = wait_for_contents(folder.files("late"), digests)
        return max(delays.values()) if len(delays) == len(digests) else VISIBILITY_TIMEOUT_S

    return folder.run_on_all(delay)


def wait_for_contents(paths: Sequence[Path], digests: Sequence[str]) -> dict[int, float]:
    """Index of a file → seconds until the file matched its digest, if it did within VISIBILITY_TIMEOUT_S."""
    started, delays = time.monotonic(), dict[int, float]()
    while True:
        for index, (path, digest) in enumerate(zip(paths, digests, strict=True)):
            if index not in delays and has_content(path, digest):
                delays[index] = time.monotonic() - started
        if len(delays) == len(digests) or time.monotonic() - started > VISIBILITY_TIMEOUT_S:
            return delays
        time.sleep(POLL_S)


def has_content(path: Path, digest: str) -> bool:
    try:
        return _digest(path.read_bytes()) == digest
    except FileNotFoundError:
        return False


def rename_failure(folder: SharedFolder) -> str | None:
    """Check that readers always see a complete file while one participant replaces it by rename.

    Raises InconclusiveProbe if every reader saw only one version of the file.
    """
    target = folder.path / "renamed"
    folder.run_on_first(lambda: replace(target, _page(0)))
    for attempt in range(ATTEMPTS):  # increasing duration: a client may cache a name for seconds
        results = folder.run_on_all(partial(_replace_or_read, target, folder.index, REPLACE_S * 2**attempt))
        counts_by_reader = {name: counts for name, counts in zip(folder.names, results, strict=True) if counts}
        bad_reads = [
            f"{counts.bad} of {counts.reads} reads by {name}" for name, counts in counts_by_reader.items() if counts.bad
        ]
        if bad_reads:
            return f"missing or partial while {folder.names[0]} replaced it: {', '.join(bad_reads)}"
        if any(counts.versions > 1 for counts in counts_by_reader.values()):
            return None
    raise InconclusiveProbe("no reader saw more than one version of the file")


@dataclass(frozen=True)
class ReadCounts:
    """Number of ``reads``, of ``bad`` reads (file missing or partial), and of different ``versions`` read."""

    reads: int
    bad: int
    versions: int


def replace(path: Path, data: bytes) -> None:
    """Replace ``path`` by a new file that is complete before the rename."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def _page(version: int) -> bytes:
    """The content of the file: the version number, repeated, so that a partial file is detected."""
    return version.to_bytes(4, "little") * PAGE_RECORDS


def _replace_or_read(target: Path, index: int, seconds: float) -> ReadCounts | None:
    """The first participant replaces the file and returns None; all others read it and return their counts."""
    if index:
        return read_repeatedly(target, seconds)
    end, version = time.monotonic() + seconds, 0
    while version < MIN_REPLACEMENTS or time.monotonic() < end:
        version += 1
        replace(target, _page(version))
    return None


def read_repeatedly(target: Path, seconds: float) -> ReadCounts:
    """Read the file for ``seconds`` and count bad reads and versions."""
    end, versions = time.monotonic() + seconds, set[bytes]()
    reads = bad_reads = 0
    while time.monotonic() < end:
        reads += 1
        try:
            data = target.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            if error.errno == errno.ESTALE:  # NFS: the file was replaced, and the reader must open it again
                continue
            raise
        complete = bool(data) and data == data[:4] * PAGE_RECORDS
        bad_reads += not complete
        versions.add(data[:4])
    return ReadCounts(reads, bad_reads, len(versions))


def append_failure(folder: SharedFolder) -> str | None:
    """Check that no records are lost when all participants append to one file (O_APPEND) concurrently."""
    path = folder.path / "log"
    folder.run_on_first(lambda: write_and_sync(path, b""))
    folder.run_on_all(lambda: _append_records(path, folder.index))
    lines = folder.run_on_first(lambda: path.read_bytes().splitlines(keepends=True))
    expected = {append_record(writer, number) for writer in range(len(folder.names)) for number in range(RECORDS)}
    lost, torn = len(expected - set(lines)), sum(line not in expected for line in lines)
    if not lost and not torn:
        return None
    return f"{lost} of {len(expected)} records lost, {torn} torn, appended by {', '.join(folder.names)}"


def append_record(writer: int, number: int) -> bytes:
    """The record ``number`` that participant ``writer`` appends, RECORD_BYTES long."""
    return f"participant {writer} record {number} ".ljust(RECORD_BYTES - 1, ".").encode() + b"\n"


def _append_records(path: Path, writer: int) -> None:
    with path.open("ab", buffering=0) as file:  # O_APPEND
        for number in range(RECORDS):
            append(file.fileno(), append_record(writer, number))
            time.sleep(APPEND_INTERVAL_S)
        os.fsync(file)


def append(file: int, data: bytes) -> None:
    os.write(file, data)


def _try_lock(lock: Callable[[int, int], object], file: int) -> bool:
    try:
        lock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES
        return False
    return True


try_flock, try_fcntl = partial(_try_lock, fcntl.flock), partial(_try_lock, fcntl.lockf)


@dataclass(frozen=True)
class LockCounts:
    """``busy``: failed attempts to take the lock. ``conflicts``: turns in which another participant held it too."""

    busy: int
    conflicts: int


def _lock_failure(folder: SharedFolder, kind: str, try_lock: Callable[[int], bool]) -> str | None:
    """Check that ``try_lock`` never grants the lock of one file to two participants.

    Raises InconclusiveProbe if no participant found the lock held by another one.
    """
    path, count = folder.path / f"lock.{kind}", len(folder.names)
    folder.run_on_first(lambda: write_and_sync(path, b"\0"))
    for _ in range(ATTEMPTS):
        results = folder.run_on_all(lambda: contend_for_lock(path, try_lock, count), 3 * LOCK_TIMEOUT_S)
        conflicts = [
            f"{counts.conflicts} times by {name}"
            for name, counts in zip(folder.names, results, strict=True)
            if counts.conflicts
        ]
        if conflicts:
            return f"granted while another participant held it: {', '.join(conflicts)}"
        if any(counts.busy for counts in results):
            return None
    raise InconclusiveProbe("no two participants requested the lock at the same time")


def contend_for_lock(path: Path, try_lock: Callable[[int], bool], count: int) -> LockCounts:
    """Take and release the lock several times, as one of ``count`` participants. Raises TimeoutError if it stays busy.

    The holder creates a file and removes it again. If the file exists already, another participant holds the lock too.
    The server of a network filesystem decides O_EXCL, so client caches do not affect the result.
    """
    busy = conflicts = 0
    for _ in range(max(2, LOCK_TURNS * 2 // count)):  # fewer turns with more participants, as each waits longer
        with path.open("rb+") as file:  # closing the file releases both kinds of lock
            busy += _wait_for_lock(file.fileno(), try_lock, LOCK_HOLD_S * count)
            conflicts += not _hold_exclusively(path.with_suffix(".held"))
    return LockCounts(busy, conflicts)


def _wait_for_lock(file: int, try_lock: Callable[[int], bool], pause: float) -> int:
    """Wait for the lock and return the number of failed attempts."""
    end, busy = time.monotonic() + LOCK_TIMEOUT_S, 0
    while not try_lock(file):
        busy += 1
        if time.monotonic() > end:
            raise TimeoutError(f"the lock was not granted within {LOCK_TIMEOUT_S:g} s")
        time.sleep(pause)
    return busy


def _hold_exclusively(path: Path) -> bool:
    """Create ``path``, wait LOCK_HOLD_S and remove ``path``; False if another holder of the lock has created it."""
    try:
        path.touch(exist_ok=False)  # O_EXCL
    except FileExistsError:
        time.sleep(LOCK_HOLD_S)
        return False
    time.sleep(LOCK_HOLD_S)
    path.unlink()
    return True


def mmap_failure(folder: SharedFolder) -> str | None:
    """Check that a new mapping of a rewritten file shows the new content, although the old content is cached."""
    for _ in range(2):  # the first time fills the readers' caches
        written = folder.run_on_all(lambda: write_random(folder.file("map")))
        read = folder.run_on_all(lambda: [mapped_digest(path) for path in folder.files("map")])
    texts = []
    for name, digests in zip(folder.names, read, strict=True):
        stale = [writer for writer, digest in enumerate(digests) if digest != written[writer]]
        texts += [f"{name} read old content of {folder.join_names(stale)}"] if stale else []
    return "; ".join(texts) or None


def mapped_digest(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), RECORD_BYTES, access=mmap.ACCESS_READ) as mapped:
        return _digest(mapped[:])


def owner_mismatch(folder: SharedFolder) -> str | None:
    """Check that all participants see the same owner of a file, and that it is the user who wrote the file.

    The files are those of ``visibility_failure``, which must have run before. Files of root may have another owner: NFS
    maps root to nobody by default (root_squash, exports(5)).
    """
    uids = folder.run_on_all(os.geteuid)
    owners_seen = folder.run_on_all(lambda: [owner(path) for path in folder.files("mark")])  # [reader][writer]
    texts = []
    for writer, name in enumerate(folder.names):
        owner_by_reader = {reader: seen[writer] for reader, seen in zip(folder.names, owners_seen, strict=True)}
        owner_uid, _ = owner_by_reader[name]
        if len(set(owner_by_reader.values())) > 1:
            ids = {reader: f"{uid}:{gid}" for reader, (uid, gid) in owner_by_reader.items()}
            texts.append(f"owner of the file of {name}: {group_by_text(ids)}")
        elif uids[writer] not in (0, owner_uid):
            texts.append(f"owner of the file of {name}: {owner_uid}, written by uid {uids[writer]}")
    return "; ".join(texts) or None


def owner(path: Path) -> tuple[int, int]:
    """(uid, gid) of a file."""
    status = path.stat()
    return status.st_uid, status.st_gid


PROBES: dict[str, Callable[[SharedFolder], str | None]] = {
    "rename": rename_failure,
    "append": append_failure,
    "flock": lambda folder: _lock_failure(folder, "flock", try_flock),
    "fcntl": lambda folder: _lock_failure(folder, "fcntl", try_fcntl),  # POSIX locks
    "mmap": mmap_failure,
    "owner": owner_mismatch,
}
