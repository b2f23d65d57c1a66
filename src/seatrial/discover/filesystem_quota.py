"""Quotas of user, group and project, and the fullest server disk of Lustre, from the output of the filesystem's tools.

A tool that is missing, hangs, fails or prints another format than those parsed here gives a reason, never a number.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Callable, Sequence
from typing import NamedTuple

from seatrial.util.processes import run_command
from seatrial.util.text import error_text, printable

TOOL_TIMEOUT_S = 20.0  # lfs asks every server; a healthy one answers in milliseconds
# The table titles of lfs and quota; some versions of lfs call the columns bquota, blimit, iquota, ...
_TITLE = re.compile(
    r"\s*Filesystem\s+(kbytes|blocks|space|used)\s+b?quota\s+b?limit\s+b?grace\s+files\s+i?quota\s+i?limit\s+i?grace\s*"
)
_NO_QUOTA = re.compile(r"Disk quotas for (user|group) \S+ \([ug]id \d+\): (none|no limited resources used)\s*")
_PROJECT = re.compile(r"\s*(\d+)\s+[-P]\s+\S.*")  # a line of lfs project -d; project 0 is no project
_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kmgtpe]?)\*?", re.IGNORECASE)  # "*": above the limit
_NOTES = re.compile(r"[ugp]id \d+ is using default .*")
_PARTLY_DOWN = "lfs: some servers do not answer, so that its numbers are inaccurate (lfs check servers)"
_BEEGFS_7_TITLE = "name,id,size,hard,files,hard"
_BEEGFS_UNLIMITED = 2**63 - 1  # set by `beegfs quota set-limits --space unlimited`
_OST = re.compile(r"(\S+)_UUID\s+(?:\S+\s+){3}(\d+)%\s+\S.*\[OST:\d+\]")
# ldiskfs reserves 5 % of an OST and is slow above 95 %; a full OST fails writes although others have space.
# Sources: Lustre manual, Managing Free Space; wiki.lustre.org/Handling_Full_OSTs
MAX_TARGET_USED_PERCENT = 95
_INACTIVE = re.compile(r"(\S+?)(?:_UUID)?\s*: inactive device")


class Quota(NamedTuple):
    """Used and allowed bytes and files of a user, group or project; a limit of None is unlimited."""

    bytes_used: int
    bytes_limit: int | None
    files_used: int
    files_limit: int | None

    @property
    def used_percent(self) -> float | None:
        """The used share of the bytes or of the files (the larger share), at most 100 percent; None without a limit."""
        pairs = ((self.bytes_used, self.bytes_limit), (self.files_used, self.files_limit))
        return max((min(100.0, 100 * used / limit) for used, limit in pairs if limit), default=None)


class QuotaReading(NamedTuple):
    """``quota``: None if there is no quota, or if it is unknown; only in the second case ``reason`` has a text.

    ``command``: the command line that printed the quota, or the commands that failed.
    ``unread``: why further quotas of the path could not be read.
    """

    command: str
    quota: Quota | None = None
    reason: str = ""
    unread: tuple[str, ...] = ()


class StorageTargets(NamedTuple):
    """The server disks (OSTs) of Lustre: the fullest one, how full it is in percent, and those that are down."""

    fullest: str
    used_percent: int
    inactive: tuple[str, ...]


class _Query(NamedTuple):
    argv: list[str]
    parse: Callable[[str], Quota | None]


def read_quota(tool: str, path: str, filesystem_count: int = 1, *, gid: int | None = None) -> QuotaReading:
    """The quota at ``path`` with the largest share in use: of this process's user, the group, or Lustre's project.

    ``tool``: lfs, beegfs, quota, or statvfs for filesystems whose quota is the size of the folder. For any other tool
    the quota is unknown. ``filesystem_count``: number of mounted filesystems of this type. ``gid``: group of new files;
    None: the process's group.
    """
    if tool == "statvfs":
        return _statvfs_quota(path)
    if tool == "beegfs" and filesystem_count > 1:
        reason = "several BeeGFS filesystems are mounted, and the output does not say which one it is for"
        return QuotaReading("beegfs quota list-usage", reason=reason)
    user_queries, group_queries = _owner_queries(tool, path, os.getegid() if gid is None else gid)
    if not user_queries:
        return QuotaReading("", reason="seatrial knows no quota tool for this type")
    user_reading = _read_first(user_queries)
    if user_reading.reason:  # the other queries would fail, or hang, in the same way
        return user_reading
    readings = [user_reading]
    if not user_reading.command.startswith("beegfs "):  # the output of BeeGFS 8 has the group too
        readings.append(_read_first(group_queries))
    if tool == "lfs":
        readings.append(_read_project(path))
    fullest = max(readings, key=_used_percent)  # the user's if none has a limit
    return fullest._replace(unread=tuple(reading.reason for reading in readings if reading.reason))


def _owner_queries(tool: str, path: str, gid: int) -> tuple[list[_Query], list[_Query]]:
    """The queries with ``tool`` for this process's user, and those for group ``gid``; none for an unknown tool.

    Of several queries, the first one that succeeds gives the quota.
    """
    uid = os.geteuid()
    if tool == "lfs":
        user, group = ["lfs", "quota", "-u", str(uid), path], ["lfs", "quota", "-g", str(gid), path]
        return [_Query(user, parse_quota_table)], [_Query(group, parse_quota_table)]
    if tool == "quota":
        options = ["-v", "-w", "-f", path]
        user, group = ["quota", "-u", *options], ["quota", "-g", *options, str(gid)]
        return [_Query(user, parse_quota_table)], [_Query(group, parse_quota_table)]
    if tool == "beegfs":
        owners = ["--uids", "current", "--gids", "current"]
        beegfs_8 = ["beegfs", "quota", "list-usage", *owners, "--raw", "--output", "ndjson"]
        beegfs_7 = ["beegfs-ctl", "--getquota", "--csv", f"--mount={path}"]
        return (
            [
                _Query(beegfs_8, lambda text: parse_beegfs_8(text, gid)),
                _Query([*beegfs_7, "--uid", str(uid)], parse_beegfs_7),
            ],
            [_Query([*beegfs_7, "--gid", str(gid)], parse_beegfs_7)],
        )
    return [], []


def _read_first(queries: list[_Query]) -> QuotaReading:
    """The reading of the first query that succeeds; if all fail, a reading with the reasons of all."""
    reasons: list[str] = []
    for argv, parse in queries:
        try:
            return QuotaReading(" ".join(argv), parse(_tool_output(argv)))
        except ValueError as error:
            reasons.append(str(error))
    return QuotaReading(" or ".join(" ".join(argv[:2]) for argv, _ in queries), reason="; ".join(reasons))


def _read_project(path: str) -> QuotaReading:
    """The quota of the project that new files in the folder belong to; project 0 has none."""
    argv = ["lfs", "project", "-d", path]
    try:
        project = parse_project(_tool_output(argv))
    except ValueError as error:
        return QuotaReading(" ".join(argv), reason=str(error))
    if project == 0:
        return QuotaReading(" ".join(argv))
    return _read_first([_Query(["lfs", "quota", "-p", str(project), path], parse_quota_table)])


def _used_percent(reading: QuotaReading) -> float:
    """The share in use in percent; -1 without a limit."""
    used = reading.quota.used_percent if reading.quota else None
    return -1.0 if used is None else used


def parse_project(text: str) -> int:
    """The project of a folder in the output of ``lfs project -d``. Raises ValueError on another format."""
    match = _PROJECT.fullmatch(text.rstrip("\n"))
    if not match:
        raise ValueError(_unexpected("lfs project: id, flag and path", text))
    return int(match[1])


def read_storage_targets(path: str) -> StorageTargets:
    """How full the server disks of the Lustre filesystem at ``path`` are. Raises ValueError with the reason."""
    return parse_lfs_df(_tool_output(["lfs", "df", path]))


def _tool_output(argv: Sequence[str]) -> str:
    """The standard output of a tool. Raises ValueError with a sentence that names the tool."""
    try:
        result = run_command(argv, TOOL_TIMEOUT_S)
    except FileNotFoundError:
        raise ValueError(f"{argv[0]} is not installed") from None
    except OSError as error:
        raise ValueError(f"{argv[0]} did not start: {error_text(error)}") from error
    if result.code is None:
        raise ValueError(f"{argv[0]} did not end within {TOOL_TIMEOUT_S:g} s: a server does not answer")
    # quota(1) exits with 1 if the user is over a quota
    is_over_quota = argv[0] == "quota" and result.code == 1 and result.out.strip()
    if result.code != 0 and not is_over_quota:
        lines = [*result.err.strip().splitlines(), *result.out.strip().splitlines(), "no message"]
        raise ValueError(f"{argv[0]} ended with exit code {result.code}: {printable(lines[0])[:200]}")
    return result.out


def parse_quota_table(text: str) -> Quota | None:
    """The quota of one owner in the output of ``lfs quota`` or ``quota``; None if the output shows that it has none.

    Raises ValueError on another format, several filesystems, or numbers that the tool calls inaccurate.
    """
    lines = text.splitlines()
    if any(_NO_QUOTA.fullmatch(line) for line in lines):
        return None
    titles = [match for line in lines if (match := _TITLE.fullmatch(line))]
    if len(titles) != 1:
        raise ValueError(_unexpected("one table of quotas", text))
    (title,) = titles
    below_title = lines[lines.index(title.string) + 1 :]
    body = [line for line in below_title if not _NOTES.match(line.strip())]
    if any("[" in line for line in body):  # lfs puts inaccurate numbers into brackets
        raise ValueError(_PARTLY_DOWN)
    tokens = " ".join(body).split()[1:]  # the row of a long name continues on the next line
    numbers = [match for token in tokens if (match := _NUMBER.fullmatch(token))]
    if len(numbers) != 6:  # grace periods do not match _NUMBER
        raise ValueError(_unexpected("a row of six numbers", " ".join(body)))
    bytes_per_unit = 1024 if title[1] in ("kbytes", "blocks") else 1  # of a number without a suffix
    bytes_used, soft_bytes, hard_bytes = (_scaled(match, 1024, bytes_per_unit) for match in numbers[:3])
    files_used, soft_files, hard_files = (_scaled(match, 1000, 1) for match in numbers[3:])
    # The soft limit is enforced after the grace period, so the limit is the lower of the two; 0 means no limit
    bytes_limit = min(filter(None, (soft_bytes, hard_bytes)), default=None)
    return Quota(bytes_used, bytes_limit, files_used, min(filter(None, (soft_files, hard_files)), default=None))


def parse_beegfs_8(text: str, gid: int | None = None) -> Quota | None:
    """The quota with the largest share in use, among those of the user and of group ``gid`` in all storage pools.

    ``text``: output of ``beegfs quota list-usage`` as JSON lines. Raises ValueError on another format.
    """
    quotas = []
    for line in text.splitlines():
        if line.startswith("WARNING: No information found"):
            raise ValueError("beegfs: the management service does not count quotas (quota-enable)")
        if not line.strip() or line.startswith("INFO:"):
            continue
        try:
            row = json.loads(line)
            if row["type"] == "user" or row["id"] == gid:
                numbers = f"{row['space']}/{row['inode']}".split("/")  # "USED/LIMIT" of bytes, and of files
                quotas.append(_beegfs_quota(*map(_beegfs_8_number, numbers)))
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise ValueError(_unexpected("beegfs: JSON with type, space and inode", line)) from error
    return _fullest(quotas, text)


def parse_beegfs_7(text: str) -> Quota | None:
    """The owner's quota in its fullest storage pool, from ``beegfs-ctl --getquota --csv``.

    Raises ValueError on another format.
    """
    quotas, in_table = [], False
    for line in map(str.strip, text.splitlines()):
        if line == _BEEGFS_7_TITLE:
            in_table = True
        elif in_table and line.count(",") == 5:
            numbers = [0 if value == "unlimited" else value for value in line.split(",")[2:]]
            try:
                quotas.append(_beegfs_quota(*(int(value) or None for value in numbers)))
            except ValueError:
                raise ValueError(_unexpected("beegfs-ctl: numbers of bytes and files", line)) from None
        else:
            in_table = False
    return _fullest(quotas, text)


def parse_lfs_df(text: str) -> StorageTargets:
    """The server disks in the output of ``lfs df``. Raises ValueError if it lists no disk, or one in another format."""
    targets = {match[1]: int(match[2]) for line in text.splitlines() if (match := _OST.fullmatch(line.strip()))}
    if not targets or len(targets) < text.count("[OST:"):
        raise ValueError(_unexpected("lfs df: a list of OSTs with their use in percent", text))
    fullest = max(targets, key=lambda name: targets[name])
    inactive = tuple(match[1] for line in text.splitlines() if (match := _INACTIVE.fullmatch(line.strip())))
    return StorageTargets(fullest, targets[fullest], inactive)


def _statvfs_quota(path: str) -> QuotaReading:
    """The quota of a folder on WekaFS, which statvfs shows as the size of the filesystem."""
    try:
        status = os.statvfs(path)
    except OSError as error:
        return QuotaReading("df", reason=error_text(error))
    size, free = status.f_blocks * status.f_frsize, status.f_bavail * status.f_frsize
    files, free_files = status.f_files, status.f_favail
    used_files = files - free_files if files else 0
    quota = Quota(size - free, size, used_files, files or None)
    return QuotaReading("df", quota)


def _scaled(match: re.Match[str], base: int, unit: int) -> int:
    """The number times a factor, which the suffix gives (K: ``base``, M: ``base`` squared); ``unit`` if it has none."""
    suffix = match[2].upper()
    factor: float = base ** ("KMGTPE".index(suffix) + 1) if suffix else unit
    return round(float(match[1]) * factor)


def _beegfs_8_number(text: str) -> int | None:
    """A raw number; None if unlimited. Raises ValueError, such as for "?" if the management service has no number."""
    if text == "∞":
        return None
    value = int(text)
    return None if value >= _BEEGFS_UNLIMITED else value


def _beegfs_quota(*numbers: int | None) -> Quota:
    """The quota of used bytes, their limit, used files and their limit."""
    bytes_used, bytes_limit, files_used, files_limit = numbers
    return Quota(bytes_used or 0, bytes_limit, files_used or 0, files_limit)


def _fullest(quotas: Sequence[Quota], text: str) -> Quota:
    """The quota with the largest share in use. Raises ValueError if there is none."""
    if not quotas:
        raise ValueError(_unexpected("beegfs: the quota of this user", text))
    return max(quotas, key=lambda quota: quota.used_percent or 0.0)


def _unexpected(expected: str, text: str) -> str:
    first_line = next((line.strip() for line in text.splitlines() if line.strip()), "no output")
    return f"expected {expected}, read {printable(first_line)[:120]!r}: unknown version of the tool"
