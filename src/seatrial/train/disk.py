"""Detects full disks: converts write errors to DiskFullError with host, filesystem, size and free space."""

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
from seatrial.model import SeatrialError, UsageError, format_bytes
from seatrial.util.files import DISK_FULL, atomic_folder

# Errors of safetensors, tokenizers and other programs have no errno; their messages contain the system's text
_DISK_FULL_TEXT = "|".join(re.escape(os.strerror(number)) for number in DISK_FULL)
_RUST_DISK_FULL = re.compile(rf"(?:{_DISK_FULL_TEXT}) \(os error \d+\)")
# Messages of numpy and torch.save for an incomplete write; a full disk is only one of the possible causes
_SHORT_WRITE = re.compile(
    r"\d+ requested and \d+ written|PytorchStreamWriter.*failed|inline_container.*unexpected pos"
    r"|ios::clear: iostream error"
)
_DISK_FULL = re.compile(rf"{_DISK_FULL_TEXT}|{_SHORT_WRITE.pattern}")
_PROBE_BYTES = 2**20  # size of the test file in ``_is_full``

REMEDY = "Free space there, or set --out (prepared data: data.cache) to a directory on a larger filesystem"


def disk_full_error(error: BaseException, path: Path, action: str = "") -> DiskFullError | None:
    """A DiskFullError with filesystem usage if ``error``, raised while writing to ``path``, is due to a full disk.

    None for other errors. ``action``: the start of the message, by default "cannot write FILE".
    """
    reason = disk_full_reason(error, path)
    if reason is None:
        return None
    filenames = (cause.filename for cause in error_chain(error) if isinstance(cause, OSError) and cause.filename)
    filename = next(filenames, None)
    path = Path(os.fsdecode(filename)) if isinstance(filename, (str, bytes)) else path
    return DiskFullError(f"{action or f'cannot write {path}'}: {reason}. {filesystem_usage(path)}. {REMEDY}")


def write_error(error: Exception, path: Path, action: str) -> SeatrialError:
    """As ``disk_full_error``; for other errors a SeatrialError whose message begins with ``action``."""
    text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
    return disk_full_error(error, path, action) or SeatrialError(f"{action}: {text}")


@contextmanager
def atomic_write_folder(path: Path) -> Iterator[Path]:
    """As util.files.atomic_folder, but a full disk raises DiskFullError, whose message has the usage at that time."""
    with atomic_folder(path) as temporary, convert_disk_full(path):
        yield temporary


@contextmanager
def convert_disk_full(path: Path) -> Iterator[None]:
    """Context manager: converts errors due to a full disk while writing to ``path`` to DiskFullError."""
    try:
        yield
    except DiskFullError:
        raise
    except Exception as error:
        if disk_full := disk_full_error(error, path):
            raise disk_full from error
        raise


def require_writable(folder: Path, description: str) -> None:
    """Create ``folder`` if it does not exist, then write and remove a file in it. Raises UsageError if this fails."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=folder) as file:
            file.write(b"seatrial")
    except OSError as error:
        raise UsageError(f"{description}: {folder} is not writable: {error.strerror or error}") from error


def disk_full_reason(error: BaseException, path: Path) -> str | None:
    """The message of the error in the chain of ``error`` that reports a full disk; None if there is none.

    Since a broken disk also causes short writes without errno, a short write counts only if ``path`` is full now.
    """
    short_write = ""
    for cause in error_chain(error):
        if isinstance(cause, OSError) and cause.errno:
            return first_line(cause) if cause.errno in DISK_FULL else None
        if _reports_disk_full(cause):
            return first_line(cause)
        short_write = short_write or (first_line(cause) if is_short_write(cause) else "")
    return short_write if short_write and _is_full(path) else None


def first_line(error: BaseException) -> str:
    """The first line of the message of ``error``; without a message, of its repr."""
    return (str(error) or repr(error)).splitlines()[0]


def is_short_write(error: BaseException) -> bool:
    """Whether ``error`` is the error of numpy or torch.save for a file that was not fully written."""
    return isinstance(error, (OSError, RuntimeError)) and bool(_SHORT_WRITE.search(str(error)))


def is_disk_full_message(text: str) -> bool:
    """Whether ``text``, the output of another program, reports a full disk."""
    return bool(_DISK_FULL.search(text))


def filesystem_usage(path: Path) -> str:
    """Host, mount point, type, size and free space of the filesystem of ``path``, which need not exist."""
    folder = _existing_folder(path)
    usage = os.statvfs(folder)
    mounts = [mount for mount in psutil.disk_partitions(all=True) if folder.is_relative_to(mount.mountpoint)]
    # reversed: of several mounts at the same path, the latest hides the others
    mount = max(reversed(mounts), key=lambda mount: len(mount.mountpoint), default=None)
    name = f"{mount.mountpoint} ({mount.fstype})" if mount else f"the filesystem of {folder}"
    size, free = (format_bytes(blocks * usage.f_frsize) for blocks in (usage.f_blocks, usage.f_bavail))
    inodes = "; no inode is free" if usage.f_files and not usage.f_favail else ""
    return f"On {socket.gethostname()}, {name} has {size}, {free} of it free{inodes}"


def error_chain(error: BaseException) -> list[BaseException]:
    """``error`` and the errors that caused it (cause or context of each), nearest first."""
    chain: list[BaseException] = []
    cause: BaseException | None = error
    while cause is not None and cause not in chain:
        chain.append(cause)
        cause = cause.__cause__ or cause.__context__
    return chain


def _reports_disk_full(error: BaseException) -> bool:
    """Whether the message of an error without errno contains the system's text for a full disk.

    The package tokenizers raises a plain Exception. Errors of NCCL do not count, since they are about /dev/shm.
    """
    if type(error) is Exception:
        return bool(_RUST_DISK_FULL.fullmatch(str(error)))
    is_write_error = isinstance(error, OSError) or type(error).__module__.startswith("safetensors")
    return is_write_error and bool(re.search(_DISK_FULL_TEXT, str(error)))


def _is_full(path: Path) -> bool:
    """Whether a test file cannot be written to the filesystem of ``path`` for lack of space.

    Always True if there is a file size limit (ulimit -f), since the small test file would not reach that limit.
    """
    if resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY:
        return True
    try:
        with tempfile.TemporaryFile(dir=_existing_folder(path)) as file:
            file.write(bytes(_PROBE_BYTES))
            os.fsync(file.fileno())  # some network filesystems report the error only here
    except OSError as error:
        return error.errno in DISK_FULL
    return False


def _existing_folder(path: Path) -> Path:
    """``path`` if it is a folder, else its closest parent that is a folder; resolved."""
    candidates = (path.absolute(), *path.absolute().parents)
    return next(candidate for candidate in candidates if candidate.is_dir()).resolve()
