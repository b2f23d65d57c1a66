"""Is one rail of the network slower than the others? GPU i of every node sums a buffer with GPU i of all other nodes.

All rails work at once, and NVLink carries nothing: each group has one GPU a node, and so the network card beside it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from statistics import median

from seatrial.checks.base import Check, Comparison, Context, Needs, facts, metric
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._results import (
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

# Some 10 ms at the 50 GB/s of a 400 Gb/s card. On a CPU: a rehearsal.
GPU_SIZE, CPU_SIZE = parse_bytes("256MiB"), parse_bytes("1MiB")
MIN_COMPARABLE_RAILS = 3  # of two rails that differ nobody knows which is right


def measure(context: Context, options: GroupOptions) -> Iterator[Observation]:
    """Yield the figure of every rail on rank 0. Raises NotApplicable on a single node."""
    from seatrial.bench import collectives, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    if len(nodes) < 2:
        raise NotApplicable("one node has no rails: they join the GPUs of several")
    path = collectives.describe_group()
    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    rails = group_by_rail(nodes)
    context.progress(f"{len(rails)} rails at once, {format_bytes(size)}")
    results = subgroups.measure_all_reduce(rails, size, context.device, options.seconds)
    path["transports"] = _nccl_log.connections_by_transport(context.device)
    if context.rank != 0:
        return
    comparable = "yes" if len(rails) >= MIN_COMPARABLE_RAILS else "no"
    yield from facts({**path, "nodes": len(nodes), "size": size, "comparable": comparable})
    rates = [result.busbw(size) for result in results]
    medians = tuple(map(median, rates))
    usual = median(medians)
    for number, samples in enumerate(rates):
        yield metric("rail_busbw", samples, "GB/s", f"rail{number}")
        yield metric("rail_share", [rate / usual for rate in samples], "of the median", f"rail{number}")
    x = tuple(map(float, range(len(rates))))
    yield Series(name="rail_busbw", subject=CLUSTER, x=x, y=medians, x_unit="rail", y_unit="GB/s")
    yield from group_wrong_data_results({f"rail{number}": result for number, result in enumerate(results)})
    yield Fact(
        name="how",
        value=f"{transport_text(path)}: all-reduce of {format_bytes(size)} on {len(results)} rails at once, each of one rank "
        f"on every one of {len(nodes)} nodes; medians of {len(results[0].timings.windows)} windows; busbw = algbw · "
        f"2(n−1)/n with n = {len(nodes)}",
    )


def group_by_rail(nodes: Mapping[str, Sequence[int]]) -> list[list[int]]:
    """The first rank of every node, the second of every node … Raises ValueError for unlike numbers of ranks."""
    return [list(rail) for rail in zip(*nodes.values(), strict=True)]


CHECK = Check(
    name="collectives.rails",
    title="The rails of the network, one GPU a node",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"rail_busbw": "GB/s", "rail_share": "of the median", "wrong_elements": "count"},
    rules=(
        Rule(
            metric="rail_share",
            expect=">= 0.90 of the median",
            applies_if={"backend": "nccl", "comparable": "yes"},
            meaning="this rail is slower than the others: a collective of all GPUs goes at the pace of its slowest rail",
            fix="collectives.pairs says on which node. If on none of them: look at the switches of this rail, at "
            "ports that are down, and at uplinks; ibdiagnet for the whole fabric",
        ),
        wrong_data_rule(
            "The fact wrong_data names rail, rank, offset and flipped bits; collectives.pairs names sender and receiver"
        ),
    ),
    measure=measure,
    performance_metrics=("rail_*",),
    bounds=BANDWIDTH_BOUNDS,
    comparisons={"rail_share": Comparison(part="a rail", inter_node=True)},
    required_per={"rail_*": "rail"},
    limit_s=600.0,
    needs=Needs(min_ranks=2),
    options=GroupOptions,
)
