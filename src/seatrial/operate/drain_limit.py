"""Limits how many nodes seatrial takes out of service within a time, so that one bug cannot drain a whole cluster.

The record is a folder on a filesystem that all nodes share: one file per node that was taken out, numbered 1, 2, 3, ….
A process that wants the next entry creates the file of the next number with link(2). On NFS too, link(2) fails if
another process was first. So a process has read all earlier entries when it creates its own, and needs no lock.
"""

from __future__ import annotations

import contextlib
import os
import re
import shlex
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import Field, ValidationError

from seatrial.model import Frozen, SeatrialError
from seatrial.util.input_files import read_bytes

FOLDER = "drains"  # name of the record in the folder of --state-dir
_NAME = re.compile(r"(\d{6,12})\.json")
_MAX_ENTRY_BYTES = 2**16
_MAX_TIME = 2.0**37  # the year 6325: localtime accepts it
_KEPT_WINDOWS = 24  # entries older than this many windows are removed: with a window of one hour, after a day
_MAX_CLOCK_ERROR_S = 60.0  # an entry that is further in the future was written with a wrong clock
_MAX_TRIES = 1000  # attempts to take the next free number: more nodes do not fail at the same moment


@dataclass(frozen=True)
class DrainLimit:
    """``share`` (0 to 1) of ``nodes`` may be drained within ``window_s`` seconds, and always at least one node."""

    share: float
    window_s: float
    nodes: int

    @property
    def max_nodes(self) -> int:
        """The number of nodes that may be taken out of service within the window."""
        return max(1, int(self.share * self.nodes + 1e-9))  # 0.29 * 100 is 28.999999999999996


class Drain(Frozen):
    """The content of an entry of the record. ``time``: seconds since 1970 by the clock of the node that wrote it."""

    node: str
    run_id: str
    reason: str
    time: Annotated[float, Field(ge=0, lt=_MAX_TIME, allow_inf_nan=False)]


class _Entry(NamedTuple):
    """An entry as read. ``written``: the earliest time (seconds since 1970) at which it can have been written.

    A node whose clock is behind writes a time that would end the window too early. But an entry is younger than all
    entries before it, and many file servers date the file by their own clock. So ``written`` is the latest of: the time
    in the entry, the date of its file, and ``written`` of the entry before it.
    """

    drain: Drain
    written: float


@dataclass(frozen=True)
class DrainAnswer:
    """``granted``: whether the node may be taken out of service; ``reason``: why not, empty if it may.

    ``drains``: the entries within the window, including the entry of this node if ``granted``.
    """

    granted: bool
    reason: str
    drains: tuple[Drain, ...] = ()


def prepare(state_dir: Path) -> None:
    """Create the record in an existing folder, once per site. Raises OSError.

    ``request_drain`` never creates it: while the shared filesystem is not mounted, each node would create a record of
    its own on its local disk, and no limit would hold.
    """
    (state_dir / FOLDER).mkdir(mode=0o755, exist_ok=True)


def request_drain(
    state_dir: Path, node: str, run_id: str, reason: str, limit: DrainLimit, now: float, *, dry_run: bool = False
) -> DrainAnswer:
    """Ask to take ``node`` out of service at the time ``now``, and record it if that is granted.

    If the node has an entry in the window already, the answer is yes, without a second entry. An entry from the future
    (a wrong clock) counts until its window ends, and so do the entries after it. If the record cannot be read or
    written, the answer is no. ``dry_run`` records nothing.
    The call can hang if the filesystem does: the caller needs a time limit of its own.
    """
    folder, new = state_dir / FOLDER, Drain(node=node, run_id=run_id, reason=reason, time=now)
    try:
        now = now if dry_run else min(now, _filesystem_time(folder))  # this node's clock may be ahead of the server's
        entries = _read_entries(folder)
        recent = [entry.drain for entry in entries.values() if entry.written > now - limit.window_s]
        next_number = max(entries, default=0) + 1
        for number in range(next_number, next_number + _MAX_TRIES):
            if answer := _answer_without_entry(recent, node, limit, now):
                return answer
            if dry_run or _create(folder, number, new):
                _remove_old(folder, entries, now - _KEPT_WINDOWS * limit.window_s)
                return DrainAnswer(True, "", (*recent, new))
            recent.append(_read_entry(_path(folder, number)))  # another node was first
    except FileNotFoundError:
        create = shlex.join(("mkdir", str(folder)))
        return DrainAnswer(False, f"no drain record. Create it once, on the shared filesystem: {create}")
    except (OSError, ValueError) as error:
        return DrainAnswer(False, f"the drain record {folder} cannot be read or written: {error}")
    return DrainAnswer(False, f"no free entry in {folder} after {_MAX_TRIES} tries")


def read(state_dir: Path) -> list[Drain]:
    """Return all entries of the record, in the order of their numbers. Raises SeatrialError."""
    try:
        return [entry.drain for entry in _read_entries(state_dir / FOLDER).values()]
    except (OSError, ValueError) as error:
        raise SeatrialError(f"the drain record cannot be read: {error}") from error


def _answer_without_entry(recent: list[Drain], node: str, limit: DrainLimit, now: float) -> DrainAnswer | None:
    """Return the answer if the node has an entry already or the limit is reached; None if the node may get an entry."""
    nodes = sorted({drain.node for drain in recent})
    if node in nodes:
        return DrainAnswer(True, "", tuple(recent))
    if len(nodes) < limit.max_nodes:
        return None
    ahead = sorted({drain.node for drain in recent if drain.time > now + _MAX_CLOCK_ERROR_S})
    clock = (
        f"; entries of {', '.join(ahead)} are from the future: correct the clocks, then remove them" if ahead else ""
    )
    return DrainAnswer(
        False,
        f"drain limit: {len(nodes)} of {limit.nodes} nodes within {limit.window_s:.0f} s ({', '.join(nodes)}), "
        f"and at most {limit.max_nodes} are allowed (share {limit.share:g}){clock}",
        tuple(recent),
    )


def _path(folder: Path, number: int) -> Path:
    return folder / f"{number:06d}.json"


def _read_entries(folder: Path) -> dict[int, _Entry]:
    """Return the entries by number. Raises OSError, and ValueError for a file that is not an entry."""
    numbers = sorted(int(match[1]) for name in os.listdir(folder) if (match := _NAME.fullmatch(name)))
    entries, written = dict[int, _Entry](), 0.0
    for number in numbers:
        with contextlib.suppress(FileNotFoundError):  # another node has just removed an old one
            drain, path = _read_entry(_path(folder, number)), _path(folder, number)
            written = max(written, drain.time, path.stat().st_mtime)
            entries[number] = _Entry(drain, written)
    return entries


def _read_entry(path: Path) -> Drain:
    content = read_bytes(path, _MAX_ENTRY_BYTES)
    try:
        return Drain.model_validate_json(content)
    except ValidationError as error:
        raise ValueError(f"{path} is not an entry; look at it and remove it ({error.error_count()} errors)") from error


def _filesystem_time(folder: Path) -> float:
    """Return the time (seconds since 1970) of a new file, on NFS by the clock of the server. Raises OSError."""
    with tempfile.NamedTemporaryFile(prefix=".incomplete-", dir=folder) as file:
        file.write(b"0")
        file.flush()
        os.fsync(file.fileno())
        return os.fstat(file.fileno()).st_mtime


def _create(folder: Path, number: int, entry: Drain) -> bool:
    """Create the file of this number, complete or not at all. Return False if it exists already. Raises OSError."""
    descriptor, name = tempfile.mkstemp(prefix=".incomplete-", dir=folder)
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(entry.model_dump_json().encode())
            file.flush()
            os.fchmod(descriptor, 0o644)
            os.fsync(descriptor)
        try:
            os.link(name, _path(folder, number))
        except FileExistsError:  # the link is ours if an NFS client repeated its request because the answer was lost
            return os.stat(name).st_nlink == 2
        return True
    finally:
        os.unlink(name)


def _remove_old(folder: Path, entries: dict[int, _Entry], before: float) -> None:
    """Remove the entries written before this time, except the newest entry, which has the last number."""
    for number, entry in entries.items():
        if entry.written < before and number != max(entries):
            with contextlib.suppress(OSError):
                _path(folder, number).unlink()
