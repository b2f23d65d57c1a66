"""A disk without room: told as that, with whose it is and what is left of it, since it says nothing of who trains."""

from __future__ import annotations

import errno
import os
import re
import socket
from pathlib import Path

import psutil

from seatrial.model import SeatrialError, format_bytes

_NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)  # the last is a limit of the process (ulimit -f)
# Where no number is told: safetensors', which are the system's words; numpy's, and torch.save's, of a write cut short
_SAID = re.compile(
    "|".join(re.escape(os.strerror(number)) for number in _NO_ROOM)
    + r"|\d+ requested and \d+ written|PytorchStreamWriter.*failed|unexpected pos \d+ vs \d+"
)


REMEDY = "Make room there, or name a run directory on a larger one (--out)"


class NoRoom(SeatrialError):
    """What was to be kept did not fit: an error of who trains here, and no finding."""


def no_room(error: BaseException, place: Path, what: str = "") -> NoRoom | None:
    """The same as one sentence, if it is for want of room that ``error`` came when ``place`` was written; else None.

    ``what`` could not be done, in words.
    """
    reason = said(error)
    if reason is None:
        return None
    named = next((one.filename for one in _chain(error) if isinstance(one, OSError) and one.filename), None)
    path = Path(os.fsdecode(named)) if isinstance(named, (str, bytes)) else place
    return NoRoom(f"{what or f'cannot write {path}'}: {reason}. {room(path)}. {REMEDY}")


def said(error: BaseException) -> str | None:
    """What the disk said of a write that did not fit, if that is what ``error`` came of."""
    return next((str(one).splitlines()[0] for one in _chain(error) if _is_of_room(one)), None)


def told_in(words: str) -> bool:
    """Whether a process that is not ours ended for want of room, by its last words."""
    return bool(_SAID.search(words))


def room(path: Path) -> str:
    """The file system that ``path`` is on, or would be: where it is, its type, its size and what is free."""
    there = next(one for one in (path.absolute(), *path.absolute().parents) if one.exists()).resolve()
    held = os.statvfs(there)
    above = [one for one in psutil.disk_partitions(all=True) if there.is_relative_to(one.mountpoint)]
    mount = max(reversed(above), key=lambda one: len(one.mountpoint), default=None)  # the last hides those before
    name = f"{mount.mountpoint} ({mount.fstype})" if mount else f"the file system of {there}"
    size, free = (format_bytes(blocks * held.f_frsize) for blocks in (held.f_blocks, held.f_bavail))
    inodes = "; no inode is free" if held.f_files and not held.f_favail else ""
    return f"On {socket.gethostname()}, {name} has {size}, {free} of it free{inodes}"


def _chain(error: BaseException) -> list[BaseException]:
    """``error`` and what it came of."""
    chain: list[BaseException] = []
    one: BaseException | None = error
    while one is not None and one not in chain:
        chain.append(one)
        one = one.__cause__ or one.__context__
    return chain


def _is_of_room(error: BaseException) -> bool:
    """NCCL's own errors are not: what it lacks room in is /dev/shm, and a matter of the machine."""
    if isinstance(error, OSError) and error.errno:
        return error.errno in _NO_ROOM
    writes = isinstance(error, OSError) or type(error).__module__.startswith("safetensors")
    return bool(_SAID.search(str(error))) and (writes or "inline_container" in str(error))
