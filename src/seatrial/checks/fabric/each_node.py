"""Is one node slower inside than the others? Every node's own all-reduce, all nodes at the same time.

A node whose NVLinks or switches are slow slows the whole cluster's all-reduce, which does not say where it is. Here no
data leaves a node, so that each is held to what one node of its GPUs reaches, and to the other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Needs, Options, Place
from seatrial.checks.fabric import _transports
from seatrial.checks.fabric._results import BANDWIDTHS, all_fit, carrier, group_data_check, intact, label
from seatrial.model import (
    LEFT_OUT,
    WITHHELD,
    ByteSize,
    Fact,
    Metric,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    SeatrialError,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.subgroups import GroupResult

JUDGED = "busbw.8GiB"  # the size at which most is known of one node (data/skus)
GPU_SIZE, CPU_SIZE = parse_bytes("8GiB"), parse_bytes("1MiB")  # on a CPU: a rehearsal
HALVINGS = 7  # 8 GiB comes to 64 MiB: under it the links are far from full


class EachNodeOptions(Options):
    """``size``: bytes of the buffer on each rank; by default what suits the device. ``seconds`` cap the timed part.

    Where it does not fit on some rank, all of them go down by halves until one does, and say so.
    """

    size: ByteSize | None = Field(default=None, ge=4, multiple_of=4)
    seconds: float = Field(default=1.0, gt=0, allow_inf_nan=False)


def measure(place: Place, options: EachNodeOptions) -> Iterator[Observation]:
    """Yield a node's figures on its first rank.

    Raises NotApplicable on a single node, SeatrialError where no size fits into memory.
    """
    from seatrial.bench import collectives, rank, subgroups

    nodes = subgroups.ranks_by_node(place.node)
    if len(nodes) < 2:
        raise NotApplicable("one node: collectives.all_reduce is its own")
    several = {node: ranks for node, ranks in nodes.items() if len(ranks) > 1}
    if not several:
        raise NotApplicable("one rank a node: it has nobody there to reduce with")
    path, models = collectives.describe_group(), subgroups.models_among(nodes[place.node], place.device)
    rank.release_memory(place.device)
    since = _transports.written(place.device)
    size, results, refused = _that_fits(place, options, list(several.values()))
    path["transports"] = _transports.transports(place.device, since)
    own = dict(zip(several, results, strict=True)).get(place.node)
    if own and place.rank == own.ranks[0]:
        shape = {"gpu": models, "world_size": len(own.ranks), "nodes": 1}
        facts = {**path, **shape, "size": size, "how": _how(path, size, len(several), own, refused)}
        yield from (Fact(name=name, value=value) for name, value in facts.items())
        yield from _figures(place.node, own, size)
        yield from _refused(place.node, refused)
        if options.size and f"busbw.{label(options.size)}" != JUDGED:
            yield Fact(name=LEFT_OUT, value={JUDGED: f"the trial's options ask for a size of {label(options.size)}"})


def _that_fits(
    place: Place, options: EachNodeOptions, groups: Sequence[Sequence[int]]
) -> tuple[int, list[GroupResult], dict[str, str]]:
    """The size that was measured, what came of it, and of larger ones where they did not fit: the same on all ranks."""
    from seatrial.bench import collectives, rank, subgroups

    largest = options.size or (GPU_SIZE if place.device.startswith("cuda") else CPU_SIZE)
    subjects, refused = rank.gather(place.subject), dict[str, str]()
    for size in filter(None, (largest // 2**halvings // 4 * 4 for halvings in range(HALVINGS + 1))):
        place.note(f"{len(groups)} nodes at once, {label(size)}")
        try:
            return size, subgroups.all_reduce(groups, size, place.device, options.seconds), refused
        except collectives.NoMemory as error:
            refused[label(size)] = error.told(subjects.__getitem__)
    raise SeatrialError(f"no buffer could be allocated: {refused}")


def _refused(node: str, refused: Mapping[str, str]) -> Iterator[Observation]:
    yield Metric(name="sizes_refused", value=len(refused), unit="sizes", subject=node)
    if refused:
        yield Fact(name="not_allocated", value={**refused})
        yield Fact(name=WITHHELD, value={f"busbw.{size}": f"no memory at {told}" for size, told in refused.items()})


def _figures(node: str, own: GroupResult, size: int) -> Iterator[Observation]:
    rates = own.busbw(size)
    yield Metric(name=f"busbw.{label(size)}", value=median(rates), unit="GB/s", subject=node, samples=rates)
    yield from group_data_check({node: own}, node)


def _how(path: Mapping[str, object], size: int, nodes: int, own: GroupResult, refused: Mapping[str, str]) -> str:
    instead = f", in place of {next(iter(refused))}, which did not fit everywhere," if refused else ""
    return (
        f"{carrier(path)}: all-reduce of {label(size)}{instead} among the {len(own.ranks)} ranks of this node, {nodes} "
        f"nodes at the same time; median of {len(own.timings.windows)} windows; busbw = algbw · 2(n−1)/n"
    )


CHECK = Check(
    name="collectives.each_node",
    title="Each node's own all-reduce",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"busbw.*": "GB/s", "wrong_elements": "count", "sizes_refused": "sizes"},
    rules=(
        all_fit("each_node", "size=1GiB"),
        Rule(
            metric=JUDGED,
            baseline=f"all_reduce.{JUDGED}",
            where={"backend": "nccl"},
            why="no data leaves the node here: what is missing is missing inside it, and every collective of the "
            "cluster goes at the pace of its slowest node",
            remedy="On that node: nvidia-smi nvlink -s (every link up, at full speed), nvidia-smi topo -m, "
            "nvidia-smi -q -d PERFORMANCE,CLOCK, journalctl -u nvidia-fabricmanager; compare with a good node",
        ),
        intact("The subject names the node, the fact wrong_data rank, offset and flipped bits"),
    ),
    measure=measure,
    performance=("busbw.*",),
    by_node=True,
    operation="all_reduce",
    bounds=BANDWIDTHS,
    limit_s=300.0,
    needs=Needs(ranks=2),
    options=EachNodeOptions,
)
