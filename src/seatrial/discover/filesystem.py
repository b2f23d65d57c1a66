"""Mounted filesystems, and the space in /dev/shm, in the temporary and home directories, and in /."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable
from concurrent.futures import Future, wait
from pathlib import Path
from typing import NamedTuple

from seatrial.discover.file_readers import FieldReader, FileFacts, T, path_under, read_text
from seatrial.util.text import printable
from seatrial.util.threads import start_in_thread

# Filesystem types without storage. Types that are not listed here are reported.
_PSEUDO_TYPE = re.compile(
    r"autofs|binfmt_misc|bpf|cgroup2?|configfs|debugfs|devpts|devtmpfs|efivarfs|fusectl|fuse\.(gvfsd-fuse|lxcfs|portal)|"
    r"hugetlbfs|mqueue|nsfs|proc|pstore|ramfs|rpc_pipefs|securityfs|selinuxfs|sysfs|tracefs"
)
# Mounts of the operating system, as "type target". Of the tmpfs mounts in these folders only /dev/shm is reported.
_SYSTEM_MOUNT = re.compile(r"tmpfs /(?!dev/shm$)(dev|proc|run|sys)(/.*)?|squashfs /snap/.*")
_RESPONSE_TIMEOUT_S = 5.0  # a healthy parallel filesystem answers statvfs in milliseconds, a busy one in seconds


class Mount(FileFacts):
    """One filesystem; ``responding`` is False if statvfs did not return within 5 s (a dead NFS server)."""

    target: str
    source: str
    type: str
    options: str
    size_bytes: int | None
    free_bytes: int | None
    responding: bool


class DirectorySpace(FileFacts):
    """A directory. ``size_bytes``, ``free_bytes``: of its filesystem, 0 if the directory does not exist.

    ``type``: type of its filesystem. ``writable``: whether this user may create files in the directory.
    """

    path: str
    exists: bool | None
    type: str | None
    size_bytes: int | None
    free_bytes: int | None
    writable: bool | None


class MountFacts(FileFacts):
    """``filesystems``: one mount for each filesystem with storage and each set of mount options.

    ``omitted_pseudo``: number of mounts without storage or of the operating system. ``omitted_duplicates``: number of
    further mounts with the filesystem and the options of a mount in ``filesystems``.
    """

    filesystems: tuple[Mount, ...]
    omitted_pseudo: int
    omitted_duplicates: int
    shm: DirectorySpace
    tmp: DirectorySpace
    home: DirectorySpace
    root: DirectorySpace


class MountEntry(NamedTuple):
    """One line of /proc/self/mountinfo."""

    device: str  # major and minor number, such as 259:2
    target: str
    options: str
    type: str
    source: str


class Usage(NamedTuple):
    """Size and free space of a filesystem in bytes; ``path``: the path under ``root``, with symbolic links resolved."""

    size: int
    free: int  # bytes that users without root privileges may write
    writable: bool
    path: str


def read(root: Path = Path("/")) -> MountFacts:
    """The mounts in ``root``/proc and the space in four directories.

    Takes 5 s if a filesystem does not respond.
    """
    reader = FieldReader()
    entries = reader("filesystems", lambda: mountinfo(read_text(root / "proc/self/mountinfo"))) or []
    with_storage = [
        entry
        for entry in entries
        if not (_PSEUDO_TYPE.fullmatch(entry.type) or _SYSTEM_MOUNT.fullmatch(f"{entry.type} {entry.target}"))
    ]
    reported = _without_duplicates(with_storage)

    def start_usage(path: str) -> Future[Usage]:
        return start_in_thread(lambda: usage(root, path))

    mount_usage = [start_usage(entry.target) for entry in reported]
    directories = {
        "shm": "/dev/shm",
        "tmp": os.environ.get("TMPDIR") or "/tmp",
        "home": os.path.expanduser("~"),
        "root": "/",
    }
    directory_usage = {name: start_usage(path) for name, path in directories.items()}
    wait([*mount_usage, *directory_usage.values()], timeout=_RESPONSE_TIMEOUT_S)
    return MountFacts(
        filesystems=tuple(_mount(entry, future) for entry, future in zip(reported, mount_usage, strict=True)),
        omitted_pseudo=len(entries) - len(with_storage),
        omitted_duplicates=len(with_storage) - len(reported),
        **{name: _directory_space(path, directory_usage[name], entries) for name, path in directories.items()},
        unreadable=reader.unreadable,
    )


def mountinfo(content: str) -> list[MountEntry]:
    """The visible mounts, from the text of /proc/self/mountinfo; a later mount hides an earlier one on the same target.

    Raises ValueError on a line that does not match proc_pid_mountinfo(5).
    """
    entries: dict[str, MountEntry] = {}
    for line in content.splitlines():
        mount_text, separator, filesystem_text = line.partition(" - ")
        mount_fields, filesystem_fields = mount_text.split(" "), filesystem_text.split(" ")
        if not separator or len(mount_fields) < 6 or len(filesystem_fields) < 3:
            raise ValueError(f"/proc/self/mountinfo: expected a mount, read {line[:60]!r}")
        _mount_id, _parent_id, device, _mount_root, target, mount_options, *_ = mount_fields
        fs_type, source, fs_options, *_ = filesystem_fields
        target = _unescape(target)
        entries[target] = MountEntry(device, target, _options(mount_options, fs_options), fs_type, _unescape(source))
    return list(entries.values())


def mount_of(path: str, mounts: Iterable[MountEntry]) -> MountEntry | None:
    """The mount that contains a resolved path; None if there is none."""
    containing = [mount for mount in mounts if Path(path).is_relative_to(mount.target)]
    return max(containing, key=lambda mount: len(mount.target), default=None)


def filesystem_type(path: Path) -> str | None:
    """The filesystem type of an existing path; None if no mount contains it. Raises OSError or ValueError."""
    mount = mount_of(os.path.realpath(path), mountinfo(read_text(Path("/proc/self/mountinfo"))))
    return mount and printable(mount.type)


def usage(root: Path, path: str) -> Usage:
    """The values of ``df`` and ``test -w`` for a path. Raises OSError; can hang on a dead server."""
    directory = path_under(root, path)
    stat = os.statvfs(directory)
    below_root = os.path.relpath(os.path.realpath(directory), os.path.realpath(root))
    resolved = "/" if below_root == "." else f"/{below_root}"
    writable = os.access(directory, os.W_OK | os.X_OK)
    return Usage(stat.f_blocks * stat.f_frsize, stat.f_bavail * stat.f_frsize, writable, resolved)


def _options(mount: str, superblock: str) -> str:
    """The options of a mount and of its filesystem; ``ro`` of either one takes precedence."""
    options = dict.fromkeys([*mount.split(","), *superblock.split(",")])
    if "ro" in options:
        options.pop("rw", None)
    return printable(",".join(options))


def _unescape(field: str) -> str:
    """The field with octal escapes of mountinfo decoded: ``/mnt/my\\040data`` → ``/mnt/my data``."""
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)


def _without_duplicates(entries: list[MountEntry]) -> list[MountEntry]:
    """Of the mounts of one filesystem with the same options, keep the one with the shortest path.

    Kubernetes nodes and containers mount the same disk dozens of times.
    """
    shortest: dict[tuple[str, str], MountEntry] = {}  # (device, options) → mount with the shortest path
    for entry in sorted(entries, key=lambda entry: len(entry.target)):
        shortest.setdefault((entry.device, entry.options), entry)
    return sorted(shortest.values(), key=lambda entry: entry.target)


def _result(future: Future[T]) -> T:
    """The result of a call if it has returned. Raises TimeoutError, or the OSError of the call."""
    if not future.done():
        raise TimeoutError(f"no response within {_RESPONSE_TIMEOUT_S:g} s")
    return future.result()


def _mount(entry: MountEntry, future: Future[Usage]) -> Mount:
    reader = FieldReader()
    space = reader("size_bytes", lambda: _result(future))
    return Mount(
        target=printable(entry.target),
        source=printable(entry.source),
        type=printable(entry.type),
        options=entry.options,
        size_bytes=space.size if space else None,
        free_bytes=space.free if space else None,
        responding=future.done(),
        unreadable=reader.unreadable,
    )


def _directory_space(path: str, future: Future[Usage], entries: list[MountEntry]) -> DirectorySpace:
    reader = FieldReader()
    measured = reader("size_bytes", lambda: _result(future))
    is_missing = future.done() and isinstance(future.exception(), FileNotFoundError)
    space = Usage(0, 0, False, path) if is_missing else measured
    mount = mount_of(measured.path, entries) if measured else None
    return DirectorySpace(
        path=printable(path),
        exists=not is_missing if space else None,
        type=printable(mount.type) if mount else None,
        size_bytes=space.size if space else None,
        free_bytes=space.free if space else None,
        writable=space.writable if space else None,
        unreadable=reader.unreadable,
    )
