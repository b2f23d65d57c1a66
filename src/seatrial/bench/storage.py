"""A folder in which all nodes work together, and how fast they write and read there."""

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

from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S, Participants, run_with_timeout
from seatrial.model import format_bytes

T = TypeVar("T")

CHUNK_BYTES = 2**22  # bytes of one read or write: 4 MiB is beyond the stripe size of the usual parallel filesystems
SMALL_FILE_BYTES = 4096  # bytes of a small file


@dataclass(frozen=True)
class SharedFolder:
    """A folder that all actors share, or should share. Each has files of its own there, one of a kind."""

    path: Path
    participants: Participants

    @property
    def index(self) -> int:
        return self.participants.index

    @property
    def names(self) -> tuple[str, ...]:
        return self.participants.names

    def join_names(self, actors: Iterable[int]) -> str:
        return ", ".join(self.names[actor] for actor in actors)

    def files(self, kind: str) -> list[Path]:
        return [self.path / f"{kind}.{actor}" for actor in range(len(self.names))]

    def file(self, kind: str) -> Path:
        return self.files(kind)[self.index]

    def next_file(self, kind: str) -> Path:
        """The file of the actor after us: for one actor alone, its own."""
        return self.files(kind)[(self.index + 1) % len(self.names)]

    def run_on_all(self, work: Callable[[], T], seconds: float = STEP_TIMEOUT_S) -> list[T]:
        """``work`` on all actors; see Actors."""
        return self.participants.run_on_all(work, seconds)

    def run_on_first(self, work: Callable[[], T]) -> T:
        """``work`` on the first actor alone, while the others wait."""
        return self.participants.first_only.run_on_all(work)[0]


@contextmanager
def temporary_folder(path: str, actors: Participants) -> Iterator[SharedFolder]:
    """A fresh folder below ``path``, removed with all that is in it at the end, however that comes.

    Called by all ranks. Raises Trouble on all of them where an actor cannot make it, or cannot write a file there.
    """
    name = actors.run_on_all(lambda: f"seatrial-{secrets.token_hex(6)}")[0]
    site = SharedFolder(Path(path) / name, actors)
    try:
        site.run_on_all(lambda: site.path.mkdir(exist_ok=True))
        site.run_on_all(lambda: write_and_sync(site.file("first"), name.encode()))
        yield site
    finally:
        if actors.index >= 0:
            _remove(site.path)


def is_shared(site: SharedFolder) -> bool:
    """Whether each actor sees the file of the next: enough for those who only want to know what to read."""
    return all(site.run_on_all(lambda: site.next_file("first").exists()))


def _remove(folder: Path) -> None:
    """All actors do this at once, and find it half gone: what remains after that is for ``left_behind`` to tell."""
    with suppress(TimeoutError):  # a filesystem that hangs has been told already
        run_with_timeout(lambda: shutil.rmtree(folder, ignore_errors=True), STEP_TIMEOUT_S)


def still_exists(site: SharedFolder) -> bool:
    """Whether some actor still sees the folder, after its end."""
    return any(site.run_on_all(site.path.exists))


def write_and_sync(path: Path, data: bytes) -> None:
    """Write a file anew and store it (fsync). Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class StreamResult:
    """``seconds`` that it took, and whether it went past the page cache (O_DIRECT)."""

    seconds: float
    direct: bool


def write_stream(path: Path, size: int) -> StreamResult:
    """Write ``size`` bytes (a multiple of SMALL) one after the other, and wait until they are stored (fsync).

    They are 4 MiB of random bytes over and over: not to be compressed, though a store that looks for duplicates finds
    them. Raises OSError.
    """
    with mmap.mmap(-1, CHUNK_BYTES) as buffer, memoryview(buffer) as view:
        buffer.write(os.urandom(CHUNK_BYTES))
        file, direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            began, left = time.perf_counter(), size
            while left:
                left -= os.write(file, view[: min(left, CHUNK_BYTES)])
            os.fsync(file)
            return StreamResult(time.perf_counter() - began, direct)
        finally:
            os.close(file)


def read_stream(path: Path, size: int) -> StreamResult:
    """Read a file of ``size`` bytes from its beginning to its end. Raises OSError, also when it ends before."""
    with mmap.mmap(-1, CHUNK_BYTES) as buffer:
        file, direct = _open(path, os.O_RDONLY)
        try:
            if not direct:
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            began, left = time.perf_counter(), size
            while left:
                got = os.readv(file, [buffer])
                if not got:
                    raise OSError(errno.EIO, f"ended {left} bytes before its end", str(path))
                left -= got
            return StreamResult(time.perf_counter() - began, direct)
        finally:
            os.close(file)


def _open(path: Path, flags: int) -> tuple[int, bool]:
    """The file, and whether it goes past the page cache: not every filesystem offers that (open(2): EINVAL)."""
    try:
        return os.open(path, flags | os.O_DIRECT, 0o600), True
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.open(path, flags, 0o600), False


def create_small_files(folder: Path, count: int) -> float:
    """Seconds to make ``count`` files of 4 KiB in a new folder, without fsync. Raises OSError."""
    folder.mkdir()
    data = os.urandom(SMALL_FILE_BYTES)
    return _timed(lambda path: path.write_bytes(data), folder, count)


def stat_small_files(folder: Path, count: int) -> float:
    return _timed(Path.stat, folder, count)


def unlink_small_files(folder: Path, count: int) -> float:
    return _timed(Path.unlink, folder, count)


def _timed(action: Callable[[Path], object], folder: Path, count: int) -> float:
    paths = [folder / f"{number}" for number in range(count)]
    began = time.perf_counter()
    for path in paths:
        action(path)
    return time.perf_counter() - began


def require_free_space(folder: Path, needed: int) -> None:
    """Raises OSError where fewer bytes are free to this user: better no figure than a filesystem run full."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < needed:
        text = f"{format_bytes(needed)} are needed for this measurement, {format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, text, str(folder))
