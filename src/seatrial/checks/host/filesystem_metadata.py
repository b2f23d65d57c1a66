"""Metadata rates of each tier: create, stat, list and unlink of many files, from one node and from all concurrently."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.check import Check, Context
from seatrial.checks.declare import Answers, absent, fact, metric, value, warning
from seatrial.checks.host import _tiers
from seatrial.checks.host._tiers import TierOptions, tiers
from seatrial.model import Phase, Scope

if TYPE_CHECKING:
    from seatrial.bench.metadata import OperationTiming
    from seatrial.bench.storage import SharedFolder

OPERATIONS = ("create", "stat", "list", "unlink")
MODES = {"single": "one node", "concurrent": "all nodes concurrently"}
_MIN_UNLINK_RATE = 10  # files/s of all nodes together; a slower deletion is a timeout
_MAX_NAMED = 5  # at most this many folders of other runs are in the fact leftovers
_LEFTOVERS_TIMEOUT_S = 600.0  # limit for the removal of folders of killed runs


class MetadataOptions(TierOptions):
    """``paths``: tier → path; default: the run directory. ``files``: total number of files on all nodes."""

    files: int = Field(default=100_000, ge=100, le=10_000_000)
    repeats: int = Field(default=3, ge=1, le=100)
    step_s: float = Field(default=10.0, gt=0, le=600, description="time limit of create, and of stat, in each repeat")
    seconds: float = Field(default=120.0, gt=0, le=3600, description="per path: no repeat starts after this time")


def measure(context: Context, options: MetadataOptions) -> Answers:
    """Yield files/s per tier from rank 0: the median of the repeats, with the repeats as samples."""
    from seatrial.bench import metadata, one_rank_per_node, storage

    participants = one_rank_per_node.select_participants(context.node)
    is_rank_0 = context.rank == 0
    paths = options.paths or {_tiers.RUN_DIRECTORY: str(context.artifacts_dir)}
    failures: dict[str, str] = {}  # path → nodes and reasons
    leftovers: dict[str, str] = {}  # folder → "removed", or why it was kept
    for name, path in paths.items():
        context.progress(f"{name}: {path}")
        try:
            with storage.temporary_folder(path, participants, metadata.owned_prefix()) as folder:
                leftovers.update(_remove_leftovers(folder))
                for observation in _measure(folder, options, name, context.progress):
                    if is_rank_0:
                        yield observation
            if storage.still_exists(folder):
                leftovers[str(folder.path)] = "cannot be removed"
        except one_rank_per_node.ParticipantError as error:
            failures[path] = str(error)
    if not is_rank_0:
        return
    leftovers.update(_leftovers_of_other_runs(context))
    method = (
        f"{options.files:,} empty files of all nodes together, one folder and one thread per node; create and stat end "
        f"after {options.step_s:g} s each; {options.repeats} repeats, none starts later than {options.seconds:g} s; "
        "total rate: files of all nodes over the time of the slowest node; in a shared folder each node reads what "
        "the next node created"
    )
    yield fact("method", method)
    yield value("paths_failed", len(failures), evidence={"failed": failures})
    kept = {path: reason for path, reason in leftovers.items() if reason != "removed"}
    yield value("leftover_folders", len(kept), evidence={"leftovers": leftovers})
    yield from _tiers.answers(paths)
    for name in tiers():
        if paths.get(name) in failures:
            yield absent(f"*.{name}", "see paths_failed")
        elif name in paths and not participants.several_nodes:
            yield absent([f"{operation}_concurrent.{name}" for operation in OPERATIONS], "single node")


def _remove_leftovers(folder: SharedFolder) -> dict[str, str]:
    """Remove the folders of killed runs. Return folder → "removed", or why a node kept it.

    In a shared folder only the first node removes them.
    """
    from seatrial.bench import metadata, storage

    participants = folder.first_only if storage.is_shared(folder) else folder
    leftovers_of_nodes = participants.run_on_all(
        lambda: metadata.remove_leftovers(folder.path.parent, folder.path), _LEFTOVERS_TIMEOUT_S
    )
    # sorted: if nodes disagree about a folder, a problem replaces "removed"
    leftovers = sorted(chain.from_iterable(leftovers_of_nodes), key=lambda leftover: leftover.problem)
    return {str(leftover.path): leftover.problem or "removed" for leftover in leftovers}


def _leftovers_of_other_runs(context: Context) -> dict[str, str]:
    """Folder → why it was kept, for folders that killed runs left in other run directories next to this one."""
    from seatrial.bench import metadata

    pattern, now = f"*/artifacts/*/{metadata.PREFIX}*", time.time()
    abandoned: list[Path] = []
    for path in sorted(context.run_dir.parent.glob(pattern)):
        with suppress(OSError):  # removed meanwhile
            if not path.is_relative_to(context.run_dir) and metadata.is_abandoned(path, now):
                abandoned.append(path)
    return {str(path): "in the run directory of another run: not removed" for path in abandoned[:_MAX_NAMED]}


def _measure(folder: SharedFolder, options: MetadataOptions, name: str, progress: Callable[[str], None]) -> Answers:
    """Yield the rates of one folder, one sample per repeat, and the fact ``files.TIER``."""
    from seatrial.bench import storage

    is_shared = storage.is_shared(folder)
    rates: dict[str, list[float]] = {}  # OPERATION_MODE → files/s of all nodes together, for each repeat
    min_files: dict[str, int] = {}  # OPERATION_MODE → smallest number of files of any repeat
    started = time.monotonic()
    for repeat in range(options.repeats):
        for mode, mode_folder in folder.by_mode.items():
            progress(f"{name}: repeat {repeat + 1} of {options.repeats}, {mode}")
            for operation, timings in _repeat(mode_folder, options, f"{mode}_{repeat}", is_shared):
                key = f"{operation}_{mode}"
                file_count = sum(timing.files for timing in timings)
                min_files[key] = min(file_count, min_files.get(key, file_count))
                rates.setdefault(key, []).append(file_count / max(timing.seconds for timing in timings))
        if folder.run_on_first(lambda: time.monotonic() - started) > options.seconds:
            break
    for key, samples in rates.items():
        yield value(f"{key}.{name}", samples)
    yield fact(f"files.{name}", min_files)


def _repeat(
    folder: SharedFolder, options: MetadataOptions, name: str, is_shared: bool
) -> Iterator[tuple[str, list[OperationTiming]]]:
    """Yield each operation with its timings on all nodes; the files are deleted at the end.

    ``name``: name of the folders that the nodes create in ``folder``. In a shared folder each node reads the files of
    the next node.
    """
    from seatrial.bench import metadata
    from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S

    count, limit_s = max(1, options.files // len(folder.names)), options.step_s
    timeout_s = STEP_TIMEOUT_S + 2 * limit_s
    written_folder, read_folder = folder.file(name), (folder.next_file if is_shared else folder.file)(name)
    created = folder.run_on_all(lambda: metadata.create_files(written_folder, count, limit_s), timeout_s)
    yield "create", created
    index, written_count = folder.index, created[folder.index].files
    read_count = created[(index + 1) % len(created)].files if is_shared else written_count
    yield "stat", folder.run_on_all(lambda: metadata.stat_files(read_folder, read_count, limit_s), timeout_s)
    yield "list", folder.run_on_all(lambda: metadata.list_files(read_folder, read_count), timeout_s)
    unlink_s = STEP_TIMEOUT_S + sum(timing.files for timing in created) / _MIN_UNLINK_RATE
    yield "unlink", folder.run_on_all(lambda: metadata.unlink_files(written_folder, written_count), unlink_s)


def _rates() -> Iterator[metric]:
    """The rates of each known tier, and those of other tiers, from one node and from all nodes concurrently."""
    for operation in OPERATIONS:
        for mode, nodes in MODES.items():
            rate = f"{operation}_{mode}"
            yield metric(f"{rate}.*", unit="files/s", meaning=f"{operation} by {nodes}: files per second", speed=True)
            for name, tier in tiers().items():
                yield metric(
                    f"{rate}.{name}",
                    f">= {tier.rates[operation]:g} files/s",
                    tier.meaning,
                    "Compare with one node and with another path (docs/filesystems.md). Load of the metadata servers: "
                    "lctl get_param mdc.*.stats (Lustre), beegfs-ctl --clientstats --nodetype=meta (BeeGFS), nfsiostat "
                    "(NFS), weka status (WekaFS).",
                    outcome=tier.outcome,
                    speed=True,
                )


CHECK = Check(
    name="filesystem.metadata",
    title="Metadata rates: create, stat, list, unlink",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    options=MetadataOptions,
    measure=measure,
    limit_s=1800,
    declared=(
        _tiers.UNKNOWN_TIERS,
        metric(
            "paths_failed",
            "== 0 paths",
            "A node cannot create, read or delete files in the directory, or this took too long.",
            "On the node that is named: df -i PATH; ls -ld PATH; findmnt -T PATH",
        ),
        warning(
            "leftover_folders",
            "== 0 paths",
            "Earlier runs that were killed left directories with many files, which were not removed.",
            "If no run of seatrial uses these directories: rm -r PATH",
        ),
        *_rates(),
    ),
)
