"""A folder that all nodes share, and the speed of writes and reads in it."""

from __future__ import annotations

import errno
import mmap
import os
import secrets
import shutil
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S, Participants
from seatrial.model import format_bytes
from seatrial.util.threads import start_in_thread

T = TypeVar("T")

CHUNK_BYTES = 2**22  # bytes per read or write; larger than the stripe size of common parallel filesystems
SMALL_FILE_BYTES = 4096


@dataclass(frozen=True)
class SharedFolder(Participants):
    """A folder on a filesystem that all participants should share.

    Each participant has one file of each ``kind`` in the folder.
    """

    path: Path

    @property
    def by_mode(self) -> dict[str, SharedFolder]:
        """``single``: the folder with the first participant only; with several nodes also ``concurrent``: with all."""
        return {"single": self.first_only} | ({"concurrent": self} if self.several_nodes else {})

    def join_names(self, indices: Iterable[int]) -> str:
        """Comma-separated names of the participants with these indices."""
        return ", ".join(self.names[index] for index in indices)

    def files(self, kind: str) -> list[Path]:
        """Paths of the files of all participants, by index."""
        return [self.path / f"{kind}.{index}" for index in range(len(self.names))]

    def file(self, kind: str) -> Path:
        """Path of this participant's file."""
        return self.files(kind)[self.index]

    def next_file(self, kind: str) -> Path:
        """Path of the next participant's file; with one participant, of its own file."""
        return self.files(kind)[(self.index + 1) % len(self.names)]

    def run_on_first(self, work: Callable[[], T]) -> T:
        """Result of ``work`` on the first participant, while the others wait."""
        return self.first_only.run_on_all(work)[0]


@contextmanager
def temporary_folder(path: str, participants: Participants, prefix: str = "seatrial-") -> Iterator[SharedFolder]:
    """Create a folder below ``path`` and remove it with its contents afterwards. Called by all ranks together.

    Raises ParticipantError on all ranks if a participant cannot create it or cannot write a file in it.
    """
    name = participants.run_on_all(lambda: f"{prefix}{secrets.token_hex(6)}")[0]
    folder = SharedFolder(participants.names, participants.index, participants.several_nodes, Path(path) / name)
    try:
        folder.run_on_all(lambda: folder.path.mkdir(exist_ok=True))
        folder.run_on_all(lambda: write_and_sync(folder.file("first"), name.encode()))
        yield folder
    finally:
        if participants.index >= 0:  # all participants remove it concurrently; ``still_exists`` finds leftovers
            with suppress(TimeoutError):  # the filesystem hangs, which an earlier step has reported
                start_in_thread(lambda: shutil.rmtree(folder.path, ignore_errors=True)).result(STEP_TIMEOUT_S)


def is_shared(folder: SharedFolder) -> bool:
    """Whether each participant sees the name of the next participant's file; contents are not compared."""
    return all(folder.run_on_all(lambda: folder.next_file("first").exists()))


def still_exists(folder: SharedFolder) -> bool:
    """Whether any participant still sees the folder after its removal."""
    return any(folder.run_on_all(folder.path.exists))


def write_and_sync(path: Path, data: bytes) -> None:
    """Write a file with ``data``, replacing any earlier content, and fsync it. Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class StreamResult:
    """Duration in ``seconds``; ``direct``: whether the page cache was bypassed (O_DIRECT)."""

    seconds: float
    direct: bool


def write_stream(path: Path, size: int) -> StreamResult:
    """Write ``size`` bytes (a multiple of SMALL_FILE_BYTES) sequentially, then fsync. Raises OSError.

    The data is CHUNK_BYTES random bytes, repeated: not compressible, but a deduplicating store finds the repetition.
    """
    with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as view:
        buffer.write(os.urandom(CHUNK_BYTES))
        with _opened(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC) as (file, direct):
            started, remaining = time.perf_counter(), size
            while remaining:
                remaining -= os.write(file, view[: min(remaining, CHUNK_BYTES)])
            os.fsync(file)
            return StreamResult(time.perf_counter() - started, direct)


def read_stream(path: Path, size: int) -> StreamResult:
    """Read a file of ``size`` bytes sequentially. Raises OSError if the file cannot be read or is shorter."""
    with mmap.mmap(-1, CHUNK_BYTES) as buffer, _opened(path, os.O_RDONLY) as (file, direct):
        if not direct:
            os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
        started, remaining = time.perf_counter(), size
        while remaining:
            count = os.readv(file, [buffer])
            if not count:
                raise OSError(errno.EIO, f"end of file, {remaining} of {size} bytes missing", str(path))
            remaining -= count
        return StreamResult(time.perf_counter() - started, direct)


@contextmanager
def _opened(path: Path, flags: int) -> Iterator[tuple[int, bool]]:
    """(file descriptor, whether O_DIRECT is used); not every filesystem supports O_DIRECT (open(2): EINVAL)."""
    direct = True
    try:
        file = os.open(path, flags | os.O_DIRECT, 0o600)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        file, direct = os.open(path, flags, 0o600), False
    try:
        yield file, direct
    finally:
        os.close(file)


def create_small_files(folder: Path, count: int) -> float:
    """Seconds to create ``count`` files of SMALL_FILE_BYTES in a new folder, without fsync. Raises OSError."""
    folder.mkdir()
    data = os.urandom(SMALL_FILE_BYTES)
    return time_small_files(lambda path: path.write_bytes(data), folder, count)


def time_small_files(action: Callable[[Path], object], folder: Path, count: int) -> float:
    """Seconds to call ``action``, such as Path.stat, with the path of each small file of a folder. Raises OSError."""
    paths = [folder / f"{number}" for number in range(count)]
    started = time.perf_counter()
    for path in paths:
        action(path)
    return time.perf_counter() - started


def require_free_space(folder: Path, needed: int) -> None:
    """Raise OSError if fewer than ``needed`` bytes are free for this user, so that the filesystem does not fill up."""
    status = os.statvfs(folder)
    free = status.f_bavail * status.f_frsize
    if free < needed:
        text = f"{format_bytes(needed)} needed for this measurement, {format_bytes(free)} free"
        raise OSError(errno.ENOSPC, text, str(folder))
