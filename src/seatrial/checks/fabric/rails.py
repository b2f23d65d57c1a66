"""Bandwidth of each rail of the network: GPU i of every node all-reduces with GPU i of all other nodes.

All rails run concurrently. Each group has one GPU per node and its NIC, so that NVLink carries nothing.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from seatrial.checks.base import Check, Context, Needs, RuleFact, SkipIf, facts, metric
from seatrial.checks.declare import Comparison
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import (
    BACKEND,
    BANDWIDTH_BOUNDS,
    GroupOptions,
    group_wrong_data_results,
    transport_text,
    wrong_data_rule,
)
from seatrial.model import (
    CLUSTER,
    Fact,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    Series,
    format_bytes,
    parse_bytes,
)

# GPU_SIZE takes about 10 ms at the 50 GB/s of a 400 Gb/s NIC. CPU_SIZE is for CPU-only runs.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("1MiB")
MIN_COMPARABLE_RAILS = 3  # with two rails, either may be the slow one


def measure(context: Context, options: GroupOptions) -> Iterator[Observation]:
    """Yield on rank 0 the busbw (GB/s) of every rail, and its ratio to the median of the rails.

    Raises NotApplicable on a single node.
    """
    from seatrial.bench import collectives, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    if len(nodes) < 2:
        raise NotApplicable("one node: rails connect several nodes")
    group_facts = collectives.describe_group()
    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    rails = group_by_rail(nodes)
    context.progress(f"{len(rails)} rails concurrently, {format_bytes(size)}")
    results = subgroups.measure_all_reduce(rails, size, context.device, options.seconds)
    group_facts["transports"] = _nccl_log.connections_by_transport(context.device)
    if context.rank != 0:
        return
    too_few = f"no: a comparison needs {MIN_COMPARABLE_RAILS} rails, this trial has {len(rails)}"
    comparable = "yes" if len(rails) >= MIN_COMPARABLE_RAILS else too_few
    yield from facts({**group_facts, "nodes": len(nodes), "size": size, "comparable": comparable})
    busbw_by_rail = [result.busbw(size) for result in results]
    rail_medians = tuple(map(median, busbw_by_rail))
    overall_median = median(rail_medians)
    for number, samples in enumerate(busbw_by_rail):
        yield metric("rail_busbw", samples, "GB/s", f"rail{number}")
        yield metric("rail_share", [busbw / overall_median for busbw in samples], "of the median", f"rail{number}")
    x = tuple(map(float, range(len(rails))))
    yield Series(name="rail_busbw", subject=CLUSTER, x=x, y=rail_medians, x_unit="rail", y_unit="GB/s")
    yield from group_wrong_data_results({f"rail{number}": result for number, result in enumerate(results)})
    yield Fact(
        name="method",
        value=f"{transport_text(group_facts)}: all-reduce of {format_bytes(size)} on {len(rails)} rails concurrently, "
        f"each with one rank on each of {len(nodes)} nodes; median of {len(results[0].timings.windows)} windows; "
        f"busbw = algbw · 2(n−1)/n with n = {len(nodes)}",
    )


def group_by_rail(nodes: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """The ranks of each rail: the first rank of every node, the second rank of every node, and so on.

    Raises ValueError if nodes have different numbers of ranks.
    """
    return [list(rail) for rail in zip(*nodes.values(), strict=True)]


CHECK = Check(
    name="collectives.rails",
    title="Bandwidth of each network rail",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"rail_busbw": "GB/s", "rail_share": "of the median", "wrong_elements": "count"},
    rules=(
        Rule(
            metric="rail_share",
            expect=">= 0.90 of the median",
            applies_if={"backend": "nccl", "comparable": "yes"},
            meaning="The rail is slower than the others. The slowest rail limits every collective of all GPUs.",
            fix="Run collectives.pairs to locate a slow node. If no node is slow, check the switches of this rail, "
            "ports that are down, and uplinks; ibdiagnet checks the whole fabric.",
        ),
        wrong_data_rule(
            "The fact wrong_data names rail, rank, offset and flipped bits; collectives.pairs names sender and "
            "receiver."
        ),
    ),
    rule_facts={**BACKEND, "comparable": RuleFact(reason="too few rails to compare them")},
    measure=measure,
    performance_metrics=("rail_*",),
    bounds=BANDWIDTH_BOUNDS,
    comparisons={"rail_share": Comparison(part="one rail", inter_node=True)},
    required_per={"rail_*": "rail"},
    limit_s=600.0,
    needs=Needs(min_ranks=2),
    options=GroupOptions,
    skip_if=(SkipIf.ONE_NODE,),
)
