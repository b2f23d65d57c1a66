"""Mounted filesystems, and the four places that training writes to: /dev/shm, the temporary folder, home and /."""

from __future__ import annotations

import os
import re
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple

from seatrial.discover.file_readers import FieldReader, T, path_under, printable, read_text, start_in_thread
from seatrial.model import Frozen

# Filesystems without storage behind them. A type that is not named here is shown: unknown is not unimportant.
_PSEUDO = re.compile(
    r"autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fusectl|fuse\.(gvfsd-fuse|lxcfs|portal)|"
    r"hugetlbfs|mqueue|nsfs|proc|pstore|ramfs|rpc_pipefs|securityfs|selinuxfs|sysfs|tracefs"
)
# Mounts that the system makes for itself: "type target". /dev/shm is the one that is shown.
_SYSTEM = re.compile(r"tmpfs /(?!dev/shm$)(dev|proc|run|sys)(/.*)?|squashfs /snap/.*")
_ANSWER_S = 5.0  # a healthy parallel filesystem answers statfs in milliseconds, a busy one in seconds


class Mount(Frozen):
    """One filesystem. ``answers`` is False where it did not say its size within 5 s, as a dead NFS server does."""

    target: str
    source: str
    type: str
    options: str
    size_bytes: int | None
    free_bytes: int | None
    responding: bool
    unreadable: dict[str, str] = {}


class DirectorySpace(Frozen):
    """A folder, the filesystem it lies on, and what this user may still write there (bytes; 0 where it is missing)."""

    path: str
    exists: bool | None
    type: str | None
    size_bytes: int | None
    free_bytes: int | None
    writable: bool | None
    unreadable: dict[str, str] = {}


class MountFacts(Frozen):
    """``filesystems`` holds each real filesystem once; the two ``left_out`` counts are the rest."""

    filesystems: tuple[Mount, ...]
    omitted_pseudo: int
    omitted_duplicates: int
    shm: DirectorySpace
    tmp: DirectorySpace
    home: DirectorySpace
    root: DirectorySpace
    unreadable: dict[str, str] = {}


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str
    target: str
    options: str
    type: str
    source: str

    @property
    def pseudo(self) -> bool:
        return bool(_PSEUDO.fullmatch(self.type) or _SYSTEM.fullmatch(f"{self.type} {self.target}"))


class Usage(NamedTuple):
    size: int
    free: int  # to an ordinary user: the blocks kept for root are not in it
    writable: bool
    path: str  # as ``root`` sees it, symbolic links resolved


def read(root: Path = Path("/")) -> MountFacts:
    attempt = FieldReader()
    entries = attempt("filesystems", lambda: mountinfo(read_text(root / "proc/self/mountinfo"))) or []
    real = [entry for entry in entries if not entry.pseudo]
    shown = _once_each(real)

    def ask(path: str) -> Future[Usage]:
        return start_in_thread(lambda: usage(root, path))

    asked = [ask(entry.target) for entry in shown]
    places = {
        "shm": "/dev/shm",
        "tmp": os.environ.get("TMPDIR") or "/tmp",
        "home": os.path.expanduser("~"),
        "root": "/",
    }
    spaces = {name: ask(path) for name, path in places.items()}
    wait([*asked, *spaces.values()], timeout=_ANSWER_S)
    return MountFacts(
        filesystems=tuple(_mount(entry, answer) for entry, answer in zip(shown, asked, strict=True)),
        omitted_pseudo=len(entries) - len(real),
        omitted_duplicates=len(real) - len(shown),
        **{name: _space(path, spaces[name], entries) for name, path in places.items()},
        unreadable=attempt.unreadable,
    )


def mountinfo(content: str) -> list[MountEntry]:
    """The mounts in view, from the text of /proc/self/mountinfo: where one hides another, the upper one.

    Raises ValueError on a line that proc_pid_mountinfo(5) does not describe.
    """
    entries: dict[str, MountEntry] = {}
    for row in content.splitlines():
        before, dash, after = row.partition(" - ")
        fields, tail = before.split(" "), after.split(" ")
        if not dash or len(fields) < 6 or len(tail) < 3:
            raise ValueError(f"/proc/self/mountinfo: expected a mount, found {row[:60]!r}")
        target = _unescape(fields[4])
        entries[target] = MountEntry(fields[2], target, _options(fields[5], tail[2]), tail[0], _unescape(tail[1]))
    return list(entries.values())


def usage(root: Path, path: str) -> Usage:
    """What ``df`` and ``test -w`` say of a path. Raises OSError; may never return."""
    place = path_under(root, path)
    found = os.statvfs(place)
    resolved = "/" + os.path.relpath(os.path.realpath(place), os.path.realpath(root)).removeprefix(".")
    writable = os.access(place, os.W_OK | os.X_OK)
    return Usage(found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize, writable, resolved)


def _options(mount: str, superblock: str) -> str:
    """The options of a mount and of its filesystem; read-only at either level is read-only."""
    options = dict.fromkeys([*mount.split(","), *superblock.split(",")])
    if "ro" in options:
        options.pop("rw", None)
    return printable(",".join(options))


def _unescape(field: str) -> str:
    """mountinfo writes blanks and backslashes as octal: ``/mnt/my\\040data``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _once_each(entries: list[MountEntry]) -> list[MountEntry]:
    """One mount a filesystem and set of options, at its shortest path.

    A Kubernetes node or a container mounts the same disk dozens of times.
    """
    first: dict[tuple[str, str], MountEntry] = {}
    for entry in sorted(entries, key=lambda entry: len(entry.target)):
        first.setdefault((entry.device, entry.options), entry)
    return sorted(first.values(), key=lambda entry: entry.target)


def _answer(asked: Future[T]) -> T:
    """What came back by now. Raises the call's own OSError, or TimeoutError."""
    if not asked.done():
        raise TimeoutError(f"no answer within {_ANSWER_S:g} s")
    return asked.result()


def _mount(entry: MountEntry, asked: Future[Usage]) -> Mount:
    attempt = FieldReader()
    found = attempt("size_bytes", lambda: _answer(asked))
    return Mount(
        target=printable(entry.target),
        source=printable(entry.source),
        type=printable(entry.type),
        options=entry.options,
        size_bytes=found.size if found else None,
        free_bytes=found.free if found else None,
        responding=asked.done(),
        unreadable=attempt.unreadable,
    )


def _space(path: str, asked: Future[Usage], entries: list[MountEntry]) -> DirectorySpace:
    attempt = FieldReader()
    found = attempt("size_bytes", lambda: _answer(asked))
    missing = asked.done() and isinstance(asked.exception(), FileNotFoundError)
    nothing = Usage(0, 0, False, path) if missing else None
    known = found or nothing
    return DirectorySpace(
        path=printable(path),
        exists=not missing if known else None,
        type=_type_at(found.path, entries) if found else None,
        size_bytes=known.size if known else None,
        free_bytes=known.free if known else None,
        writable=known.writable if known else None,
        unreadable=attempt.unreadable,
    )


def _type_at(path: str, entries: list[MountEntry]) -> str | None:
    """The type of the filesystem that a path lies on: the one mounted closest above it."""
    above = [entry for entry in entries if Path(path).is_relative_to(entry.target)]
    return printable(max(above, key=lambda entry: len(entry.target)).type) if above else None
