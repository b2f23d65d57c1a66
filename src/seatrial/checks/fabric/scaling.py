"""What is left of the bandwidth as nodes are added: the same all-reduce on one node, on two, on four … on all of them.

A figure of two nodes says little of many: NCCL's trees carry less over the network there than its rings do, so both one
and two nodes stand beside each efficiency as what it is measured by.
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

# At 1 GiB the links are saturated. On a CPU: a rehearsal.
GPU_SIZE, CPU_SIZE = parse_bytes("1GiB"), parse_bytes("1MiB")


def measure(context: Context, options: GroupOptions) -> Iterator[Observation]:
    """Yield busbw by number of nodes on rank 0. Raises NotApplicable on a single node."""
    from seatrial.bench import collectives, subgroups

    nodes = subgroups.ranks_by_node(context.node)
    if len(nodes) < 2:
        raise NotApplicable("one node does not scale: it is what more nodes are compared with")
    path = collectives.describe_group()
    size = options.size or (GPU_SIZE if context.on_gpu else CPU_SIZE)
    results: dict[int, GroupResult] = {}
    for count, ranks in ranks_by_node_count(list(nodes.values())).items():
        context.progress(_nodes(count))
        (results[count],) = subgroups.measure_all_reduce([ranks], size, context.device, options.seconds)
    path["transports"] = _nccl_log.connections_by_transport(context.device)
    if context.rank == 0:
        yield from facts({**path, "nodes": len(nodes), "size": size, "order": list(nodes)})
        yield from _figures(results, size)
        shape = ", ".join(f"{len(result.ranks)} on {_nodes(count)}" for count, result in results.items())
        yield Fact(
            name="how",
            value=f"{transport_text(path)}: all-reduce of {format_bytes(size)} over the first nodes in the order of ranks "
            f"({shape}), the others looking on; efficiency.BASE is the busbw of all nodes over that of BASE",
        )


def ranks_by_node_count(members: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Number of nodes → the ranks of the first so many: the powers of two, and all. A single rank reduces nothing."""
    counts = {2**power for power in range(len(members).bit_length()) if 2**power < len(members)} | {len(members)}
    found = {count: sorted(chain.from_iterable(members[:count])) for count in sorted(counts)}
    return {count: ranks for count, ranks in found.items() if len(ranks) > 1}


def _figures(results: Mapping[int, GroupResult], size: int) -> Iterator[Observation]:
    rates = {count: result.busbw(size) for count, result in results.items()}
    busbw = {count: median(samples) for count, samples in rates.items()}
    for count, samples in rates.items():
        yield metric(f"busbw.{_nodes(count)}", samples, "GB/s")
    most = max(rates)
    bases = [base for base in (1, 2) if base in rates]
    for base in (base for base in bases if base < most):
        yield metric(f"efficiency.{_nodes(base)}", busbw[most] / busbw[base], "of the base")
    x, y = tuple(map(float, busbw)), tuple(busbw.values())
    yield Series(name="busbw", subject=CLUSTER, x=x, y=y, x_unit="nodes", y_unit="GB/s")
    shares = {
        _nodes(count): {f"of {_nodes(base)}": round(one / busbw[base], 4) for base in bases if base <= count}
        for count, one in busbw.items()
    }
    yield Fact(name="efficiency", value=shares)
    yield from group_wrong_data_results({_nodes(count): result for count, result in results.items()})


def _nodes(count: int) -> str:
    return "1node" if count == 1 else f"{count}nodes"


CHECK = Check(
    name="collectives.scaling",
    title="All-reduce from one node to all",
    phase=Phase.INTERCONNECT,
    scope=Scope.CLUSTER,
    metrics={"busbw.*": "GB/s", "efficiency.*": "of the base", "wrong_elements": "count"},
    rules=(
        wrong_data_rule(
            "The fact wrong_data says with how many nodes, and names rank, offset and flipped bits; collectives.pairs "
            "names sender and receiver"
        ),
    ),
    measure=measure,
    performance_metrics=("busbw.*", "efficiency.*"),
    bounds=BANDWIDTH_BOUNDS,
    limit_s=600.0,
    needs=Needs(min_ranks=2),
    options=GroupOptions,
)
