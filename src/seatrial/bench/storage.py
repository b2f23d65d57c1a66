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

from seatrial.bench.one_rank_per_node import ANSWER_S, Actors, bounded
from seatrial.model import format_bytes

T = TypeVar("T")

CHUNK = 2**22  # bytes of one read or write: 4 MiB is beyond the stripe size of the usual parallel filesystems
SMALL = 4096  # bytes of a small file


@dataclass(frozen=True)
class Site:
    """A folder that all actors share, or should share. Each has files of its own there, one of a kind."""

    folder: Path
    actors: Actors

    @property
    def me(self) -> int:
        return self.actors.me

    @property
    def names(self) -> tuple[str, ...]:
        return self.actors.names

    def who(self, actors: Iterable[int]) -> str:
        return ", ".join(self.names[actor] for actor in actors)

    def files(self, kind: str) -> list[Path]:
        return [self.folder / f"{kind}.{actor}" for actor in range(len(self.names))]

    def mine(self, kind: str) -> Path:
        return self.files(kind)[self.me]

    def of_next(self, kind: str) -> Path:
        """The file of the actor after us: for one actor alone, its own."""
        return self.files(kind)[(self.me + 1) % len(self.names)]

    def together(self, work: Callable[[], T], seconds: float = ANSWER_S) -> list[T]:
        """``work`` on all actors; see Actors."""
        return self.actors.together(work, seconds)

    def first(self, work: Callable[[], T]) -> T:
        """``work`` on the first actor alone, while the others wait."""
        return self.actors.leader.together(work)[0]


@contextmanager
def opened(path: str, actors: Actors) -> Iterator[Site]:
    """A fresh folder below ``path``, removed with all that is in it at the end, however that comes.

    Called by all ranks. Raises Trouble on all of them where an actor cannot make it, or cannot write a file there.
    """
    name = actors.together(lambda: f"seatrial-{secrets.token_hex(6)}")[0]
    site = Site(Path(path) / name, actors)
    try:
        site.together(lambda: site.folder.mkdir(exist_ok=True))
        site.together(lambda: write(site.mine("first"), name.encode()))
        yield site
    finally:
        if actors.me >= 0:
            _remove(site.folder)


def is_shared(site: Site) -> bool:
    """Whether each actor sees the file of the next: enough for those who only want to know what to read."""
    return all(site.together(lambda: site.of_next("first").exists()))


def _remove(folder: Path) -> None:
    """All actors do this at once, and find it half gone: what remains after that is for ``left_behind`` to tell."""
    with suppress(TimeoutError):  # a filesystem that hangs has been told already
        bounded(lambda: shutil.rmtree(folder, ignore_errors=True), ANSWER_S)


def left_behind(site: Site) -> bool:
    """Whether some actor still sees the folder, after its end."""
    return any(site.together(site.folder.exists))


def write(path: Path, data: bytes) -> None:
    """Write a file anew and store it (fsync). Raises OSError."""
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


@dataclass(frozen=True)
class Transfer:
    """``seconds`` that it took, and whether it went past the page cache (O_DIRECT)."""

    seconds: float
    direct: bool


def write_stream(path: Path, size: int) -> Transfer:
    """Write ``size`` bytes (a multiple of SMALL) one after the other, and wait until they are stored (fsync).

    They are 4 MiB of random bytes over and over: not to be compressed, though a store that looks for duplicates finds
    them. Raises OSError.
    """
    with mmap.mmap(-1, CHUNK) as buffer, memoryview(buffer) as view:
        buffer.write(os.urandom(CHUNK))
        file, direct = _open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        try:
            began, left = time.perf_counter(), size
            while left:
                left -= os.write(file, view[: min(left, CHUNK)])
            os.fsync(file)
            return Transfer(time.perf_counter() - began, direct)
        finally:
            os.close(file)


def read_stream(path: Path, size: int) -> Transfer:
    """Read a file of ``size`` bytes from its beginning to its end. Raises OSError, also when it ends before."""
    with mmap.mmap(-1, CHUNK) as buffer:
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
            return Transfer(time.perf_counter() - began, direct)
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


def create_small(folder: Path, count: int) -> float:
    """Seconds to make ``count`` files of 4 KiB in a new folder, without fsync. Raises OSError."""
    folder.mkdir()
    data = os.urandom(SMALL)
    return _timed(lambda path: path.write_bytes(data), folder, count)


def stat_small(folder: Path, count: int) -> float:
    return _timed(Path.stat, folder, count)


def unlink_small(folder: Path, count: int) -> float:
    return _timed(Path.unlink, folder, count)


def _timed(action: Callable[[Path], object], folder: Path, count: int) -> float:
    paths = [folder / f"{number}" for number in range(count)]
    began = time.perf_counter()
    for path in paths:
        action(path)
    return time.perf_counter() - began


def require_room(folder: Path, needed: int) -> None:
    """Raises OSError where fewer bytes are free to this user: better no figure than a filesystem run full."""
    found = os.statvfs(folder)
    free = found.f_bavail * found.f_frsize
    if free < needed:
        text = f"{format_bytes(needed)} are needed for this measurement, {format_bytes(free)} are free"
        raise OSError(errno.ENOSPC, text, str(folder))
