"""Which filesystem each path is on, and its client settings, quota and storage targets, on every node. Reads only.

Each path belongs to a tier, which names what the path is used for, such as ``home`` (see _tiers). The storage targets
of Lustre, called OSTs, are the server disks that hold the contents of files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from pydantic import JsonValue

from seatrial.checks.check import Check, Context, facts
from seatrial.checks.declare import Answer, Answers, absent, forbidden, metric, rule, value, warning
from seatrial.checks.host import _tiers
from seatrial.checks.host._tiers import TierOptions, tiers
from seatrial.discover.file_readers import read_or_none, read_text
from seatrial.discover.filesystem_quota import MAX_TARGET_USED_PERCENT
from seatrial.model import Outcome, Phase, Scope, format_bytes
from seatrial.util.text import error_text, printable

if TYPE_CHECKING:
    from seatrial.discover.filesystem import MountEntry
    from seatrial.discover.filesystem_kind import FilesystemKind

_RESPONSE_TIMEOUT_S = 5.0  # for a system call on a path; the same as in discover.filesystem


class ClientOptions(TierOptions):
    """Options of filesystem.client. Default of ``paths``: run directory, home, HF_HOME and TMPDIR of the node."""


class TierFilesystem(NamedTuple):
    path: str
    mount: MountEntry
    kind: FilesystemKind


def measure(context: Context, options: ClientOptions) -> Answers:
    """Yield the filesystem of each tier, with the metrics of its settings, quota and storage targets."""
    from seatrial.discover import filesystem

    paths = options.paths or _tiers.default_paths(str(context.artifacts_dir), os.environ)
    mounts = filesystem.mountinfo(read_text(context.root / "proc/self/mountinfo"))
    results = {name: _filesystem_at(path, bool(options.paths), mounts, context.root) for name, path in paths.items()}
    found = {name: result for name, result in results.items() if isinstance(result, TierFilesystem)}
    not_found = {name: f"{printable(paths[name])}: {results[name]}" for name in paths if name not in found}
    kinds = {name: each.kind for name, each in found.items()}
    unwise = {  # tier and setting → its value and the advice
        f"{setting.name} of {name}": f"{setting.value}: {setting.advice}"
        for name, kind in kinds.items()
        for setting in kind.settings
        if setting.advice
    }
    misplaced = {
        name: kind.name for name, kind in kinds.items() if kind.network and name in tiers() and tiers()[name].local_disk
    }
    yield from facts(
        {
            "filesystems": not_found | {name: _description(each) for name, each in found.items()},
            "settings": {name: _settings(kind) for name, kind in kinds.items()},
            "unreadable": {name: dict(kind.unreadable) for name, kind in kinds.items() if kind.unreadable},
        }
    )
    yield from _tiers.answers(paths)
    yield value("paths_not_found", len(not_found), evidence=not_found)
    yield value("unwise_settings", len(unwise), evidence=unwise)
    yield value("paths_misplaced", len(misplaced), evidence=misplaced)
    for name, text in not_found.items():
        yield absent((f"quota_used.{name}", f"target_used.{name}", f"targets_down.{name}"), text)
    for name, each in found.items():
        context.progress(f"quota of {name}")
        yield _quota_used(f"quota_used.{name}", each, mounts)
        yield from _targets(name, each)


def _filesystem_at(path: str, must_exist: bool, mounts: list[MountEntry], root: Path) -> TierFilesystem | str:
    """The filesystem of ``path``, or why it could not be found.

    Without ``must_exist``, the nearest existing parent replaces a path that does not exist yet, such as a new HF_HOME.
    """
    from seatrial.discover import filesystem, filesystem_kind
    from seatrial.util.threads import start_in_thread

    def existing_path() -> Path:
        parents = () if must_exist else Path(path).parents
        return next((candidate for candidate in (Path(path), *parents) if candidate.exists()), Path(path))

    pending = start_in_thread(lambda: os.path.realpath(existing_path(), strict=True))
    try:
        resolved = pending.result(_RESPONSE_TIMEOUT_S)
    except TimeoutError:
        return f"no response within {_RESPONSE_TIMEOUT_S:g} s"
    except OSError as error:
        return error_text(error)
    if not (mount := filesystem.mount_of(resolved, mounts)):
        return "not found in /proc/self/mountinfo"
    return TierFilesystem(resolved, mount, filesystem_kind.identify(mount, root))


def _description(tier_filesystem: TierFilesystem) -> str:
    _, mount, kind = tier_filesystem
    place = f"{printable(mount.source)} at {printable(mount.target)}"
    return f"{kind.name}: {place} with {mount.options} ({kind.evidence})"


def _settings(kind: FilesystemKind) -> dict[str, JsonValue]:
    return {setting.name: f"{setting.value} ({setting.effect}; {setting.source})" for setting in kind.settings}


def _quota_used(metric: str, tier_filesystem: TierFilesystem, mounts: list[MountEntry]) -> Answer:
    """How much of the quota is used (in %), or why this is not known."""
    from seatrial.discover import filesystem_quota

    path, mount, kind = tier_filesystem
    has_quota_option = any("quota" in option and not option.startswith("no") for option in mount.options.split(","))
    if kind.network is False and not has_quota_option:
        return absent(metric, "the local disk is mounted without quotas")
    same_type_mounts = [entry for entry in mounts if entry.type == mount.type]
    filesystem_count = len({entry.device for entry in same_type_mounts})  # bind mounts count once
    # lfs and statvfs accept any path (statvfs: on WekaFS, where a folder can have a quota); others need the mount point
    quota_path = path if kind.quota_tool in ("lfs", "statvfs") else mount.target
    gid = _group_of_new_files(path)
    reading = filesystem_quota.read_quota(kind.quota_tool, quota_path, filesystem_count, gid=gid)
    used_percent = reading.quota.used_percent if reading.quota else None
    if reading.reason or (used_percent is None and reading.unread):
        return forbidden(metric, reading.reason or "; ".join(reading.unread))
    if not reading.quota or used_percent is None:
        return absent(metric, f"no quota for this user, group or project ({reading.command})")
    quota = reading.quota
    limit = "unlimited" if quota.bytes_limit is None else format_bytes(quota.bytes_limit)
    files_limit = "unlimited" if quota.files_limit is None else f"{quota.files_limit:,}"
    size, files = f"{format_bytes(quota.bytes_used)} of {limit}", f"{quota.files_used:,} of {files_limit} files"
    unread = "".join(f"; not read: {reason}" for reason in reading.unread)
    return value(metric, used_percent, evidence=f"{size}, {files} ({reading.command}){unread}")


def _group_of_new_files(path: str) -> int | None:
    """The group of new files in ``path`` if its set-group-ID bit is set; else None: the process's group."""
    status = read_or_none(lambda: os.stat(path))
    return status.st_gid if status and status.st_mode & stat.S_ISGID else None


def _targets(name: str, tier_filesystem: TierFilesystem) -> Answers:
    from seatrial.discover import filesystem_quota

    metrics = (f"target_used.{name}", f"targets_down.{name}")
    if tier_filesystem.kind.name != "Lustre":
        yield absent(metrics, "not on Lustre")
        return
    try:
        targets = filesystem_quota.read_storage_targets(tier_filesystem.path)
    except ValueError as error:
        yield forbidden(metrics, str(error))
        return
    yield value(metrics[0], targets.used_percent, evidence=targets.fullest)
    yield value(metrics[1], len(targets.inactive), evidence=list(targets.inactive))


def _tier_metrics(name: str) -> Iterator[metric]:
    yield metric(
        f"quota_used.{name}",
        "< 100 %",
        "The quota of the user, group or project is used up: writes fail now, or after the grace period of the soft "
        "limit.",
        "Delete files, or ask for a higher quota. The evidence names the command that shows the quota.",
        # quota(1) of MIT's Athena also warns above 90 %
        also=(rule("<= 90 %", "Little of the quota is left: a checkpoint may not fit.", outcome=Outcome.WARN),),
    )
    yield warning(
        f"target_used.{name}",
        f"<= {MAX_TARGET_USED_PERCENT} %",
        "A server disk (OST) of Lustre is almost full: files on it are slow to write, then fail with ENOSPC "
        "although df shows free space.",
        "lfs df PATH; then lfs find PATH --ost NAME -size +100G, and lfs_migrate of the largest files.",
    )
    yield metric(
        f"targets_down.{name}",
        "== 0 devices",
        "A server disk (OST) of Lustre is inactive: reads of files on it fail or hang.",
        "lfs df PATH; lfs check osts; then the log of the server of this OST.",
    )


CHECK = Check(
    name="filesystem.client",
    title="Filesystems of each tier: client settings, quota, server disks",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    options=ClientOptions,
    measure=measure,
    limit_s=180,  # each tool may take 20 s on a filesystem that hangs
    declared=(
        metric(
            "paths_not_found",
            "== 0 paths",
            "A path does not exist on this node, or its filesystem is not mounted or does not answer.",
            "On the node: timeout 5 stat -f PATH; findmnt -T PATH",
        ),
        warning(
            "unwise_settings",
            "== 0 components",
            "A client setting of the filesystem makes training I/O slow, or loses locks or data.",
            "The evidence lists each setting with the value to use instead; see docs/filesystems.md.",
        ),
        warning(
            "paths_misplaced",
            "== 0 paths",
            "Temporary files and compile caches are on a network filesystem: processes of the node wait for the "
            "network.",
            "Set TMPDIR to a directory on a disk of the node.",
        ),
        _tiers.UNKNOWN_TIERS,
        *(each for name in tiers() for each in _tier_metrics(name)),
        metric(
            "quota_used.*",
            unit="%",
            meaning="share of the quota in use: the fullest of the user, group and project quotas, of bytes and of "
            "files; 100 % also if a soft limit is exceeded",
        ),
        metric("target_used.*", unit="%", meaning="share of the fullest server disk (OST) of Lustre in use"),
        metric("targets_down.*", unit="devices", meaning="server disks (OSTs) of Lustre that are inactive"),
    ),
)
