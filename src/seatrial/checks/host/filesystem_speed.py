"""How fast do the nodes write and read files: a large one, and many small ones, from one node and from all at once?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from seatrial.checks.base import Check, Context, Options, metric
from seatrial.checks.host.filesystem_shared import AbsolutePath
from seatrial.model import CLUSTER, ByteSize, Fact, Metric, Observation, Phase, Rule, Scope, format_bytes

if TYPE_CHECKING:
    from seatrial.bench.storage import SharedFolder, StreamResult

STREAMS, SMALL_FILES = ("write", "read"), ("create", "stat", "unlink")
METRICS = {
    "paths_failed": "paths",
    **{f"{what}_{who}.*": "GB/s" for what in STREAMS for who in ("one", "all")},
    **{f"{what}_{who}.*": "files/s" for what in SMALL_FILES for who in ("one", "all")},
}
SLOWEST = 1e7  # bytes/s: what is slower than a network of 100 Mbit/s counts as hung
SLOWEST_FILES = 10  # files/s: a disk that seeks for each file makes more
CACHES = {
    True: "Past the page cache of the node (O_DIRECT); the servers' caches have their part.",
    False: "Through the page cache of the node, which could not be bypassed everywhere: writing lasts until fsync, "
    "reading begins after posix_fadvise(POSIX_FADV_DONTNEED), and may yet be answered from memory.",
}
SHARED = {
    True: "With all nodes at it, each reads and stats what its neighbour wrote.",
    False: "Another folder on each node: each reads and stats what it wrote itself.",
}


class SpeedOptions(Options):
    """``paths`` to measure; none: the run directory. ``size`` of the large file and number of small ``files``, a node.

    The large file of 64 MiB says that it works, and roughly how fast; for a figure to hold somebody to, take one
    larger than the caches of the servers.
    """

    paths: tuple[AbsolutePath, ...] = ()
    size: Annotated[ByteSize, Field(ge=2**20, multiple_of=2**20)] = 64 * 2**20
    files: int = Field(default=200, ge=1)


def measure(context: Context, options: SpeedOptions) -> Iterator[Observation]:
    from seatrial.bench import one_rank_per_node, storage

    actors, failed = one_rank_per_node.select_participants(context.node), dict[str, str]()
    leads = context.rank == 0
    if leads:
        yield Fact(name="several_nodes", value="yes" if actors.several_nodes else "no")
        yield Fact(
            name="how",
            value=f"{format_bytes(options.size)} a node in one stream, 4MiB at a time, each with fsync at its end; "
            f"{options.files} files of 4KiB a node in one folder a node, without fsync. "
            "The rate of all at once lasts until the last of them has done.",
        )
    for path in dict.fromkeys(options.paths or (str(context.artifacts_dir),)):
        context.progress(path)
        label = path if options.paths else "run_directory"
        try:
            with storage.temporary_folder(path, actors) as site:
                for observation in _measure(site, options, label, context.progress):
                    if leads:
                        yield observation
        except one_rank_per_node.ParticipantError as trouble:
            failed[path] = str(trouble)
    if leads:
        yield Fact(name="failed", value=dict(failed))
        yield metric("paths_failed", len(failed), "paths")


def _measure(
    site: SharedFolder, options: SpeedOptions, label: str, note: Callable[[str], None]
) -> Iterator[Observation]:
    """All figures of one folder: those of the first node alone, then those of all nodes at the same time."""
    from seatrial.bench import storage

    direct, shared = True, storage.is_shared(site)
    teams = {"one": replace(site, participants=site.participants.first_only)} | (
        {"all": site} if site.participants.several_nodes else {}
    )
    for who, team in teams.items():
        note(f"{label}: large files, {who}")
        for name, transfers in _streams(team, options.size, shared):
            direct = direct and all(transfer.direct for transfer in transfers)
            yield _rate(f"{name}_{who}.{label}", options.size / 1e9, [transfer.seconds for transfer in transfers])
        note(f"{label}: small files, {who}")
        for name, seconds in _small_files(team, options.files, f"small_{who}", shared):
            yield _rate(f"{name}_{who}.{label}", options.files, seconds)
    yield Fact(name=f"caches.{label}", value=CACHES[direct])
    yield Fact(name=f"shared.{label}", value=SHARED[shared])


def _streams(site: SharedFolder, size: int, shared: bool) -> Iterator[tuple[str, list[StreamResult]]]:
    """With all nodes at it each reads what its neighbour wrote, which its own caches cannot hold."""
    from seatrial.bench import storage
    from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S

    count = len(site.names)
    patience = STEP_TIMEOUT_S + count * size / SLOWEST
    site.run_on_all(lambda: storage.require_free_space(site.path, count * size))
    yield "write", site.run_on_all(lambda: storage.write_stream(site.file("large"), size), patience)
    other = site.next_file if shared else site.file
    yield "read", site.run_on_all(lambda: storage.read_stream(other("large"), size), patience)


def _small_files(site: SharedFolder, files: int, kind: str, shared: bool) -> Iterator[tuple[str, list[float]]]:
    from seatrial.bench import storage
    from seatrial.bench.one_rank_per_node import STEP_TIMEOUT_S

    patience = STEP_TIMEOUT_S + len(site.names) * files / SLOWEST_FILES
    yield "create", site.run_on_all(lambda: storage.create_small_files(site.file(kind), files), patience)
    other = site.next_file if shared else site.file
    yield "stat", site.run_on_all(lambda: storage.stat_small_files(other(kind), files), patience)
    yield "unlink", site.run_on_all(lambda: storage.unlink_small_files(site.file(kind), files), patience)


def _rate(name: str, amount: float, seconds: Sequence[float]) -> Metric:
    """``amount`` on each node, over the time until the last one had done. The samples are the nodes' own rates."""
    unit = METRICS[f"{name.partition('.')[0]}.*"]
    rates = tuple(amount / each for each in seconds)
    return Metric(name=name, value=amount * len(seconds) / max(seconds), unit=unit, subject=CLUSTER, samples=rates)


CHECK = Check(
    name="filesystem.speed",
    title="Speed of shared folders: large and small files, from one node and from all",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CLUSTER,
    metrics=METRICS,
    rules=(
        Rule(
            metric="paths_failed",
            evidence_facts=("failed",),
            expect="== 0 paths",
            meaning="A folder that cannot be written, read and cleaned again, or has no room for the files, is of no use.",
            fix="The fact failed says which path, on which node, and why. There: ls -ld PATH; df -h PATH; "
            "df -i PATH; dmesg | tail",
        ),
    ),
    measure=measure,
    limit_s=300,  # for the default size; a trial that asks for larger files gives it more
    options=SpeedOptions,
    performance_metrics=tuple(name for name in METRICS if name != "paths_failed"),
)
