"""Bandwidth of each rail of the network: GPU i of every node all-reduces with GPU i of all other nodes.

All rails run concurrently. Each group has one GPU per node and its NIC, so that NVLink carries nothing.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import median

from seatrial.checks.cause import Cause
from seatrial.checks.check import Context, SkipIf, facts
from seatrial.checks.declare import Answers, Comparison, absent, fact, metric, value
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import GroupOptions, bandwidth, group_check, several_nodes, transport_text
from seatrial.checks.fabric._wrong_data import in_groups, wrong_data, wrong_data_metric
from seatrial.model import CLUSTER, Series, format_bytes, parse_bytes

# GPU_SIZE takes about 10 ms at the 50 GB/s of a 400 Gb/s NIC. CPU_SIZE is for CPU-only runs.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("1MiB")
MIN_COMPARABLE_RAILS = 3  # with two rails, either may be the slow one


def measure(context: Context, options: GroupOptions) -> Answers:
    """Yield on rank 0 the busbw (GB/s) of every rail, and its ratio to the median of the rails."""
    from seatrial.bench import subgroups

    nodes = several_nodes(context, "rails connect several nodes")
    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    rails = group_by_rail(nodes)
    context.progress(f"{len(rails)} rails concurrently, {format_bytes(size)}")
    results = subgroups.measure_all_reduce(rails, size, context.device, options.seconds)
    group_facts = _nccl_log.group_facts()
    if context.rank != 0:
        return
    yield from facts({**group_facts, "nodes": len(nodes), "size": size})
    comparable = len(rails) >= MIN_COMPARABLE_RAILS
    if not comparable:
        yield absent("rail_share", f"a comparison needs {MIN_COMPARABLE_RAILS} rails, this trial has {len(rails)}")
    busbw_by_rail = [result.busbw for result in results]
    rail_medians = tuple(map(median, busbw_by_rail))
    overall_median = median(rail_medians)
    for number, samples in enumerate(busbw_by_rail):
        yield value("rail_busbw", samples, f"rail{number}")
        if comparable:
            yield value("rail_share", [busbw / overall_median for busbw in samples], f"rail{number}")
    x = tuple(map(float, range(len(rails))))
    yield Series(name="rail_busbw", subject=CLUSTER, x=x, y=rail_medians, x_unit="rail", y_unit="GB/s")
    yield wrong_data(in_groups({f"rail{number}": result for number, result in enumerate(results)}))
    yield fact(
        "method",
        f"{transport_text(group_facts)}: all-reduce of {format_bytes(size)} on {len(rails)} rails concurrently, "
        f"each with one rank on each of {len(nodes)} nodes; median of {len(results[0].timings.windows)} windows; "
        f"busbw = algbw · 2(n−1)/n with n = {len(nodes)}",
    )


def group_by_rail(nodes: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """The ranks of each rail: the first rank of every node, the second rank of every node, and so on.

    Raises ValueError if nodes have different numbers of ranks.
    """
    return [list(rail) for rail in zip(*nodes.values(), strict=True)]


_FIX = (
    "Run collectives.pairs to locate a slow node. If no node is slow, compare the ports and cables of the rail's NICs "
    "on all nodes, then check its switches for ports and uplinks that are down; ibdiagnet checks the whole fabric."
)
CHECK = group_check(
    name="collectives.rails",
    title="Bandwidth of each network rail",
    declared=(
        bandwidth(
            "rail_busbw",
            ">= 0.90 reference",
            "The bus bandwidth of all-reduce over this rail (one GPU per node) is far below the rate of its ports.",
            _FIX,
            warn=">= 0.95 reference",
            when="backend == nccl and size is the default",
            reference="rails.busbw.256MiB",
            reference_optional=True,
            per="rail",
        ),
        metric(
            "rail_share",
            ">= 0.90 of the median",
            "The rail is slower than the median of all rails. The slowest rail limits every collective of all GPUs.",
            _FIX,
            when="backend == nccl",
            per="rail",
            speed=True,
            comparison=Comparison(part="one rail", inter_node=True),
            cause=Cause(
                id="rail",
                title="one network rail is slow",
                place="cluster",
                explains=("collectives.*", "train.*"),
                first_command="ibstat; ibqueryerrors",
                action="check-cable",
            ),
        ),
        wrong_data_metric(
            "The evidence names rail, rank, offset and flipped bits; collectives.pairs names sender and receiver."
        ),
    ),
    measure=measure,
    options=GroupOptions,
    skip_if=(SkipIf.ONE_NODE,),
)
