"""A disk without room: told as that, with whose it is and what is left of it, since it says nothing of who trains."""

from __future__ import annotations

import os
import re
import resource
import socket
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import psutil

from seatrial.model import DiskFullError as DiskFullError
from seatrial.model import format_bytes
from seatrial.util.files import DISK_FULL, atomic_folder

# Where no number is told: in the system's words (safetensors, tokenizers, other programs) …
_WORDS = "|".join(re.escape(os.strerror(number)) for number in DISK_FULL)
_RUST = re.compile(rf"(?:{_WORDS}) \(os error \d+\)")
# … or in numpy's and torch.save's of a write that was cut short, whatever it was that cut it
_SHORT = re.compile(
    r"\d+ requested and \d+ written|PytorchStreamWriter.*failed|inline_container.*unexpected pos"
    r"|ios::clear: iostream error"
)
_SAID = re.compile(rf"{_WORDS}|{_SHORT.pattern}")
_PROBE = 2**20  # bytes: more than a full disk has left over

REMEDY = "Make room there, or name a run directory on a larger one (--out)"


def disk_full_error(error: BaseException, place: Path, what: str = "") -> DiskFullError | None:
    """The same as one sentence, if it is for want of room that ``error`` came when ``place`` was written; else None.

    ``what`` could not be done, in words.
    """
    reason = disk_full_reason(error, place)
    if reason is None:
        return None
    named = next((one.filename for one in _chain(error) if isinstance(one, OSError) and one.filename), None)
    path = Path(os.fsdecode(named)) if isinstance(named, (str, bytes)) else place
    return DiskFullError(f"{what or f'cannot write {path}'}: {reason}. {filesystem_usage(path)}. {REMEDY}")


@contextmanager
def atomic_write_folder(path: Path) -> Iterator[Path]:
    """``atomic_folder``, which raises NoRoom on a full disk: with what is free before that is given back."""
    with atomic_folder(path) as making, convert_disk_full(path):
        yield making


@contextmanager
def convert_disk_full(place: Path) -> Iterator[None]:
    """Within, what is raised for want of room when ``place`` is written becomes NoRoom."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if full := disk_full_error(error, place):
            raise full from error
        raise


def disk_full_reason(error: BaseException, place: Path) -> str | None:
    """What the disk said of a write that did not fit, if that is what ``error`` came of.

    Where nobody told why, a broken disk's write is cut short like a full one's: whether ``place`` takes anything now
    tells which it is.
    """
    short = ""
    for one in _chain(error):
        if isinstance(one, OSError) and one.errno:
            return first_line(one) if one.errno in DISK_FULL else None
        if _names_it(one):
            return first_line(one)
        short = short or (first_line(one) if is_short_write(one) else "")
    return short if short and _is_full(place) else None


def first_line(error: BaseException) -> str:
    return (str(error) or repr(error)).splitlines()[0]


def is_short_write(error: BaseException) -> bool:
    """Whether it is what numpy or torch.save says of a file that could not be written to its end."""
    return isinstance(error, (OSError, RuntimeError)) and bool(_SHORT.search(str(error)))


def is_disk_full_message(words: str) -> bool:
    """Whether a process that is not ours ended for want of room, by its last words."""
    return bool(_SAID.search(words))


def filesystem_usage(path: Path) -> str:
    """The file system that ``path`` is on, or would be: where it is, its type, its size and what is free."""
    there = _existing(path)
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


def _names_it(error: BaseException) -> bool:
    """NCCL's own errors are not: what it lacks room in is /dev/shm, and a matter of the machine.

    tokenizers raises Exception itself, with nothing but the system's words.
    """
    if type(error) is Exception:
        return bool(_RUST.fullmatch(str(error)))
    writes = isinstance(error, OSError) or type(error).__module__.startswith("safetensors")
    return writes and bool(re.search(_WORDS, str(error)))


def _is_full(place: Path) -> bool:
    """Whether a file beside it is refused for want of room, too; where files have a limit of their own, it may be."""
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return True
    try:
        with tempfile.TemporaryFile(dir=_existing(place)) as file:
            file.write(bytes(_PROBE))
            os.fsync(file.fileno())  # some network file systems refuse no sooner
    except OSError as error:
        return error.errno in DISK_FULL
    return False


def _existing(path: Path) -> Path:
    """The folder that ``path`` is, is in, or would be in."""
    return next(one for one in (path.absolute(), *path.absolute().parents) if one.is_dir()).resolve()
