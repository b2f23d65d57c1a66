"""Tests that directories are shared by all nodes, and that they keep the POSIX guarantees that multi-node jobs need."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from seatrial.checks.base import Check, Context, Needs, Options, RuleFact, facts, metric
from seatrial.discover.file_readers import read_text
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope
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


def measure(context: Context, options: SharedOptions) -> Iterator[Observation]:
    """Yield from rank 0 the number of paths that fail each test, the visibility delay in ms, and the free space."""
    from seatrial.bench import one_rank_per_node

    participants = one_rank_per_node.select_participants(context.node, min_count=2)
    user_ids = participants.run_on_all(lambda: f"{os.geteuid()}:{os.getegid()}")
    paths = options.paths or (str(context.artifacts_dir),)
    results = {path: _test_path(context, participants, path) for path in dict.fromkeys(paths)}  # each path once
    if context.rank == 0:
        yield from facts(
            {
                "several_nodes": "yes" if participants.several_nodes else "no",
                "paths_from": "options" if options.paths else "run directory",
                "user_ids": one_rank_per_node.group_by_text(dict(zip(participants.names, user_ids, strict=True))),
            }
        )
        yield metric("user_id_mismatches", len(set(user_ids)) - 1, "users")
        yield from _observations(results)


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
    """Return mount, size and free space of the filesystem at ``path``. Raises OSError for a missing path."""
    from seatrial.discover import filesystem, filesystem_kind

    usage, stat = filesystem.usage(Path("/"), path), os.statvfs(path)
    mounts = filesystem.mountinfo(read_text(root / "proc/self/mountinfo"))
    mounts_above = [mount for mount in mounts if Path(usage.path).is_relative_to(mount.target)]
    description = "not found in /proc/self/mountinfo"
    if mounts_above:
        mount = max(mounts_above, key=lambda mount: len(mount.target))
        kind = filesystem_kind.identify(mount, root)
        description = f"{kind.name}, {printable(mount.source)} at {printable(mount.target)} with {mount.options}"
    return Volume(
        mount=description,
        size=usage.size,
        free=usage.free,
        free_inodes=stat.f_favail if stat.f_files else None,
    )


def _observations(results: Mapping[str, PathResult]) -> Iterator[Observation]:
    """Yield the metrics over all paths, and for each kind of problem a fact path → reason."""
    usable = {path: result for path, result in results.items() if not result.unusable}
    shared = {path: result for path, result in usable.items() if not result.not_shared}
    any_usable = "yes" if usable else "no: no path is usable (see fact unusable)"
    any_shared = "yes" if shared else "no: no path is shared by all nodes"
    yield from facts({"any_path_usable": any_usable, "any_path_shared": any_shared})
    yield _text_fact("filesystems", {path: result.mounts for path, result in results.items()})
    yield _text_fact("unusable", {path: result.unusable for path, result in results.items()})
    yield _text_fact("not_shared", {path: result.not_shared for path, result in results.items()})
    yield _text_fact("files_not_removed", {path: result.not_removed for path, result in results.items()})
    yield Fact(name="fault_places", value=fault_places(results))
    yield metric("paths_unusable", len(results) - len(usable), "paths")
    if usable:
        yield metric("paths_not_shared", len(usable) - len(shared), "paths")
        yield from _free_space(usable)
    if shared:
        yield from _probe_results(shared)


def fault_places(results: Mapping[str, PathResult]) -> dict[str, dict[str, list[str]]]:
    """Return {"paths_not_shared": {node: paths}}: the nodes whose mount at a path differs from that of the majority.

    Empty if there is no such node.
    """
    paths_by_node: dict[str, list[str]] = {}
    for path, result in results.items():
        if not result.not_shared or not result.volumes:
            continue
        mount_by_node = {node: volume.mount for node, volume in result.volumes.items()}
        most_common, count = Counter(mount_by_node.values()).most_common(1)[0]
        if 2 * count <= len(mount_by_node):
            continue
        for node, mount in mount_by_node.items():
            if mount != most_common:
                paths_by_node.setdefault(node, []).append(path)
    return {"paths_not_shared": paths_by_node} if paths_by_node else {}


def _text_fact(name: str, text_by_path: Mapping[str, str | None]) -> Fact:
    """Return the fact ``name``: path → text, for the paths with a text."""
    return Fact(name=name, value={path: text for path, text in text_by_path.items() if text})


def _free_space(results: Mapping[str, PathResult]) -> Iterator[Observation]:
    """Yield free bytes and inodes per path (minimum over nodes), and the minimum over all paths."""
    space: dict[str, dict[str, int | None]] = {}  # path → size, free bytes and free inodes
    free_bytes: list[int] = []  # of each path
    free_inodes: list[int] = []  # of each path with a limited number of inodes
    for path, result in results.items():
        volumes = result.volumes.values()
        free_bytes.append(min(volume.free for volume in volumes))
        path_inodes = [volume.free_inodes for volume in volumes if volume.free_inodes is not None]
        if path_inodes:
            free_inodes.append(min(path_inodes))
        space[path] = {
            "size": max(volume.size for volume in volumes),
            "free": free_bytes[-1],
            "free_inodes": min(path_inodes, default=None),
        }
    yield from facts({"space": space, "inodes_limited": "yes" if free_inodes else "no"})
    yield metric("free_bytes", min(free_bytes), "B")
    if free_inodes:
        yield metric("free_inodes", min(free_inodes), "inodes")


def _probe_results(results: Mapping[str, PathResult]) -> Iterator[Observation]:
    """Yield the visibility delay (ms), and for each probe the number of paths on which it failed."""
    delays_ms = {
        path: {participant: round(seconds * 1e3, 2) for participant, seconds in result.delays.items()}
        for path, result in results.items()
    }
    yield Fact(name="visibility_ms", value=dict(delays_ms))
    yield metric("visibility_delay", max(max(path_delays.values()) for path_delays in delays_ms.values()), "ms")
    for probe, metric_name in PROBE_METRICS.items():
        yield _text_fact(probe, {path: result.failures.get(probe) for path, result in results.items()})
        yield _text_fact(f"{probe}_untested", {path: result.untested.get(probe) for path, result in results.items()})
        failed_count = sum(bool(result.failures.get(probe)) for result in results.values())
        if failed_count or not any(probe in result.untested for result in results.values()):
            yield metric(metric_name, failed_count, "paths")


LOCK_MEANING = (
    "Two nodes can hold the same file lock: Hugging Face download caches, torch's FileStore and compile caches may be "
    "written by two nodes at the same time."
)
LOCK_FIX = (
    "BeeGFS: tuneUseGlobalFileLocks = true in beegfs-client.conf. Lustre: mount with -o flock, not localflock. NFS: "
    "mount without nolock and local_lock, and check that rpc-statd runs (systemctl status rpc-statd). virtiofs: "
    "virtiofsd must support remote locks. "
    "Workaround: put caches on a local disk of each node (HF_HOME, TRITON_CACHE_DIR)."
)
ANY_PATH_SHARED = {"any_path_shared": "yes"}

RULES = (
    Rule(
        metric="paths_unusable",
        evidence_facts=("unusable",),
        expect="== 0 paths",
        meaning="A node cannot write to the directory, or gets no answer from the filesystem.",
        fix="The fact unusable lists path, node and reason. On that node: ls -ld PATH; df -h PATH; df -i PATH; "
        "findmnt -T PATH",
    ),
    Rule(
        metric="paths_not_shared",
        evidence_facts=("not_shared", "filesystems"),
        expect="== 0 paths",
        applies_if={"several_nodes": "yes", "any_path_usable": "yes", "paths_from": "options"},
        meaning="A node does not see files of other nodes in this directory: checkpoints and results are incomplete.",
        fix="The fact filesystems lists the mounts. On the node with another mount: findmnt -T PATH; mount -a",
    ),
    Rule(
        metric="paths_not_shared",
        evidence_facts=("not_shared", "filesystems"),
        expect="== 0 paths",
        # WARN: seatrial does not need a shared run directory.
        outcome_if_violated=Outcome.WARN,
        applies_if={"several_nodes": "yes", "any_path_usable": "yes", "paths_from": "run directory"},
        meaning="The run directory is not shared, and no shared directory is configured; others were not tested.",
        fix="Set the shared directories of this cluster: --set 'checks.filesystem.shared.options.paths=[/shared]'",
    ),
    Rule(
        metric="user_id_mismatches",
        evidence_facts=("user_ids",),
        expect="== 0 users",
        applies_if={"several_nodes": "yes"},
        meaning="The user has different uid:gid on some nodes, and may not access files written on other nodes.",
        fix='On each node: id "$USER"; use a directory service (LDAP with SSSD) or one /etc/passwd',
    ),
    Rule(
        metric="visibility_delay",
        evidence_facts=("visibility_ms",),
        expect="< 1000 ms",
        outcome_if_violated=Outcome.WARN,
        applies_if=ANY_PATH_SHARED,
        meaning="New files become visible on other nodes only after this delay (5000 ms: test timeout).",
        fix="NFS hides new names for up to 30 s (acdirmin in nfs(5)): mount with lookupcache=positive, or with a "
        "smaller actimeo. FUSE and virtiofs: lower entry and attribute timeouts.",
    ),
    Rule(
        metric="rename_failures",
        evidence_facts=("rename",),
        expect="== 0 paths",
        applies_if=ANY_PATH_SHARED,
        meaning="Rename is not atomic: another node may find the checkpoint missing or incomplete.",
        fix="Keep checkpoints on a POSIX filesystem; object store gateways may not rename atomically.",
    ),
    Rule(
        metric="append_failures",
        evidence_facts=("append",),
        expect="== 0 paths",
        # WARN: NFS (open(2), O_APPEND) and default BeeGFS are known for this. Training needs no atomic appends.
        outcome_if_violated=Outcome.WARN,
        applies_if=ANY_PATH_SHARED,
        meaning="Appends from several nodes overwrite each other: shared log files lose lines.",
        fix="Write one file per process. BeeGFS: tuneUseGlobalAppendLocks = true in beegfs-client.conf.",
    ),
    Rule(
        metric="flock_failures",
        evidence_facts=("flock",),
        expect="== 0 paths",
        # WARN: BeeGFS and older Lustre do not lock across nodes by default. Training needs no locks.
        outcome_if_violated=Outcome.WARN,
        applies_if=ANY_PATH_SHARED,
        meaning=LOCK_MEANING,
        fix=LOCK_FIX,
    ),
    Rule(
        metric="fcntl_failures",
        evidence_facts=("fcntl",),
        expect="== 0 paths",
        outcome_if_violated=Outcome.WARN,
        applies_if=ANY_PATH_SHARED,
        meaning=LOCK_MEANING,
        fix=LOCK_FIX,
    ),
    Rule(
        metric="mmap_failures",
        evidence_facts=("mmap",),
        expect="== 0 paths",
        applies_if=ANY_PATH_SHARED,
        meaning="A mapped file shows old content on another node: datasets (Arrow) or weights (safetensors) are stale.",
        fix="NFS: mount without nocto. FUSE and virtiofs: no cache=always; lower attribute timeouts.",
    ),
    Rule(
        metric="owner_mismatches",
        evidence_facts=("owner",),
        expect="== 0 paths",
        applies_if=ANY_PATH_SHARED,
        meaning="A file has another owner than its writer, or nodes see different owners: access may be denied.",
        fix="NFS 4: same Domain in /etc/idmapd.conf on all nodes and the server, then nfsidmap -c. Otherwise: "
        "same uids on all nodes; check all_squash in /etc/exports and id-mapped mounts of containers.",
    ),
    Rule(
        metric="free_bytes",
        evidence_facts=("space", "filesystems"),
        expect=">= 1GiB",
        outcome_if_violated=Outcome.WARN,
        applies_if={"any_path_usable": "yes"},
        meaning="Less than 1 GiB is free: writing a checkpoint fails and terminates the job.",
        fix="df -h PATH; lfs quota, beegfs-ctl --getquota or quota -s; delete files or raise the quota.",
    ),
    Rule(
        metric="free_inodes",
        evidence_facts=("space", "filesystems"),
        expect=">= 1000 inodes",
        outcome_if_violated=Outcome.WARN,
        applies_if={"any_path_usable": "yes", "inodes_limited": "yes"},
        meaning="Few free inodes: no new files can be created when none are left.",
        fix="df -i PATH; find directories with many files: du --inodes -xd2 PATH | sort -n",
    ),
)


CHECK = Check(
    name="filesystem.shared",
    title="Shared directories: visibility and POSIX guarantees across nodes",
    fact_roles={"fault_places": "fault_places"},
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    needs=Needs(min_ranks=2, shared_folder=True),
    metrics={
        "paths_unusable": "paths",
        "paths_not_shared": "paths",
        "user_id_mismatches": "users",
        "visibility_delay": "ms",
        **dict.fromkeys(PROBE_METRICS.values(), "paths"),
        "free_bytes": "B",
        "free_inodes": "inodes",
    },
    rules=RULES,
    rule_facts={
        "several_nodes": RuleFact(reason="single node"),
        "any_path_usable": RuleFact(reason="no path is usable"),
        "paths_from": RuleFact("options|run directory", "the paths come from the {}"),
        "any_path_shared": RuleFact(reason="no path is shared by all nodes"),
        "inodes_limited": RuleFact(reason="the filesystem has no fixed number of inodes"),
    },
    measure=measure,
    limit_s=300,  # a hung filesystem costs 30 s or more per path: the first timeout ends the tests of that path
    options=SharedOptions,
)
