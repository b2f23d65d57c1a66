"""Scaling of the all-reduce bandwidth with the number of nodes: 1, 2, 4 and so on, up to all nodes.

The efficiency is given relative to one node and to two nodes. With two nodes NCCL's trees carry less over the network
than its rings do, so that two nodes do not predict many.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.base import Check, Context, Needs, facts, metric
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
    Scope,
    Series,
    format_bytes,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.subgroups import GroupResult

# 1 GiB saturates the links. CPU_SIZE is for CPU-only runs.
GPU_SIZE, CPU_SIZE = parse_bytes("1GiB"), parse_bytes("1MiB")


def measure(context: Context, options: GroupOptions) -> Iterator[Observation]:
    """Yield busbw (GB/s) by number of nodes on rank 0. Raises NotApplicable on a single node."""
    from seatrial.bench import collectives, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    if len(nodes) < 2:
        raise NotApplicable("one node: scaling needs at least two")
    group = collectives.describe_group()
    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    results: dict[int, GroupResult] = {}
    for count, ranks in ranks_by_node_count(list(nodes.values())).items():
        context.progress(_nodes_label(count))
        (results[count],) = subgroups.measure_all_reduce([ranks], size, context.device, options.seconds)
    group["transports"] = _nccl_log.connections_by_transport(context.device)
    if context.rank == 0:
        yield from facts({**group, "nodes": len(nodes), "size": size, "node_order": list(nodes)})
        yield from _observations(results, size)
        shape = ", ".join(f"{len(result.ranks)} on {_nodes_label(count)}" for count, result in results.items())
        yield Fact(
            name="method",
            value=f"{transport_text(group)}: all-reduce of {format_bytes(size)} over the first nodes in rank order "
            f"({shape}), the other nodes idle; efficiency.BASE = busbw of all nodes / busbw of BASE",
        )


def ranks_by_node_count(members: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Number of nodes (powers of two, and all) → the ranks of the first nodes; without counts that give one rank."""
    counts = {2**power for power in range(len(members).bit_length()) if 2**power < len(members)} | {len(members)}
    ranks_by_count = {count: sorted(chain.from_iterable(members[:count])) for count in sorted(counts)}
    return {count: ranks for count, ranks in ranks_by_count.items() if len(ranks) > 1}


def _observations(results: Mapping[int, GroupResult], size: int) -> Iterator[Observation]:
    """Yield busbw by number of nodes, the efficiency of all nodes relative to one and two nodes, and wrong data."""
    rates = {count: result.busbw(size) for count, result in results.items()}
    busbw = {count: median(samples) for count, samples in rates.items()}
    for count, samples in rates.items():
        yield metric(f"busbw.{_nodes_label(count)}", samples, "GB/s")
    largest = max(rates)
    bases = [base for base in (1, 2) if base in rates]
    for base in (base for base in bases if base < largest):
        yield metric(f"efficiency.{_nodes_label(base)}", busbw[largest] / busbw[base], "of the base")
    x, y = tuple(map(float, busbw)), tuple(busbw.values())
    yield Series(name="busbw", subject=CLUSTER, x=x, y=y, x_unit="nodes", y_unit="GB/s")
    efficiency = {
        _nodes_label(count): {
            f"of {_nodes_label(base)}": round(rate / busbw[base], 4) for base in bases if base <= count
        }
        for count, rate in busbw.items()
    }
    yield Fact(name="efficiency", value=efficiency)
    yield from group_wrong_data_results({_nodes_label(count): result for count, result in results.items()})


def _nodes_label(count: int) -> str:
    return "1node" if count == 1 else f"{count}nodes"


CHECK = Check(
    name="collectives.scaling",
    title="All-reduce scaling with the number of nodes",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"busbw.*": "GB/s", "efficiency.*": "of the base", "wrong_elements": "count"},
    rules=(
        wrong_data_rule(
            "The fact wrong_data names the number of nodes, rank, offset and flipped bits; collectives.pairs names "
            "sender and receiver."
        ),
    ),
    measure=measure,
    performance_metrics=("busbw.*", "efficiency.*"),
    bounds=BANDWIDTH_BOUNDS,
    limit_s=600.0,
    needs=Needs(min_ranks=2),
    options=GroupOptions,
    skipped_if=("one node",),
)
