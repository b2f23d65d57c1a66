"""Are the shared folders truly shared, and do they keep the promises that programs on several nodes rely on?"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from seatrial.checks.base import Check, Context, Needs, Options, facts, metric
from seatrial.discover import filesystem
from seatrial.discover.file_readers import printable, read_text
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope

if TYPE_CHECKING:
    from seatrial.bench.one_rank_per_node import Participants
    from seatrial.bench.storage import SharedFolder

PROMISES = ("rename", "append", "flock", "fcntl", "mmap", "owner")  # each has a probe and a metric of its faults

# Type in /proc/self/mountinfo → the name that people know it by.
KNOWN = {
    "9p": "9p",
    "beegfs": "BeeGFS",
    "beegfs_nodev": "BeeGFS",
    "ceph": "CephFS",
    "cifs": "SMB",
    "fuse.ceph": "CephFS",
    "fuse.ceph-fuse": "CephFS",
    "fuse.glusterfs": "GlusterFS",
    "fuse.juicefs": "JuiceFS",
    "gpfs": "IBM Storage Scale (GPFS)",
    "lustre": "Lustre",
    "nfs": "NFS",
    "nfs4": "NFS",
    "smb3": "SMB",
    "virtiofs": "virtiofs",
    "wekafs": "WekaFS",
    **{name: f"local ({name})" for name in ("btrfs", "ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs")},
}


def _absolute(path: str) -> str:
    if not os.path.isabs(path):
        raise ValueError(f"{path!r} is not an absolute path: on each node it would be another folder")
    return path


AbsolutePath = Annotated[str, AfterValidator(_absolute)]


class SharedOptions(Options):
    """``paths`` that are said to be shared by all nodes. None: the run directory, which nobody has promised to be."""

    paths: tuple[AbsolutePath, ...] = ()


@dataclass(frozen=True)
class Volume:
    """The filesystem at a path as one node sees it. Bytes; ``free_inodes`` None: it makes them as it needs them."""

    mount: str
    size: int
    free: int
    free_inodes: int | None


@dataclass
class Findings:
    """What became of one path: why it is ``unusable``, or what each probe found wrong (None: nothing)."""

    unusable: str | None = None
    separated: str | None = None
    delays: dict[str, float] = field(default_factory=dict)  # seconds, by actor
    faults: dict[str, str | None] = field(default_factory=dict)
    unproven: dict[str, str] = field(default_factory=dict)
    volumes: dict[str, Volume] = field(default_factory=dict)  # by actor
    mounts: str = ""
    left_behind: str | None = None


def measure(context: Context, options: SharedOptions) -> Iterator[Observation]:
    from seatrial.bench import one_rank_per_node

    actors = one_rank_per_node.select_participants(context.node, min_count=2)
    users = actors.run_on_all(lambda: f"{os.geteuid()}:{os.getegid()}")
    paths = options.paths or (str(context.artifacts_dir),)
    found = {path: _examine(context, actors, path) for path in dict.fromkeys(paths)}
    if context.rank == 0:
        yield from facts(
            {
                "several_nodes": "yes" if actors.several_nodes else "no",
                "paths_from": "options" if options.paths else "run directory",
                "users": one_rank_per_node.group_by_reason(dict(zip(actors.names, users, strict=True))),
            }
        )
        yield metric("user_id_mismatches", len(set(users)) - 1, "users")
        yield from _report(found)


def _examine(context: Context, actors: Participants, path: str) -> Findings:
    from seatrial.bench import one_rank_per_node, shared_files, storage

    context.progress(path)
    found = Findings()
    try:
        volumes = actors.run_on_all(lambda: read_volume(context.root, path))
        found.volumes = dict(zip(actors.names, volumes, strict=True))
        found.mounts = one_rank_per_node.group_by_reason({name: volume.mount for name, volume in found.volumes.items()})
        with storage.temporary_folder(path, actors) as site:
            found.separated = shared_files.invisible_files(site)
            if not found.separated:
                found.delays = dict(zip(actors.names, shared_files.visibility_delays(site), strict=True))
                for name, probe in shared_files.PROBES.items():
                    context.progress(f"{path}: {name}")
                    _try(found, name, probe, site)
        found.left_behind = str(site.path) if storage.still_exists(site) else None
    except one_rank_per_node.ParticipantError as trouble:
        found.unusable = found.unusable or str(trouble)
    return found


def _try(found: Findings, name: str, probe: Callable[[SharedFolder], str | None], site: SharedFolder) -> None:
    """A probe that the filesystem answers with an error has found a fault; where it hangs there is no going on."""
    from seatrial.bench.one_rank_per_node import ParticipantError
    from seatrial.bench.shared_files import Untested

    try:
        found.faults[name] = probe(site)
    except Untested as reason:
        found.unproven[name] = str(reason)
    except ParticipantError as trouble:
        if trouble.timed_out:
            found.unusable = f"{name}: {trouble}"
            raise
        found.faults[name] = str(trouble)


def read_volume(root: Path, path: str) -> Volume:
    """What is mounted at a path here, and what is left of it. Raises OSError where there is none."""
    used, counted = filesystem.usage(Path("/"), path), os.statvfs(path)
    entries = filesystem.mountinfo(read_text(root / "proc/self/mountinfo"))
    above = [entry for entry in entries if Path(used.path).is_relative_to(entry.target)]
    described = "not found among the mounts"
    if mount := max(above, key=lambda entry: len(entry.target), default=None):
        kind = KNOWN.get(mount.type, f"unknown type {printable(mount.type)}")
        described = f"{kind}, {printable(mount.source)} at {printable(mount.target)} with {mount.options}"
    return Volume(
        mount=described,
        size=used.size,
        free=used.free,
        free_inodes=counted.f_favail if counted.f_files else None,
    )


def _report(found: Mapping[str, Findings]) -> Iterator[Observation]:
    usable = {path: findings for path, findings in found.items() if not findings.unusable}
    examined = {path: findings for path, findings in usable.items() if not findings.separated}
    yield from facts({"usable": "yes" if usable else "no", "examined": "yes" if examined else "no"})
    yield _texts("filesystems", {path: findings.mounts for path, findings in found.items()})
    yield _texts("unusable", {path: findings.unusable for path, findings in found.items()})
    yield _texts("not_shared", {path: findings.separated for path, findings in found.items()})
    yield _texts("left_behind", {path: findings.left_behind for path, findings in found.items()})
    yield metric("paths_unusable", len(found) - len(usable), "paths")
    if usable:
        yield metric("paths_not_shared", len(usable) - len(examined), "paths")
        yield from _room(usable)
    if examined:
        yield from _promises(examined)


def _texts(name: str, by_path: Mapping[str, str | None]) -> Fact:
    """The texts by path, without those that are empty."""
    return Fact(name=name, value={path: text for path, text in by_path.items() if text})


def _room(found: Mapping[str, Findings]) -> Iterator[Observation]:
    """The least room that any node sees at each path, and the least of all paths."""
    space: dict[str, dict[str, int | None]] = {}
    for path, findings in found.items():
        volumes = findings.volumes.values()
        inodes = [volume.free_inodes for volume in volumes if volume.free_inodes is not None]
        size, free = max(volume.size for volume in volumes), min(volume.free for volume in volumes)
        space[path] = {"size": size, "free": free, "free_inodes": min(inodes, default=None)}
    limits = [least for room in space.values() if (least := room["free_inodes"]) is not None]
    yield from facts({"space": space, "inodes_limited": "yes" if limits else "no"})
    yield metric("free_bytes", min(volume.free for one in found.values() for volume in one.volumes.values()), "B")
    if limits:
        yield metric("free_inodes", min(limits), "inodes")


def _promises(found: Mapping[str, Findings]) -> Iterator[Observation]:
    delays = {path: {name: round(s * 1e3, 2) for name, s in item.delays.items()} for path, item in found.items()}
    yield Fact(name="visibility_ms", value=dict(delays))
    yield metric("visibility_delay", max(delay for by_name in delays.values() for delay in by_name.values()), "ms")
    for name in PROMISES:
        yield _texts(name, {path: findings.faults.get(name) for path, findings in found.items()})
        yield _texts(f"{name}_unproven", {path: findings.unproven.get(name) for path, findings in found.items()})
        faults = sum(bool(findings.faults.get(name)) for findings in found.values())
        if faults or not any(name in findings.unproven for findings in found.values()):  # else nothing is known
            yield metric(f"{name}_faults", faults, "paths")


LOCK_WHY = (
    "Download caches of Hugging Face, torch's FileStore and compile caches keep writers apart by such locks: where "
    "they hold on one node only, two nodes write at once."
)
LOCK_FIX = (
    "BeeGFS: tuneUseGlobalFileLocks = true in beegfs-client.conf. Lustre: mount with -o flock, not localflock. NFS: "
    "without nolock and local_lock; systemctl status rpc-statd. virtiofs: locks of the host need support of virtiofsd. "
    "Until then give each node caches of its own (HF_HOME, TRITON_CACHE_DIR on a local disk)."
)
EXAMINED = {"examined": "yes"}

RULES = (
    Rule(
        metric="paths_unusable",
        evidence_facts=("unusable",),
        expect="== 0 paths",
        meaning="Every node must be able to write to a shared folder, and get an answer from it.",
        fix="The fact unusable says which path, on which node, and why. There: ls -ld PATH; df -h PATH; df -i PATH; "
        "findmnt -T PATH",
    ),
    Rule(
        metric="paths_not_shared",
        evidence_facts=("not_shared", "filesystems"),
        expect="== 0 paths",
        applies_if={"several_nodes": "yes", "usable": "yes", "paths_from": "options"},
        meaning="What one node writes there, others do not see: checkpoints, datasets and results end up in pieces.",
        fix="The fact filesystems says what is mounted. On a node that stands apart: findmnt -T PATH; mount -a",
    ),
    Rule(
        metric="paths_not_shared",
        evidence_facts=("not_shared", "filesystems"),
        expect="== 0 paths",
        # Nobody has promised that the run directory is shared, and seatrial does without.
        outcome_if_violated=Outcome.WARN,
        applies_if={"several_nodes": "yes", "usable": "yes", "paths_from": "run directory"},
        meaning="The run directory is another one on each node. No shared folder was named, so that none was examined.",
        fix="Name the shared folders of this cluster: --set 'checks.filesystem.shared.options.paths=[/shared]'",
    ),
    Rule(
        metric="user_id_mismatches",
        evidence_facts=("users",),
        expect="== 0 users",
        applies_if={"several_nodes": "yes"},
        meaning="The same person is another user (uid) on some nodes, and may not touch there what was written elsewhere.",
        fix='On each node: id "$USER"; keep users in one directory (LDAP, SSSD), or one /etc/passwd everywhere.',
    ),
    Rule(
        metric="visibility_delay",
        evidence_facts=("visibility_ms",),
        expect="< 1000 ms",
        outcome_if_violated=Outcome.WARN,
        applies_if=EXAMINED,
        meaning="A program that waits for another node's file finds it only so much later. 5000 ms means: that, or longer.",
        fix="NFS hides new names for up to 30 s (acdirmin in nfs(5)): mount with lookupcache=positive, or with a "
        "smaller actimeo. FUSE and virtiofs: lower the timeouts of entries and attributes.",
    ),
    Rule(
        metric="rename_failures",
        evidence_facts=("rename",),
        expect="== 0 paths",
        applies_if=EXAMINED,
        meaning="Checkpoints are put in place by renaming them: a reader must find the old file or the new one, whole.",
        fix="No POSIX filesystem does this. A gateway to an object store may: keep checkpoints elsewhere.",
    ),
    Rule(
        metric="append_failures",
        evidence_facts=("append",),
        expect="== 0 paths",
        outcome_if_violated=Outcome.WARN,  # known of NFS (open(2), O_APPEND) and the default of BeeGFS; training itself runs
        applies_if=EXAMINED,
        meaning="Logs that several nodes append to lose lines.",
        fix="Let each process write its own file. BeeGFS: tuneUseGlobalAppendLocks = true in beegfs-client.conf.",
    ),
    Rule(
        metric="flock_failures",
        evidence_facts=("flock",),
        expect="== 0 paths",
        outcome_if_violated=Outcome.WARN,  # the default of BeeGFS and older Lustre; training itself runs
        applies_if=EXAMINED,
        meaning=LOCK_WHY,
        fix=LOCK_FIX,
    ),
    Rule(
        metric="fcntl_failures",
        evidence_facts=("fcntl",),
        expect="== 0 paths",
        outcome_if_violated=Outcome.WARN,
        applies_if=EXAMINED,
        meaning=LOCK_WHY,
        fix=LOCK_FIX,
    ),
    Rule(
        metric="mmap_failures",
        evidence_facts=("mmap",),
        expect="== 0 paths",
        applies_if=EXAMINED,
        meaning="Datasets (Arrow) and weights (safetensors) are mapped: a node that maps old content trains on it.",
        fix="NFS: mount without nocto. FUSE and virtiofs: no cache=always; lower the timeouts of attributes.",
    ),
    Rule(
        metric="owner_mismatches",
        evidence_facts=("owner",),
        expect="== 0 paths",
        applies_if=EXAMINED,
        meaning="A file belongs to somebody else as seen from another node, who then may not read or change it.",
        fix="NFS 4: the same Domain in /etc/idmapd.conf on all nodes and the server, then nfsidmap -c. Otherwise: "
        "the same uids on all nodes; look at all_squash in /etc/exports, and at id-mapped mounts of containers.",
    ),
    Rule(
        metric="free_bytes",
        evidence_facts=("filesystems",),
        expect=">= 1GiB",
        outcome_if_violated=Outcome.WARN,
        applies_if={"usable": "yes"},
        meaning="A checkpoint that finds no room ends the job that writes it.",
        fix="df -h PATH; lfs quota, beegfs-ctl --getquota or quota -s; then make room.",
    ),
    Rule(
        metric="free_inodes",
        evidence_facts=("filesystems",),
        expect=">= 1000 inodes",
        outcome_if_violated=Outcome.WARN,
        applies_if={"usable": "yes", "inodes_limited": "yes"},
        meaning="Without inodes no file can be made, however much room there is.",
        fix="df -i PATH; find what has many small files: du --inodes -xd2 PATH | sort -n",
    ),
)


CHECK = Check(
    name="filesystem.shared",
    title="Shared folders: one filesystem on all nodes, and its guarantees",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    needs=Needs(min_ranks=2),
    metrics={
        "paths_unusable": "paths",
        "paths_not_shared": "paths",
        "user_id_mismatches": "users",
        "visibility_delay": "ms",
        **{f"{name}_faults": "paths" for name in PROMISES},
        "free_bytes": "B",
        "free_inodes": "inodes",
    },
    rules=RULES,
    measure=measure,
    limit_s=300,  # a filesystem that hangs costs half a minute a step; a dead one ends after the first
    options=SharedOptions,
)
