"""Probes of a shared filesystem: what several processes see of each other's files.

A probe is called by all ranks alike, but what it hands to ``site.together`` runs on the actors only, on all of them at
the same time. It returns None, or what is wrong in words that name the actors. Raises Trouble on all ranks.
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

from seatrial.bench.one_rank_per_node import group_by_reason
from seatrial.bench.storage import SharedFolder, write_and_sync

VISIBILITY_TIMEOUT_S = (
    5.0  # for what another node has written. NFS hides a new name for up to 30 s by default (acdirmin, nfs(5))
)
POLL_S = 0.001
ATTEMPTS = 5  # to catch two processes at it in the same moment, without which nothing is proven
REPLACE_S = 0.2
PAGE_RECORDS = 1024  # of 4 bytes: one page
RECORDS = 50  # appended by each actor
RECORD = 64  # bytes
APPEND_EVERY_S = 0.001  # so that the records of one actor do not go out as one
TURNS = 20  # that each of few actors takes at a lock
HOLD_S = 0.001
LOCK_TIMEOUT_S = 20.0  # a lock that nobody holds for longer than HOLD_S must come within this


class Untested(Exception):
    """A probe did not come to an answer. Raised on all ranks alike."""


def write_random(path: Path) -> str:
    """Write something that nobody else can have written; its SHA-256."""
    data = os.urandom(RECORD)
    write_and_sync(path, data)
    return _digest(data)


def _digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def invisible_files(site: SharedFolder) -> str | None:
    """Does every actor see what every other one wrote? By content: a file of the same name is not enough."""
    digests = site.run_on_all(lambda: write_random(site.file("mark")))
    seen = site.run_on_all(lambda: tuple(sorted(wait_for_contents(site.files("mark"), digests))))
    readers: dict[tuple[int, ...], list[int]] = {}
    for reader, writers in enumerate(seen):
        readers.setdefault(writers, []).append(reader)
    partly = {writers: group for writers, group in readers.items() if len(writers) < len(site.names)}
    texts = [
        f"{site.join_names(group)} saw only what {site.join_names(writers)} wrote" for writers, group in partly.items()
    ]
    return "; ".join(texts) or None


def visibility_delays(site: SharedFolder) -> list[float]:
    """Seconds until each actor saw the files of all others, after these were closed; WAIT_S is that or longer.

    Each has asked for the names before they existed, as a program that waits for a file does. The count begins when
    the last writer has told all others that it is done: no clock of another node is in it.
    """
    site.run_on_all(lambda: [path.exists() for path in site.files("late")])
    digests = site.run_on_all(lambda: write_random(site.file("late")))

    def delay() -> float:
        found = wait_for_contents(site.files("late"), digests)
        return max(found.values()) if len(found) == len(digests) else VISIBILITY_TIMEOUT_S

    return site.run_on_all(delay)


def wait_for_contents(paths: Sequence[Path], digests: Sequence[str]) -> dict[int, float]:
    """Which of the files hold what they should, by number, and after how many seconds. Gives up after WAIT_S."""
    began, found = time.monotonic(), dict[int, float]()
    while True:
        for number, (path, digest) in enumerate(zip(paths, digests, strict=True)):
            if number not in found and has_content(path, digest):
                found[number] = time.monotonic() - began
        if len(found) == len(digests) or time.monotonic() - began > VISIBILITY_TIMEOUT_S:
            return found
        time.sleep(POLL_S)


def has_content(path: Path, digest: str) -> bool:
    try:
        return _digest(path.read_bytes()) == digest
    except FileNotFoundError:
        return False


# Do the guarantees hold that programs rely on?


def rename_fault(site: SharedFolder) -> str | None:
    """Is a file that one actor replaces again and again always whole for all others? Raises Unproven."""
    target = site.path / "whole"
    site.run_on_first(lambda: replace(target, _page(0)))
    for attempt in range(ATTEMPTS):  # ever longer: a client may know a name for seconds before it asks again
        found = site.run_on_all(partial(_take_part, target, site.index, REPLACE_S * 2**attempt))
        readings = {name: reading for name, reading in zip(site.names, found, strict=True) if reading}
        bad = [f"{reading.bad} of {reading.reads} reads by {name}" for name, reading in readings.items() if reading.bad]
        if bad:
            return f"missing or partial while {site.names[0]} replaced it: {', '.join(bad)}"
        if any(reading.versions > 1 for reading in readings.values()):
            return None
    raise Untested("no reader met the writer at work")


@dataclass(frozen=True)
class ReadCounts:
    reads: int
    bad: int
    versions: int


def replace(path: Path, data: bytes) -> None:
    """Put a whole new file in the place of an old one."""
    temporary = path.with_suffix(".new")
    temporary.write_bytes(data)
    temporary.replace(path)


def _page(version: int) -> bytes:
    return version.to_bytes(4, "little") * PAGE_RECORDS


def _take_part(target: Path, actor: int, seconds: float) -> ReadCounts | None:
    """The first actor writes, all others read and say what they found."""
    if actor:
        return read_repeatedly(target, seconds)
    _replace_often(target, seconds)
    return None


def _replace_often(target: Path, seconds: float) -> None:
    """At least a hundred times, and for as long as the others read."""
    end, version = time.monotonic() + seconds, 0
    while version < 100 or time.monotonic() < end:
        version += 1
        replace(target, _page(version))


def read_repeatedly(target: Path, seconds: float) -> ReadCounts:
    end, reads, bad, versions = time.monotonic() + seconds, 0, 0, set[bytes]()
    while time.monotonic() < end:
        reads += 1
        try:
            data = target.read_bytes()
        except FileNotFoundError:
            data = b""
        except OSError as error:
            if error.errno == errno.ESTALE:  # how NFS tells a reader that the file was replaced: it reads anew
                continue
            raise
        whole = bool(data) and data == data[:4] * PAGE_RECORDS
        bad += not whole
        versions.add(data[:4])
    return ReadCounts(reads, bad, len(versions))


def append_fault(site: SharedFolder) -> str | None:
    """Do all records arrive that all actors append to one file (O_APPEND) at the same time?"""
    path = site.path / "log"
    site.run_on_first(lambda: write_and_sync(path, b""))
    site.run_on_all(lambda: _append_records(path, site.index))
    lines = site.run_on_first(lambda: path.read_bytes().splitlines(keepends=True))
    expected = {append_record(actor, number) for actor in range(len(site.names)) for number in range(RECORDS)}
    lost, torn = len(expected - set(lines)), sum(line not in expected for line in lines)
    if not lost and not torn:
        return None
    return f"{lost} of {len(expected)} records lost, {torn} torn, appended by {', '.join(site.names)}"


def append_record(actor: int, number: int) -> bytes:
    return f"actor {actor} record {number} ".ljust(RECORD - 1, ".").encode() + b"\n"


def _append_records(path: Path, actor: int) -> None:
    file = os.open(path, os.O_WRONLY | os.O_APPEND)
    try:
        for number in range(RECORDS):
            append(file, append_record(actor, number))
            time.sleep(APPEND_EVERY_S)
        os.fsync(file)
    finally:
        os.close(file)


def append(file: int, data: bytes) -> None:
    os.write(file, data)


def flock_fault(site: SharedFolder) -> str | None:
    """Does flock(2) keep the actors apart? Raises Unproven."""
    return _lock_fault(site, "flock", try_flock)


def fcntl_fault(site: SharedFolder) -> str | None:
    """Does fcntl(2), the lock of POSIX, keep the actors apart? Raises Unproven."""
    return _lock_fault(site, "fcntl", try_fcntl)


def try_flock(file: int) -> bool:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True


def try_fcntl(file: int) -> bool:
    try:
        fcntl.lockf(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except (BlockingIOError, PermissionError):  # fcntl(2): EAGAIN or EACCES
        return False
    return True


@dataclass(frozen=True)
class LockCounts:
    """``busy``: how often the lock was another's. ``clashes``: how often two held it at once."""

    busy: int
    conflicts: int


def _lock_fault(site: SharedFolder, kind: str, take: Callable[[int], bool]) -> str | None:
    path, count = site.path / f"lock.{kind}", len(site.names)
    site.run_on_first(lambda: write_and_sync(path, b"\0"))
    for _ in range(ATTEMPTS):
        contests = site.run_on_all(lambda: contend_for_lock(path, take, count), 3 * LOCK_TIMEOUT_S)
        clashes = [
            f"{found.conflicts} times by {name}"
            for name, found in zip(site.names, contests, strict=True)
            if found.conflicts
        ]
        if clashes:
            return f"granted while another held it: {', '.join(clashes)}"
        if any(contest.busy for contest in contests):
            return None
    raise Untested("no two actors ever met at the lock")


def contend_for_lock(path: Path, take: Callable[[int], bool], count: int) -> LockCounts:
    """Take the lock again and again. Raises TimeoutError when it does not come.

    Under it each makes and removes one and the same file, so that who finds it there already is not alone. The server
    of a network filesystem answers O_EXCL itself: what clients cache of the file's content is not in question here.
    """
    busy = clashes = 0
    for _ in range(max(2, TURNS * 2 // count)):  # the more take part, the longer each waits for its turn
        with path.open("rb+") as file:  # closing it gives the lock back, of both kinds
            busy += _obtain(file.fileno(), take, HOLD_S * count)
            clashes += not _alone(path.with_suffix(".held"))
    return LockCounts(busy, clashes)


def _obtain(file: int, take: Callable[[int], bool], pause: float) -> int:
    """Wait for the lock; how often it was another's."""
    end, busy = time.monotonic() + LOCK_TIMEOUT_S, 0
    while not take(file):
        busy += 1
        if time.monotonic() > end:
            raise TimeoutError(f"the lock did not come within {LOCK_TIMEOUT_S:g} s")
        time.sleep(pause)
    return busy


def _alone(path: Path) -> bool:
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        time.sleep(HOLD_S)
        return False
    time.sleep(HOLD_S)
    path.unlink()
    return True


def mmap_fault(site: SharedFolder) -> str | None:
    """Does a file that its writer wrote anew read as new when another maps it, even where that one knew the old one?"""
    site.run_on_all(lambda: write_random(site.file("map")))
    site.run_on_all(lambda: [mapped_digest(path) for path in site.files("map")])  # fills the readers' caches
    written = site.run_on_all(lambda: write_random(site.file("map")))
    seen = site.run_on_all(lambda: [mapped_digest(path) for path in site.files("map")])
    texts = []
    for name, digests in zip(site.names, seen, strict=True):
        stale = [writer for writer, digest in enumerate(digests) if digest != written[writer]]
        texts += [f"{name} read old content of {site.join_names(stale)}"] if stale else []
    return "; ".join(texts) or None


def mapped_digest(path: Path) -> str:
    with path.open("rb") as file, mmap.mmap(file.fileno(), RECORD, access=mmap.ACCESS_READ) as mapped:
        return _digest(mapped[:])


def owner_fault(site: SharedFolder) -> str | None:
    """Do all actors see the same owner of a file, and is that who wrote it?

    Files of root may belong to another: NFS maps root to nobody unless told otherwise (root_squash, exports(5)).
    """
    uids = site.run_on_all(os.geteuid)
    seen = site.run_on_all(lambda: [owner(path) for path in site.files("mark")])
    faults = []
    for writer, name in enumerate(site.names):
        views = {reader: owners[writer] for reader, owners in zip(site.names, seen, strict=True)}
        if len(set(views.values())) > 1:
            texts = {reader: f"{uid}:{gid}" for reader, (uid, gid) in views.items()}
            faults.append(f"the file of {name} belongs to {group_by_reason(texts)}")
        elif uids[writer] not in (0, views[name][0]):
            faults.append(f"the file of {name}, who writes as uid {uids[writer]}, belongs to {views[name][0]}")
    return "; ".join(faults) or None


def owner(path: Path) -> tuple[int, int]:
    found = path.stat()
    return found.st_uid, found.st_gid


PROBES: dict[str, Callable[[SharedFolder], str | None]] = {
    "rename": rename_fault,
    "append": append_fault,
    "flock": flock_fault,
    "fcntl": fcntl_fault,
    "mmap": mmap_fault,
    "owner": owner_fault,
}
