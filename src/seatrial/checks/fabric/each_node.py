"""All-reduce within every node, on all nodes at the same time.

A node with slow NVLinks or switches slows the all-reduce of the whole cluster, but that all-reduce does not show which
node is slow. In this check no data leaves a node. Each node is compared with the reference value of one node. It is
also compared with the fastest node that has the same GPUs, so that the slower of two nodes is found too. If the buffer
does not fit on one rank, all ranks halve the size, up to MAX_HALVINGS times.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.check import Context, SkipIf, facts
from seatrial.checks.declare import Answers, Comparison, absent, fact, metric, not_requested, unreadable, value
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import (
    GroupOptions,
    allocation_metric,
    bandwidth,
    group_check,
    several_nodes,
    sizes_not_allocated,
    transport_text,
)
from seatrial.checks.fabric._wrong_data import in_groups, wrong_data, wrong_data_metric
from seatrial.model import (
    NotApplicable,
    SeatrialError,
    format_bytes,
    parse_bytes,
    size_label,
)

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult

REFERENCE_METRIC = "busbw.8GiB"  # the size with most reference values of one node (data/skus)
GPU_SIZE, CPU_SIZE = parse_bytes("8GiB"), parse_bytes("1MiB")  # CPU_SIZE is for CPU-only runs
MAX_HALVINGS = 7  # from 8 GiB down to 64 MiB; smaller sizes do not saturate the links


def measure(context: Context, options: GroupOptions) -> Answers:
    """Yield the metrics of each node on its first rank.

    Raises NotApplicable on a single node and with one rank per node, and SeatrialError if no size fits into memory.
    """
    from seatrial.bench import group, rank, subgroups

    all_nodes = several_nodes(context, "covered by collectives.all_reduce")
    ranks_by_node = {node: ranks for node, ranks in all_nodes.items() if len(ranks) > 1}
    if not ranks_by_node:
        raise NotApplicable("one rank per node: no all-reduce within a node")
    models = subgroups.gpu_models(all_nodes[context.node], context.device)
    models_by_rank = rank.gather(models)  # rank → the GPU models of its node
    rank.release_memory(context.device)
    log_offset = group.nccl_log_size()
    size, results, not_allocated = _measure_largest_size(context, options, list(ranks_by_node.values()))
    group_facts = _nccl_log.group_facts(log_offset)
    results_by_node = dict(zip(ranks_by_node, results, strict=True))
    ranks, result = ranks_by_node.get(context.node, ()), results_by_node.get(context.node)
    if not result or context.rank != ranks[0]:
        return
    yield from facts({**group_facts, "gpu": models, "world_size": len(ranks), "nodes": 1, "size": size})
    too_large = next(iter(not_allocated), "")
    reduced = f" ({format_bytes(parse_bytes(too_large))} did not fit on all ranks)" if too_large else ""
    yield fact(
        "method",
        f"{transport_text(group_facts)}: all-reduce of {format_bytes(size)}{reduced} among the "
        f"{len(ranks)} ranks of this node, {len(ranks_by_node)} nodes at the same time; median of "
        f"{len(result.timings.windows)} windows; busbw = algbw · 2(n−1)/n",
    )
    yield value(f"busbw.{size_label(size)}", result.busbw, context.node)
    busbw_of_same_gpus = [  # of this node, and of the other nodes with the same number of GPUs of the same models
        median(results_by_node[node].busbw)
        for node, node_ranks in ranks_by_node.items()
        if (models_by_rank[node_ranks[0]], len(node_ranks)) == (models, len(ranks))
    ]
    if len(busbw_of_same_gpus) > 1:
        yield value("node_share", [busbw / max(busbw_of_same_gpus) for busbw in result.busbw], context.node)
    else:
        yield absent("node_share", "no other node has the same GPUs", context.node)
    yield wrong_data(in_groups({context.node: result}), context.node)
    yield sizes_not_allocated(not_allocated, context.node)
    for label, reason in not_allocated.items():
        yield unreadable(f"busbw.{label}", f"no memory at {reason}")
    if options.size and f"busbw.{size_label(options.size)}" != REFERENCE_METRIC:
        yield not_requested(REFERENCE_METRIC, f"the trial's options set size {size_label(options.size)}")


def _measure_largest_size(
    context: Context, options: GroupOptions, groups: Sequence[Sequence[int]]
) -> tuple[int, list[CollectiveResult], dict[str, str]]:
    """The largest size that fits on all ranks, its result for each group, and a mapping: too large size → reason.

    The returned values are the same on all ranks. Raises SeatrialError if no size fits.
    """
    from seatrial.bench import collectives, rank, subgroups

    largest = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    subjects, not_allocated = rank.gather(context.subject), dict[str, str]()
    sizes = [largest // 2**halvings // 4 * 4 for halvings in range(MAX_HALVINGS + 1)]  # multiples of 4: float32
    for size in filter(None, sizes):
        context.progress(f"{len(groups)} nodes concurrently, {format_bytes(size)}")
        try:
            return size, subgroups.measure_all_reduce(groups, size, context.device, options.seconds), not_allocated
        except collectives.AllocationError as error:
            not_allocated[size_label(size)] = error.summary(subjects.__getitem__)
    reasons = "; ".join(f"{label}: {reason}" for label, reason in not_allocated.items())
    raise SeatrialError(
        f"out of memory at every size: {reasons}. Look for other processes on these devices (nvidia-smi), or set a "
        "smaller size: --set checks.collectives.each_node.options.size=SIZE"
    )


_FIX = (
    "On that node run nvidia-smi nvlink -s (all links must be up at full speed), nvidia-smi topo -m, "
    "nvidia-smi -q -d PERFORMANCE,CLOCK and journalctl -u nvidia-fabricmanager. Compare with a good node."
)

CHECK = group_check(
    name="collectives.each_node",
    title="All-reduce within each node",
    declared=(
        allocation_metric("each_node", "size=1GiB"),
        bandwidth("busbw.*", meaning="bus bandwidth of the all-reduce on one node"),
        bandwidth(
            REFERENCE_METRIC,
            (">= 0.90 reference", ">= 0.40 bound"),
            "No data leaves the node in this check, so the cause is inside the node. The slowest node limits every "
            "collective of the cluster.",
            _FIX,
            when="backend == nccl",
            warn=">= 0.95 reference",
            reference=f"all_reduce.{REFERENCE_METRIC}",
        ),
        metric(
            "node_share",
            ">= 0.90 of the best",
            "The bus bandwidth inside this node is lower than inside the fastest node with the same GPUs. No data "
            "leaves a node in this check: the cause is inside the node.",
            _FIX,
            when="backend == nccl",
            speed=True,
            comparison=Comparison(part="one node"),
        ),
        wrong_data_metric("The subject names the node, wrong_data in the evidence rank, offset and flipped bits."),
    ),
    measure=measure,
    per_node=True,
    operation="all_reduce",
    limit_s=300.0,
    options=GroupOptions,
    skip_if=(SkipIf.ONE_NODE, SkipIf.ONE_RANK_PER_NODE),
)
