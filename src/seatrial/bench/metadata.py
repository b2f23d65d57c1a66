"""Metadata operations on many empty files in one folder: create and stat for a limited time, then list and unlink.

A run that is killed leaves its files in a folder whose name begins with PREFIX; ``remove_leftovers`` removes them. The
name contains the PID of the process that created the folder: a later run on this node knows at once whether that
process has ended.
"""

from __future__ import annotations

import errno
import os
import re
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

PREFIX = "seatrial-metadata-"
_OWNER = re.compile(re.escape(PREFIX) + r"(?P<boot>[0-9a-f]{8})-(?P<namespace>\d+)-(?P<pid>\d{1,9})-")
# A folder that has not changed for this long belongs to a run that was killed: the check that calls this module changes
# its folder in every pass, and its default time limit is shorter than this
MIN_LEFTOVER_AGE_S = 3600.0


@dataclass(frozen=True)
class OperationTiming:
    """One kind of operation on ``files`` files, in ``seconds``."""

    files: int
    seconds: float


@dataclass(frozen=True)
class Leftover:
    """A folder of an earlier run: ``problem`` says why it was kept; empty if it was removed."""

    path: Path
    problem: str


def create_files(folder: Path, count: int, limit_s: float) -> OperationTiming:
    """Create a new folder with up to ``count`` empty files, within ``limit_s`` seconds. Raises OSError."""
    folder.mkdir()
    status = os.statvfs(folder)
    if status.f_files and status.f_favail < 2 * count:  # other users must still be able to create files
        text = f"{count:,} files are to be created, and only {status.f_favail:,} inodes are free"
        raise OSError(errno.ENOSPC, text, str(folder))
    flags = os.O_CREAT | os.O_EXCL | os.O_WRONLY
    return _time_operation(folder, count, limit_s, lambda path: os.close(os.open(path, flags, 0o600)))


def stat_files(folder: Path, count: int, limit_s: float) -> OperationTiming:
    """Stat up to ``count`` files by name, within ``limit_s`` seconds. Raises OSError."""
    return _time_operation(folder, count, limit_s, os.stat)


def list_files(folder: Path, count: int) -> OperationTiming:
    """Read all names of the folder. Raises OSError if it cannot be read or has fewer than ``count`` names."""
    started = time.perf_counter()
    with os.scandir(folder) as entries:
        listed = sum(1 for _ in entries)
    seconds = time.perf_counter() - started
    if listed < count:
        raise OSError(errno.EIO, f"{count - listed} of {count} files are missing in the list", str(folder))
    return OperationTiming(listed, seconds)


def unlink_files(folder: Path, count: int) -> OperationTiming:
    """Delete ``count`` files and their folder, without a time limit: none may be left. Raises OSError."""
    result = _time_operation(folder, count, float("inf"), os.unlink)
    folder.rmdir()
    return result


def owned_prefix() -> str:
    """PREFIX with the boot's ID, this process's PID namespace and its PID. Raises OSError without /proc."""
    boot, namespace = _boot_and_pid_namespace()
    return f"{PREFIX}{boot}-{namespace}-{os.getpid()}-"


def is_abandoned(path: Path, now: float) -> bool:
    """Whether the run of a folder has ended: its process ran on this node and is gone, or the folder is old.

    Old: not changed for MIN_LEFTOVER_AGE_S before ``now``.
    """
    return _owner_ended(path.name) or now - path.lstat().st_mtime >= MIN_LEFTOVER_AGE_S


def _owner_ended(name: str) -> bool:
    """Whether the process in the name is gone, and ran on this node since its boot, in this PID namespace."""
    owner = _OWNER.match(name)
    if owner is None or (owner["boot"], int(owner["namespace"])) != _boot_and_pid_namespace():
        return False
    return not psutil.pid_exists(int(owner["pid"]))


def _boot_and_pid_namespace() -> tuple[str, int]:
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8], os.stat("/proc/self/ns/pid").st_ino


def remove_leftovers(parent: Path, run_folder: Path) -> list[Leftover]:
    """Remove the folders in ``parent`` that killed runs of this user left there.

    Returns all folders of other runs, with the reason for each folder that is kept: it may belong to a live run or to
    another user. ``run_folder``: the new folder of this run. Ages are computed from its modification time, which the
    file server has set, since the clock of this node may differ.
    """
    now, leftovers = run_folder.lstat().st_mtime, []
    for path in sorted(parent.glob(f"{PREFIX}*")):
        if path == run_folder or path.is_symlink() or not path.is_dir():
            continue
        leftovers.append(Leftover(path, _remove(path, now)))
    return leftovers


def _remove(path: Path, now: float) -> str:
    """Remove a folder; return why it was kept, or "" if it was removed."""
    try:
        status = path.lstat()
        if status.st_uid != os.geteuid():
            return f"owned by uid {status.st_uid}"
        if not is_abandoned(path, now):
            return f"changed less than {MIN_LEFTOVER_AGE_S / 3600:g} h ago: another run may use it"
        shutil.rmtree(path)
    except FileNotFoundError:  # another node removed it
        return ""
    except OSError as error:
        return f"cannot be removed: {error.strerror}"
    return ""


def _time_operation(folder: Path, count: int, limit_s: float, action: Callable[[str], object]) -> OperationTiming:
    done, started = 0, time.perf_counter()
    for number in range(count):
        action(f"{folder}/{number}")
        done += 1
        if time.perf_counter() - started > limit_s:
            break
    return OperationTiming(done, time.perf_counter() - started)
