"""Which filesystem each path is on, and its client settings, quota and storage targets, on every node. Reads only.

Each path belongs to a tier, which names what the path is used for, such as ``home`` (see _tiers). The storage targets
of Lustre, called OSTs, are the server disks that hold the contents of files.
"""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from seatrial.checks.base import Check, Context, RuleFact, facts, metric
from seatrial.checks.host import _tiers
from seatrial.checks.host._tiers import TierOptions, tiers
from seatrial.discover.file_readers import read_text
from seatrial.model import Observation, Outcome, Phase, Rule, Scope, format_bytes
from seatrial.util.text import error_text, printable

if TYPE_CHECKING:
    from seatrial.discover.filesystem import MountEntry
    from seatrial.discover.filesystem_kind import FilesystemKind

_RESPONSE_TIMEOUT_S = 5.0  # for a system call on a path; the same as in discover.filesystem
MAX_QUOTA_USED = 90  # percent; quota(1) of MIT's Athena also warns above this
# Percent. ldiskfs reserves 5 % of an OST and is slow above 95 %; a full OST fails writes although others have space.
# Sources: Lustre manual, Managing Free Space; wiki.lustre.org/Handling_Full_OSTs
MAX_TARGET_USED = 95


class ClientOptions(TierOptions):
    """Options of filesystem.client. Default of ``paths``: run directory, home, HF_HOME and TMPDIR of the node."""


@dataclass(frozen=True, kw_only=True)
class TierFilesystem:
    """The filesystem of one tier on this node; ``problem``: why it could not be found."""

    path: str
    mount: MountEntry | None = None
    kind: FilesystemKind | None = None
    problem: str = ""


def measure(context: Context, options: ClientOptions) -> Iterator[Observation]:
    """Yield the filesystem of each tier, with the metrics of its settings, quota and storage targets."""
    from seatrial.discover import filesystem

    paths = options.paths or _tiers.default_paths(str(context.artifacts_dir), os.environ)
    mounts = filesystem.mountinfo(read_text(context.root / "proc/self/mountinfo"))
    must_exist = bool(options.paths)
    filesystem_by_tier = {name: _filesystem_at(path, must_exist, mounts, context.root) for name, path in paths.items()}
    kind_by_tier = {
        name: tier_filesystem.kind for name, tier_filesystem in filesystem_by_tier.items() if tier_filesystem.kind
    }
    unwise: dict[str, dict[str, str]] = {}  # tier → setting → its value and the advice
    for name, kind in kind_by_tier.items():
        for setting in kind.settings:
            if setting.advice:
                unwise.setdefault(name, {})[setting.name] = f"{setting.value}: {setting.advice}"
    local_tiers = {name for name, tier in tiers().items() if tier.local_disk}
    misplaced = {name: kind.name for name, kind in kind_by_tier.items() if kind.network and name in local_tiers}
    yield from facts(
        {
            "filesystems": {
                name: _description(tier_filesystem) for name, tier_filesystem in filesystem_by_tier.items()
            },
            "settings": {name: _settings(kind) for name, kind in kind_by_tier.items()},
            "unwise_settings": {name: dict(values) for name, values in unwise.items()},
            "unreadable": {name: dict(kind.unreadable) for name, kind in kind_by_tier.items() if kind.unreadable},
            "misplaced": misplaced,
            "not_found": {
                name: tier_filesystem.problem
                for name, tier_filesystem in filesystem_by_tier.items()
                if tier_filesystem.problem
            },
        }
    )
    yield from _tiers.observations(paths, context.node)
    yield metric("paths_not_found", len(filesystem_by_tier) - len(kind_by_tier), "paths", context.node)
    yield metric("unwise_settings", sum(map(len, unwise.values())), "components", context.node)
    yield metric("paths_misplaced", len(misplaced), "paths", context.node)
    for name in dict.fromkeys([*tiers(), *filesystem_by_tier]):
        yield from _quota_observations(name, filesystem_by_tier.get(name), mounts, context)
        yield from _target_observations(name, filesystem_by_tier.get(name), context)


def _filesystem_at(path: str, must_exist: bool, mounts: list[MountEntry], root: Path) -> TierFilesystem:
    """The filesystem of ``path``, or why it could not be found.

    Without ``must_exist``, the nearest existing parent replaces a path that does not exist yet, such as a new HF_HOME.
    """
    from seatrial.discover import filesystem_kind
    from seatrial.util.threads import start_in_thread

    def existing_path() -> Path:
        parents = () if must_exist else Path(path).parents
        return next((candidate for candidate in (Path(path), *parents) if candidate.exists()), Path(path))

    pending = start_in_thread(lambda: os.path.realpath(existing_path(), strict=True))
    try:
        resolved = pending.result(_RESPONSE_TIMEOUT_S)
    except TimeoutError:
        return TierFilesystem(path=path, problem=f"no response within {_RESPONSE_TIMEOUT_S:g} s")
    except OSError as error:
        return TierFilesystem(path=path, problem=error_text(error))
    mounts_above = [mount for mount in mounts if Path(resolved).is_relative_to(mount.target)]
    if not mounts_above:
        return TierFilesystem(path=path, problem="not found in /proc/self/mountinfo")
    mount = max(mounts_above, key=lambda mount: len(mount.target))
    return TierFilesystem(path=resolved, mount=mount, kind=filesystem_kind.identify(mount, root))


def _description(tier_filesystem: TierFilesystem) -> str:
    """The filesystem with its mount, or the path with the reason why its filesystem was not found."""
    if not tier_filesystem.kind or not tier_filesystem.mount:
        return f"{printable(tier_filesystem.path)}: {tier_filesystem.problem}"
    kind, mount = tier_filesystem.kind, tier_filesystem.mount
    place = f"{printable(mount.source)} at {printable(mount.target)}"
    return f"{kind.name}: {place} with {mount.options} ({kind.evidence})"


def _settings(kind: FilesystemKind) -> dict[str, JsonValue]:
    return {setting.name: f"{setting.value} ({setting.effect}; {setting.source})" for setting in kind.settings}


def _quota_observations(
    name: str, tier_filesystem: TierFilesystem | None, mounts: list[MountEntry], context: Context
) -> Iterator[Observation]:
    """Yield how much of the quota of tier ``name`` is used (in %), and a fact that tells whether the quota is known."""
    from seatrial.discover import filesystem_quota

    fact = f"quota_{name}"
    if not tier_filesystem or not tier_filesystem.kind or not tier_filesystem.mount:
        yield from facts({fact: f"no: {tier_filesystem.problem if tier_filesystem else 'no path of this tier'}"})
        return
    kind, mount = tier_filesystem.kind, tier_filesystem.mount
    has_quota_option = any("quota" in option and not option.startswith("no") for option in mount.options.split(","))
    if kind.network is False and not has_quota_option:
        yield from facts({fact: "no: the local disk is mounted without quotas"})
        return
    context.progress(f"quota of {name}")
    same_type_mounts = [entry for entry in mounts if entry.type == mount.type]
    filesystem_count = len({entry.device for entry in same_type_mounts})  # bind mounts count once
    # lfs and statvfs accept any path (statvfs: on WekaFS, where a folder can have a quota); others need the mount point
    path = tier_filesystem.path if kind.quota_tool in ("lfs", "statvfs") else mount.target
    gid = _group_of_new_files(tier_filesystem.path)
    reading = filesystem_quota.read_quota(kind.quota_tool, path, filesystem_count, gid=gid)
    used_percent = reading.quota.used_percent if reading.quota else None
    if reading.reason:
        yield from facts({fact: f"not_supported: {reading.reason}"})
    elif used_percent is None and reading.unread:
        yield from facts({fact: f"not_supported: {'; '.join(reading.unread)}"})
    elif not reading.quota or used_percent is None:
        yield from facts({fact: f"no: no quota for this user, group or project ({reading.command})"})
    else:
        quota = reading.quota
        limit = "unlimited" if quota.bytes_limit is None else format_bytes(quota.bytes_limit)
        files_limit = "unlimited" if quota.files_limit is None else f"{quota.files_limit:,}"
        size, files = f"{format_bytes(quota.bytes_used)} of {limit}", f"{quota.files_used:,} of {files_limit} files"
        unread = "".join(f"; not read: {reason}" for reason in reading.unread)
        yield from facts({fact: "yes", f"quota_in_use_{name}": f"{size}, {files} ({reading.command}){unread}"})
        yield metric(f"quota_used.{name}", used_percent, "%", context.node)


def _group_of_new_files(path: str) -> int | None:
    """Return the group of new files in ``path`` if its set-group-ID bit is set; else None: the process's group."""
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_gid if status.st_mode & stat.S_ISGID else None


def _target_observations(name: str, tier_filesystem: TierFilesystem | None, context: Context) -> Iterator[Observation]:
    """Yield how full the fullest storage target of Lustre is, and the number of inactive targets.

    The fact ``targets_TIER`` states whether the targets are known.
    """
    from seatrial.discover import filesystem_quota

    fact = f"targets_{name}"
    if not tier_filesystem or not tier_filesystem.kind or tier_filesystem.kind.name != "Lustre":
        yield from facts({fact: "no: not on Lustre"})
        return
    try:
        targets = filesystem_quota.read_storage_targets(tier_filesystem.path)
    except ValueError as error:
        yield from facts({fact: f"not_supported: {error}"})
        return
    yield from facts({fact: "yes", f"fullest_target_{name}": targets.fullest, f"down_{name}": list(targets.inactive)})
    yield metric(f"target_used.{name}", targets.used_percent, "%", context.node)
    yield metric(f"targets_down.{name}", len(targets.inactive), "devices", context.node)


def _tier_rules(name: str) -> Iterator[Rule]:
    """Yield the rules on quota and storage targets of the tier ``name``."""
    quota = {f"quota_{name}": "yes"}
    yield Rule(
        metric=f"quota_used.{name}",
        expect="< 100 %",
        applies_if=quota,
        evidence_facts=(f"quota_in_use_{name}",),
        meaning="The quota of the user, group or project is used up: writes fail now, or after the grace period of "
        "the soft limit.",
        fix="Delete files, or ask for a higher quota. The evidence names the command that shows the quota.",
    )
    yield Rule(
        metric=f"quota_used.{name}",
        expect=f"<= {MAX_QUOTA_USED} %",
        outcome_if_violated=Outcome.WARN,
        applies_if=quota,
        evidence_facts=(f"quota_in_use_{name}",),
        meaning="Little of the quota is left: a checkpoint may not fit.",
        fix="Delete files, or ask for a higher quota.",
    )
    yield Rule(
        metric=f"target_used.{name}",
        expect=f"<= {MAX_TARGET_USED} %",
        outcome_if_violated=Outcome.WARN,
        applies_if={f"targets_{name}": "yes"},
        evidence_facts=(f"fullest_target_{name}",),
        meaning="A server disk (OST) of Lustre is almost full: files on it are slow to write, then fail with ENOSPC "
        "although df shows free space.",
        fix="lfs df PATH; then lfs find PATH --ost NAME -size +100G, and lfs_migrate of the largest files.",
    )
    yield Rule(
        metric=f"targets_down.{name}",
        expect="== 0 devices",
        applies_if={f"targets_{name}": "yes"},
        evidence_facts=(f"down_{name}",),
        meaning="A server disk (OST) of Lustre is inactive: reads of files on it fail or hang.",
        fix="lfs df PATH; lfs check osts; then the log of the server of this OST.",
    )


RULES = (
    Rule(
        metric="paths_not_found",
        expect="== 0 paths",
        evidence_facts=("not_found",),
        meaning="A path does not exist on this node, or its filesystem is not mounted or does not answer.",
        fix="The fact not_found lists path and reason. On the node: timeout 5 stat -f PATH; findmnt -T PATH",
    ),
    Rule(
        metric="unwise_settings",
        expect="== 0 components",
        outcome_if_violated=Outcome.WARN,
        evidence_facts=("unwise_settings",),
        meaning="A client setting of the filesystem makes training I/O slow, or loses locks or data.",
        fix="The fact unwise_settings lists each setting with the value to use instead; see docs/filesystems.md.",
    ),
    Rule(
        metric="paths_misplaced",
        expect="== 0 paths",
        outcome_if_violated=Outcome.WARN,
        evidence_facts=("misplaced",),
        meaning="Temporary files and compile caches are on a network filesystem: processes of the node wait for the "
        "network.",
        fix="Set TMPDIR to a directory on a disk of the node.",
    ),
    _tiers.RULE,
    *(rule for name in tiers() for rule in _tier_rules(name)),
)


CHECK = Check(
    name="filesystem.client",
    title="Filesystems of each tier: client settings, quota, server disks",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    options=ClientOptions,
    metrics={
        **_tiers.METRICS,
        "paths_not_found": "paths",
        "unwise_settings": "components",
        "paths_misplaced": "paths",
        "quota_used.*": "%",
        "target_used.*": "%",
        "targets_down.*": "devices",
    },
    rules=RULES,
    rule_facts={
        **_tiers.RULE_FACTS,
        **{
            f"{fact}_{name}": RuleFact(not_supported=Outcome.UNJUDGED)
            for name in tiers()
            for fact in ("quota", "targets")
        },
    },
    measure=measure,
    limit_s=180,  # each tool may take 20 s on a filesystem that hangs
)
