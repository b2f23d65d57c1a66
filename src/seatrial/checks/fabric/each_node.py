"""Is one node slower inside than the others? Every node's own all-reduce, all nodes at the same time.

A node whose NVLinks or switches are slow slows the whole cluster's all-reduce, which does not say where it is. Here no
data leaves a node, so that each is held to what one node of its GPUs reaches, and to the other nodes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Context, Needs, facts, metric
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import (
    BANDWIDTH_BOUNDS,
    GroupOptions,
    allocation_rule,
    group_wrong_data_results,
    size_label,
    transport_text,
    wrong_data_rule,
)
from seatrial.model import (
    NOT_REPORTED,
    NOT_REQUESTED,
    ByteSize,
    Fact,
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

REFERENCE_METRIC = "busbw.8GiB"  # the size at which most is known of one node (data/skus)
GPU_SIZE, CPU_SIZE = parse_bytes("8GiB"), parse_bytes("1MiB")  # on a CPU: a rehearsal
MAX_HALVINGS = 7  # 8 GiB comes to 64 MiB: under it the links are far from full


class EachNodeOptions(GroupOptions):
    """``size``: bytes of the buffer on each rank; by default what suits the device. ``seconds`` cap the timed part.

    Where it does not fit on some rank, all of them go down by halves until one does, and say so.
    """

    size: ByteSize | None = Field(default=None, ge=4, multiple_of=4)


def measure(context: Context, options: EachNodeOptions) -> Iterator[Observation]:
    """Yield a node's figures on its first rank.

    Raises NotApplicable on a single node, SeatrialError where no size fits into memory.
    """
    from seatrial.bench import collectives, rank, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    if len(nodes) < 2:
        raise NotApplicable("one node: collectives.all_reduce is its own")
    several = {node: ranks for node, ranks in nodes.items() if len(ranks) > 1}
    if not several:
        raise NotApplicable("one rank a node: it has nobody there to reduce with")
    path, models = collectives.describe_group(), subgroups.gpu_models(nodes[context.node], context.device)
    rank.release_memory(context.device)
    since = _nccl_log.log_size(context.device)
    size, results, refused = _that_fits(context, options, list(several.values()))
    path["transports"] = _nccl_log.connections_by_transport(context.device, since)
    result = dict(zip(several, results, strict=True)).get(context.node)
    if not result or context.rank != result.ranks[0]:
        return
    yield from facts({**path, "gpu": models, "world_size": len(result.ranks), "nodes": 1, "size": size})
    instead = f", in place of {next(iter(refused))}, which did not fit everywhere," if refused else ""
    yield Fact(
        name="how",
        value=f"{transport_text(path)}: all-reduce of {size_label(size)}{instead} among the {len(result.ranks)} ranks of this "
        f"node, {len(several)} nodes at the same time; median of {len(result.timings.windows)} windows; "
        "busbw = algbw · 2(n−1)/n",
    )
    yield metric(f"busbw.{size_label(size)}", result.busbw(size), "GB/s", context.node)
    yield from group_wrong_data_results({context.node: result}, context.node)
    yield metric("sizes_not_allocated", len(refused), "sizes", context.node)
    if refused:
        withheld = {f"busbw.{larger}": f"no memory at {reason}" for larger, reason in refused.items()}
        yield from facts({"not_allocated": refused, NOT_REPORTED: withheld})
    if options.size and f"busbw.{size_label(options.size)}" != REFERENCE_METRIC:
        yield Fact(
            name=NOT_REQUESTED,
            value={REFERENCE_METRIC: f"the trial's options ask for a size of {size_label(options.size)}"},
        )


def _that_fits(
    context: Context, options: EachNodeOptions, groups: Sequence[Sequence[int]]
) -> tuple[int, list[GroupResult], dict[str, str]]:
    """The size that was measured, what came of it, and of larger ones where they did not fit: the same on all ranks."""
    from seatrial.bench import collectives, rank, subgroups

    largest = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    subjects, refused = rank.gather(context.subject), dict[str, str]()
    for size in filter(None, (largest // 2**halvings // 4 * 4 for halvings in range(MAX_HALVINGS + 1))):
        context.progress(f"{len(groups)} nodes at once, {size_label(size)}")
        try:
            return size, subgroups.measure_all_reduce(groups, size, context.device, options.seconds), refused
        except collectives.AllocationError as error:
            refused[size_label(size)] = error.summary(subjects.__getitem__)
    raise SeatrialError(f"no buffer could be allocated: {refused}")


CHECK = Check(
    name="collectives.each_node",
    title="Each node's own all-reduce",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"busbw.*": "GB/s", "wrong_elements": "count", "sizes_not_allocated": "sizes"},
    rules=(
        allocation_rule("each_node", "size=1GiB"),
        Rule(
            metric=REFERENCE_METRIC,
            reference=f"all_reduce.{REFERENCE_METRIC}",
            applies_if={"backend": "nccl"},
            meaning="no data leaves the node here: what is missing is missing inside it, and every collective of the "
            "cluster goes at the pace of its slowest node",
            fix="On that node: nvidia-smi nvlink -s (every link up, at full speed), nvidia-smi topo -m, "
            "nvidia-smi -q -d PERFORMANCE,CLOCK, journalctl -u nvidia-fabricmanager; compare with a good node",
        ),
        wrong_data_rule("The subject names the node, the fact wrong_data rank, offset and flipped bits"),
    ),
    measure=measure,
    performance_metrics=("busbw.*",),
    per_node=True,
    operation="all_reduce",
    bounds=BANDWIDTH_BOUNDS,
    limit_s=300.0,
    needs=Needs(min_ranks=2),
    options=EachNodeOptions,
)
