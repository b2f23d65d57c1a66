"""Measures file throughput (large file) and metadata rates (small files) from one node and from all concurrently."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answers, Value, absent, fact, metric, value
from seatrial.checks.host.filesystem_shared import AbsolutePath
from seatrial.model import ByteSize, Phase, Scope, format_bytes

if TYPE_CHECKING:
    from seatrial.bench.storage import SharedFolder, StreamResult

# A step times out below these total rates of all nodes. 1e7 B/s is 80 Mbit/s; a disk with one seek per file reaches
# more than 10 files/s.
MIN_BYTES_PER_S = 1e7
MIN_FILES_PER_S = 10
# Whether all nodes use O_DIRECT → value of fact caches.*
CACHE_TEXTS = {
    True: "page cache of the node bypassed (O_DIRECT); caches of the file servers in use",
    False: "page cache of the node in use, as O_DIRECT is not supported everywhere: write time includes fsync; reads "
    "start after posix_fadvise(POSIX_FADV_DONTNEED), but may still be served from memory",
}
# Whether all nodes share the folder → value of fact shared.*
SHARED_TEXTS = {
    True: "in concurrent mode each node reads and stats the files that the next node wrote",
    False: "a different folder on each node: each node reads and stats the files that it wrote",
}


class SpeedOptions(Options):
    """``paths``: directories to measure; default: the run directory.

    ``size``: bytes of the large file of each node. The default of 64 MiB is a functional test; a reliable bandwidth
    needs a file larger than the server caches. ``files``: number of small files of each node.
    """

    paths: tuple[AbsolutePath, ...] = ()
    size: Annotated[ByteSize, Field(ge=2**20, multiple_of=2**20)] = 64 * 2**20
    files: int = Field(default=200, ge=1)


def measure(context: Context, options: SpeedOptions) -> Answers:
    """Yield GB/s and files/s of each path, for one node alone and for all nodes concurrently; only rank 0 yields."""
    from seatrial.bench import one_rank_per_node, storage

    participants = one_rank_per_node.select_participants(context.node)
    failures: dict[str, str] = {}  # path → nodes and reasons
    is_rank_0 = context.rank == 0
    if is_rank_0:
        yield fact(
            "method",
            f"{format_bytes(options.size)} per node in one stream of 4 MiB blocks, with fsync at the end; "
            f"{options.files} files of 4 KiB per node, in one folder per node, without fsync; "
            "concurrent rates: total over the time until the slowest node ends",
        )
    for path in dict.fromkeys(options.paths or (str(context.artifacts_dir),)):
        context.progress(path)
        label = path if options.paths else "run_directory"
        try:
            with storage.temporary_folder(path, participants) as folder:
                for answer in _measure(folder, options, label, context.progress):
                    if is_rank_0:
                        yield answer
        except one_rank_per_node.ParticipantError as error:
            failures[path] = str(error)
    if is_rank_0:
        if options.paths or failures:
            reason = "the run directory was not measured: the trial sets paths, or its measurement failed"
            yield absent(("write_single.run_directory", "read_single.run_directory"), reason)
        yield value("paths_failed", len(failures), evidence={"failed": failures})


def _measure(folder: SharedFolder, options: SpeedOptions, label: str, progress: Callable[[str], None]) -> Answers:
    """Yield all rates of one folder: from the first node alone, then from all nodes concurrently."""
    from seatrial.bench import storage

    is_shared = storage.is_shared(folder)
    all_direct = True  # so far all nodes have used O_DIRECT
    for mode, mode_folder in folder.by_mode.items():
        progress(f"{label}: large files, {mode}")
        for operation, streams in _streams(mode_folder, options.size, is_shared):
            all_direct = all_direct and all(stream.direct for stream in streams)
            yield _rate(f"{operation}_{mode}.{label}", options.size / 1e9, [stream.seconds for stream in streams])
        progress(f"{label}: small files, {mode}")
        for operation, seconds in _small_files(mode_folder, options.files, f"small_{mode}", is_shared):
            yield _rate(f"{operation}_{mode}.{label}", options.files, seconds)
    yield fact(f"caches.{label}", CACHE_TEXTS[all_direct])
    yield fact(f"shared.{label}", SHARED_TEXTS[is_shared])


def _streams(folder: SharedFolder, size: int, is_shared: bool) -> Iterator[tuple[str, list[StreamResult]]]:
    """Yield ``write`` and ``read``, each with the results of all nodes.

    In a shared folder each node reads the file of the next node.
    """
    from seatrial.bench import storage
    from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S

    total_bytes = len(folder.names) * size
    timeout_s = STEP_TIMEOUT_S + total_bytes / MIN_BYTES_PER_S
    folder.run_on_all(lambda: storage.require_free_space(folder.path, total_bytes))
    yield "write", folder.run_on_all(lambda: storage.write_stream(folder.file("large"), size), timeout_s)
    read_path = (folder.next_file if is_shared else folder.file)("large")
    yield "read", folder.run_on_all(lambda: storage.read_stream(read_path, size), timeout_s)


def _small_files(folder: SharedFolder, count: int, name: str, is_shared: bool) -> Iterator[tuple[str, list[float]]]:
    """Yield ``create``, ``stat`` and ``unlink``, each with the seconds of all nodes.

    In a shared folder each node stats the files of the next node. ``count``: number of files of each node.
    """
    from seatrial.bench import storage
    from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S

    timeout_s = STEP_TIMEOUT_S + len(folder.names) * count / MIN_FILES_PER_S
    yield "create", folder.run_on_all(lambda: storage.create_small_files(folder.file(name), count), timeout_s)
    stat_path = (folder.next_file if is_shared else folder.file)(name)
    yield "stat", folder.run_on_all(lambda: storage.time_small_files(Path.stat, stat_path, count), timeout_s)
    yield (
        "unlink",
        folder.run_on_all(lambda: storage.time_small_files(Path.unlink, folder.file(name), count), timeout_s),
    )


def _rate(name: str, amount: float, seconds: Sequence[float]) -> Value:
    """The total rate: ``amount`` times nodes over the time of the slowest node. Samples are the nodes' rates.

    ``amount``: GB, or number of files, of each node. ``seconds``: of each node.
    """
    total = value(name, amount * len(seconds) / max(seconds))
    return total._replace(samples=tuple(amount / node_seconds for node_seconds in seconds))


CHECK = Check(
    name="filesystem.speed",
    title="Shared directories: file throughput and metadata rates",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    measure=measure,
    limit_s=300,  # for the default size; a trial with larger files sets a larger limit
    options=SpeedOptions,
    declared=(
        metric(
            "paths_failed",
            "== 0 paths",
            "Writing, reading or removing files failed, or free space is too small.",
            "On the node that is named: ls -ld PATH; df -h PATH; df -i PATH; dmesg | tail",
        ),
        *(
            metric(
                f"{operation}_single.run_directory",
                f">= {MIN_BYTES_PER_S / 1e9:g} GB/s",
                f"The run directory is so slow to {operation} that no checkpoint or log can be kept in it.",
                "df -h and the mount options of the run directory; filesystem.client reads its servers",
                speed=True,
            )
            for operation in ("write", "read")
        ),
        *(
            metric(f"{operation}_{mode}.*", unit=unit, meaning=f"{operation} rate of {nodes}", speed=True)
            for unit, operations in (("GB/s", ("write", "read")), ("files/s", ("create", "stat", "unlink")))
            for operation in operations
            for mode, nodes in (("single", "one node"), ("concurrent", "all nodes together"))
        ),
    ),
)
