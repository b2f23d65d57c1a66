"""Tests that directories are shared by all nodes, and that they keep the POSIX guarantees that multi-node jobs need."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator, JsonValue

from seatrial.checks.check import Check, Context, Needs, Options, facts
from seatrial.checks.declare import Answers, absent, fact, metric, rule, unreadable, value, warning
from seatrial.discover.file_readers import read_text
from seatrial.model import Outcome, Phase, Scope
from seatrial.util.grouping import grouped, majority
from seatrial.util.text import printable

if TYPE_CHECKING:
    from seatrial.bench.one_rank_per_node import Participants
    from seatrial.bench.storage import SharedFolder

# Probe (bench/shared_files.py) → metric that counts the paths on which the probe failed
PROBE_METRICS = {
    **{probe: f"{probe}_failures" for probe in ("rename", "append", "flock", "fcntl", "mmap")},
    "owner": "owner_mismatches",
}


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(f"{path!r} is not an absolute path; relative paths may name another directory on each node")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class SharedOptions(Options):
    """``paths``: directories that must be shared by all nodes.

    Without ``paths`` the check tests the claim of the launcher kubernetes, else its directory in the run directory. If
    the run directory is not shared, the outcome is WARN.
    """

    paths: tuple[AbsolutePath, ...] = ()


@dataclass(frozen=True)
class Volume:
    """The filesystem at a path as one node sees it, sizes in bytes; ``free_inodes`` is None if inodes are unlimited."""

    mount: str  # description of type, source, target and options of the mount
    size: int
    free: int
    free_inodes: int | None


@dataclass
class PathResult:
    """Results of the tests of one path. The participants are one rank per node, or the first two ranks of one node.

    ``unusable``: reason, if a step failed or a probe timed out; the path then counts in no other metric.
    ``not_shared``: reason, if a node does not see another node's files; probes are then not run.
    ``failures``: probe → its failure, None if it passed. ``untested``: inconclusive probe → reason.
    ``not_removed``: path of the test folder if it could not be removed.
    """

    unusable: str | None = None
    not_shared: str | None = None
    delays: dict[str, float] = field(default_factory=dict)  # seconds, by participant
    failures: dict[str, str | None] = field(default_factory=dict)
    untested: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, Volume] = field(default_factory=dict)  # participant → volume
    mounts: str = ""  # descriptions of the mounts, with their participants
    not_removed: str | None = None


def measure(context: Context, options: SharedOptions) -> Answers:
    """Yield from rank 0 the number of paths that fail each test, the visibility delay in ms, and the free space."""
    from seatrial.bench import one_rank_per_node

    participants = one_rank_per_node.select_participants(context.node, min_count=2)
    user_ids = participants.run_on_all(lambda: f"{os.geteuid()}:{os.getegid()}")
    paths = options.paths or (str(context.artifacts_dir),)
    results = {path: _test_path(context, participants, path) for path in dict.fromkeys(paths)}  # each path once
    if context.rank == 0:
        yield fact("paths_from", "options" if options.paths else "run directory")
        if participants.several_nodes:
            user_id_of_each = one_rank_per_node.group_by_text(dict(zip(participants.names, user_ids, strict=True)))
            yield value("user_id_mismatches", len(set(user_ids)) - 1, evidence=user_id_of_each)
        else:
            yield absent(("user_id_mismatches", "paths_not_shared"), "one node")
        yield from _answers(results, participants.several_nodes)


def _test_path(context: Context, participants: Participants, path: str) -> PathResult:
    """Run all tests of one path, on all participants together; an error ends the tests and is in the result."""
    from seatrial.bench import one_rank_per_node, shared_files, storage

    context.progress(path)
    result = PathResult()
    try:
        volumes = participants.run_on_all(lambda: read_volume(context.root, path))
        result.volumes = dict(zip(participants.names, volumes, strict=True))
        result.mounts = one_rank_per_node.group_by_text({name: volume.mount for name, volume in result.volumes.items()})
        with storage.temporary_folder(path, participants) as folder:
            result.not_shared = shared_files.visibility_failure(folder)
            if not result.not_shared:
                result.delays = dict(zip(participants.names, shared_files.visibility_delays(folder), strict=True))
                for name, probe in shared_files.PROBES.items():
                    context.progress(f"{path}: {name}")
                    _run_probe(result, name, probe, folder)
        result.not_removed = str(folder.path) if storage.still_exists(folder) else None
    except one_rank_per_node.ParticipantError as error:
        result.unusable = result.unusable or str(error)
    return result


def _run_probe(
    result: PathResult, name: str, probe: Callable[[SharedFolder], str | None], folder: SharedFolder
) -> None:
    """Store the result of one probe; an error of the filesystem is a failure. Raises ParticipantError on a timeout."""
    from seatrial.bench.one_rank_per_node import ParticipantError
    from seatrial.bench.shared_files import InconclusiveProbe

    try:
        result.failures[name] = probe(folder)
    except InconclusiveProbe as reason:
        result.untested[name] = str(reason)
    except ParticipantError as error:
        if error.timed_out:
            result.unusable = f"{name}: {error}"
            raise
        result.failures[name] = str(error)


def read_volume(root: Path, path: str) -> Volume:
    """Mount, size and free space of the filesystem at ``path``. Raises OSError for a missing path."""
    from seatrial.discover import filesystem, filesystem_kind

    usage, stat = filesystem.usage(Path("/"), path), os.statvfs(path)
    mount = filesystem.mount_of(usage.path, filesystem.mountinfo(read_text(root / "proc/self/mountinfo")))
    description = "not found in /proc/self/mountinfo"
    if mount:
        kind = filesystem_kind.identify(mount, root)
        description = f"{kind.name}, {printable(mount.source)} at {printable(mount.target)} with {mount.options}"
    return Volume(
        mount=description,
        size=usage.size,
        free=usage.free,
        free_inodes=stat.f_favail if stat.f_files else None,
    )


def _answers(results: Mapping[str, PathResult], several_nodes: bool) -> Answers:
    """Yield the metrics over all paths, each with the reasons by path."""
    usable = {path: result for path, result in results.items() if not result.unusable}
    shared = {path: result for path, result in usable.items() if not result.not_shared}
    filesystems = _texts(results, lambda result: result.mounts)
    not_removed = _texts(results, lambda result: result.not_removed)
    yield from facts(
        {"filesystems": filesystems, "files_not_removed": not_removed, "fault_places": fault_places(results)}
    )
    unusable = _texts(results, lambda result: result.unusable)
    yield value("paths_unusable", len(unusable), evidence=unusable)
    if usable:
        not_shared = _texts(usable, lambda result: result.not_shared)
        evidence = {"not_shared": not_shared, "filesystems": filesystems}
        if several_nodes:
            yield value("paths_not_shared", len(not_shared), evidence=evidence)
        yield from _free_space(usable, filesystems)
    if shared:
        yield from _probe_results(shared)
    else:
        yield absent("*", "no path is shared by all nodes" if usable else "no path is usable")


def fault_places(results: Mapping[str, PathResult]) -> dict[str, dict[str, list[str]]]:
    """{"paths_not_shared": {node: paths}}: the nodes whose mount at a path differs from that of the majority.

    Empty if there is no such node.
    """
    paths_by_node = grouped(
        (node, path)
        for path, result in results.items()
        if result.not_shared and (most_common := majority(volume.mount for volume in result.volumes.values()))
        for node, volume in result.volumes.items()
        if volume.mount != most_common
    )
    return {"paths_not_shared": paths_by_node} if paths_by_node else {}


def _texts(results: Mapping[str, PathResult], text: Callable[[PathResult], str | None]) -> dict[str, JsonValue]:
    """Path → its text, for the paths with a text."""
    return {path: text(result) for path, result in results.items() if text(result)}


def _free_space(results: Mapping[str, PathResult], filesystems: JsonValue) -> Answers:
    """Yield the free bytes and inodes of the path with the least: the minimum over nodes and paths."""
    space: dict[str, JsonValue] = {}  # path → size, free bytes and free inodes
    free_bytes: list[int] = []  # of each path
    free_inodes: list[int] = []  # on each node, of each path with a limited number of inodes
    for path, result in results.items():
        volumes = result.volumes.values()
        inodes = [volume.free_inodes for volume in volumes if volume.free_inodes is not None]
        size, free = max(volume.size for volume in volumes), min(volume.free for volume in volumes)
        space[path] = {"size": size, "free": free, "free_inodes": min(inodes, default=None)}
        free_bytes.append(free)
        free_inodes += inodes
    evidence = {"space": space, "filesystems": filesystems}
    yield value("free_bytes", min(free_bytes), evidence=evidence)
    if free_inodes:
        yield value("free_inodes", min(free_inodes), evidence=evidence)
    else:
        yield absent("free_inodes", "the filesystem has no fixed number of inodes")


def _probe_results(results: Mapping[str, PathResult]) -> Answers:
    delays_ms = {
        path: {participant: round(seconds * 1e3, 2) for participant, seconds in result.delays.items()}
        for path, result in results.items()
    }
    longest_s = max(max(result.delays.values()) for result in results.values())
    yield value("visibility_delay", round(longest_s * 1e3, 2), evidence=delays_ms)
    for probe, name in PROBE_METRICS.items():
        failures = {path: result.failures[probe] for path, result in results.items() if result.failures.get(probe)}
        untested = {path: result.untested[probe] for path, result in results.items() if probe in result.untested}
        if untested and not failures:
            yield unreadable(name, "; ".join(f"{path}: {reason}" for path, reason in untested.items()))
        else:
            yield value(name, len(failures), evidence=failures)


CHECK = Check(
    name="filesystem.shared",
    title="Shared directories: visibility and POSIX guarantees across nodes",
    fact_roles={"fault_places": "fault_places"},
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    needs=Needs(min_ranks=2, shared_folder=True),
    measure=measure,
    limit_s=300,  # a hung filesystem costs 30 s or more per path: the first timeout ends the tests of that path
    options=SharedOptions,
    declared=(
        metric(
            "paths_unusable",
            "== 0 paths",
            "A node cannot write to the directory, or gets no answer from the filesystem.",
            "On the node that is named: ls -ld PATH; df -h PATH; df -i PATH; findmnt -T PATH",
        ),
        metric(
            "paths_not_shared",
            "== 0 paths",
            "A node does not see files of other nodes in this directory: checkpoints and results are incomplete.",
            "On the node with another mount: findmnt -T PATH; mount -a",
            when="paths_from == options",
            also=(
                rule(
                    "== 0 paths",
                    "The run directory is not shared, and no shared directory is configured; others were not tested.",
                    "Set the shared directories of this cluster: --set "
                    "'checks.filesystem.shared.options.paths=[/shared]'",
                    outcome=Outcome.WARN,  # seatrial does not need a shared run directory
                    when="paths_from == run directory",
                ),
            ),
        ),
        metric(
            "user_id_mismatches",
            "== 0 users",
            "The user has different uid:gid on some nodes, and may not access files written on other nodes.",
            'On each node: id "$USER"; use a directory service (LDAP with SSSD) or one /etc/passwd',
        ),
        warning(
            "visibility_delay",
            "< 1000 ms",
            "New files become visible on other nodes only after this delay (5000 ms: test timeout).",
            "NFS hides new names for up to 30 s (acdirmin in nfs(5)): mount with lookupcache=positive, or with a "
            "smaller actimeo. FUSE and virtiofs: lower entry and attribute timeouts.",
        ),
        metric(
            "rename_failures",
            "== 0 paths",
            "Rename is not atomic: another node may find the checkpoint missing or incomplete.",
            "Keep checkpoints on a POSIX filesystem; object store gateways may not rename atomically.",
        ),
        warning(
            "append_failures",
            "== 0 paths",
            "Appends from several nodes overwrite each other: shared log files lose lines.",
            "Write one file per process. BeeGFS: tuneUseGlobalAppendLocks = true in beegfs-client.conf.",
            # WARN: NFS (open(2), O_APPEND) and default BeeGFS are known for this. Training needs no atomic appends.
        ),
        *(
            warning(
                f"{lock}_failures",
                "== 0 paths",
                "Two nodes can hold the same file lock: Hugging Face download caches, torch's FileStore and compile "
                "caches may be written by two nodes at the same time.",
                "BeeGFS: tuneUseGlobalFileLocks = true in beegfs-client.conf. Lustre: mount with -o flock, not "
                "localflock. NFS: mount without nolock and local_lock, and check that rpc-statd runs (systemctl status "
                "rpc-statd). virtiofs: virtiofsd must support remote locks. "
                "Workaround: put caches on a local disk of each node (HF_HOME, TRITON_CACHE_DIR).",
                # WARN: BeeGFS and older Lustre do not lock across nodes by default. Training needs no locks.
            )
            for lock in ("flock", "fcntl")
        ),
        metric(
            "mmap_failures",
            "== 0 paths",
            "A mapped file shows old content on another node: datasets (Arrow) or weights (safetensors) are stale.",
            "NFS: mount without nocto. FUSE and virtiofs: no cache=always; lower attribute timeouts.",
        ),
        metric(
            "owner_mismatches",
            "== 0 paths",
            "A file has another owner than its writer, or nodes see different owners: access may be denied.",
            "NFS 4: same Domain in /etc/idmapd.conf on all nodes and the server, then nfsidmap -c. Otherwise: "
            "same uids on all nodes; check all_squash in /etc/exports and id-mapped mounts of containers.",
        ),
        warning(
            "free_bytes",
            ">= 1GiB",
            "Less than 1 GiB is free: writing a checkpoint fails and terminates the job.",
            "df -h PATH; lfs quota, beegfs-ctl --getquota or quota -s; delete files or raise the quota.",
        ),
        warning(
            "free_inodes",
            ">= 1000 inodes",
            "Few free inodes: no new files can be created when none are left.",
            "df -i PATH; find directories with many files: du --inodes -xd2 PATH | sort -n",
        ),
    ),
)
