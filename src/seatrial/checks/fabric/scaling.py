"""Scaling of the all-reduce with the number of nodes: from one node to two, and from two to all.

Inside a node NCCL uses NVLink, between nodes the NICs, so that the bandwidths of one node and of many nodes are not
comparable. Rules evaluate two efficiencies:

- ``link_efficiency``: the bus bandwidth of two nodes, divided by the lower of two bandwidths: the bus bandwidth of one
  node, and the bandwidth of the NICs while each GPU exchanges data with the same GPU of the other node.
- ``ring_efficiency``: the bus bandwidth of a ring of all nodes, divided by that of a ring of the first and last node
  (NCCL_ALGO=Ring). A ring sends the same amount over each NIC for any number of nodes. Other algorithms send less
  between two nodes than between more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from statistics import median
from typing import TYPE_CHECKING

from seatrial.checks.check import Context, SkipIf, facts, ratios
from seatrial.checks.declare import Answers, NoValue, Value, absent, fact, metric, value
from seatrial.checks.fabric import _nccl_log
from seatrial.checks.fabric._forced_ring import run_rings
from seatrial.checks.fabric._results import GroupOptions, bandwidth, group_check, several_nodes, transport_text
from seatrial.checks.fabric._wrong_data import in_groups, in_pairs, wrong_data, wrong_data_metric
from seatrial.hardware import networks
from seatrial.model import (
    CLUSTER,
    SeatrialError,
    Series,
    format_bytes,
    parse_bytes,
)

if TYPE_CHECKING:
    from seatrial.bench.collectives import CollectiveResult

# The buffer on GPUs grows by BYTES_PER_RANK with each rank, between GPU_SIZE and MAX_GPU_SIZE: 1 GiB saturates the
# links of a few nodes; on many nodes, each step of a ring must carry enough. NCCL reached 219 GB/s with 1 GiB and 406
# GB/s with 16 GiB on 1,440 GPUs (coreweave/nccl-tests, README). CPU_SIZE is for CPU-only runs.
GPU_SIZE, MAX_GPU_SIZE, BYTES_PER_RANK = map(parse_bytes, ("1GiB", "16GiB", "16MiB"))
CPU_SIZE = parse_bytes("1MiB")
PAIR_SIZE = parse_bytes("256MiB")  # as in collectives.pairs, but at most ``size``
TWO_NODES, ALL_NODES = "2nodes", "all_nodes"
# Time limit of the child processes, which start in seconds; limit_with_network adds the transfer time of a slow network
RING_LIMIT_S = 120.0
# Published healthy clusters reach 0.90 of the slower link or more. "330 of 365" means an all-reduce of 330 GB/s over a
# slower link of 365 GB/s; 8x400 means 8 ports of 400 Gb/s per node:
#   H100 8x400: 330 of 365 without NVLS (NVIDIA/nccl#1221), 441 to 468 of 400 with NVLS
#   B200 8x400: 690 of 400 (coreweave/nccl-tests#92, dstackai/dstack)
#   A100 8x200: 187 of 200 (Azure/aks-rdma-infiniband)
# Published clusters with faults reach 0.3 to 0.6: H100 8x400 112 to 231 (NVIDIA/nccl#2409), 156
# (NVIDIA/nccl-tests#290). The limit lies between these ranges, with a margin on both sides, as NCCL's choice of
# algorithm changes the share.
MIN_LINK_EFFICIENCY = 0.80
# Usual acceptance tests require this scaling. Published clusters keep 0.97 from two to four nodes (330 and 320 GB/s
# without NVLS, NVIDIA/nccl#1221) and 0.99 from four to eight (325 and 321, NVIDIA/nccl-tests#309). A cluster with a
# fault between racks kept 0.05 (NVIDIA/nccl#1453).
MIN_RING_EFFICIENCY = 0.90


def measure(context: Context, options: GroupOptions) -> Answers:
    """Yield busbw (GB/s) by number of nodes and the efficiencies on rank 0.

    Raises NotApplicable on a single node, and SeatrialError if the child processes with NCCL_ALGO=Ring fail.
    """
    from seatrial.bench import pairs, subgroups

    ranks_by_node = several_nodes(context, "scaling needs at least two")
    node_count, members = len(ranks_by_node), list(ranks_by_node.values())
    size = options.size or (gpu_size(context.world_size) if context.on_gpu else CPU_SIZE)
    results: dict[int, CollectiveResult] = {}  # number of nodes → result
    for count, ranks in ranks_by_node_count(members).items():
        context.progress(_nodes_label(count))
        (results[count],) = subgroups.measure_all_reduce([ranks], size, context.device, options.seconds)
    context.progress("NICs of two nodes")
    pair_size, partners = min(size, PAIR_SIZE), pairs.partner_map([(0, 1)], members)
    pair_timings = pairs.measure_pairs(partners, pair_size, context.device, options.seconds)
    group_facts = _nccl_log.group_facts()
    ring_busbw: dict[str, Sequence[float]] = {}
    if context.on_gpu and node_count > 2:
        context.progress("NCCL_ALGO=Ring")
        ring_busbw = _measure_rings(members, size, context, options.seconds)
    if context.rank == 0:
        yield from facts({**group_facts, "nodes": node_count, "size": size, "node_order": list(ranks_by_node)})
        yield from _by_node_count(results)
        of_first_node = (timing.seconds for timing in pair_timings if timing.rank in members[0])
        rates = ([pair_size / seconds / 1e9 for seconds in windows] for windows in of_first_node)
        network_busbw = [sum(window) for window in zip(*rates, strict=True)]
        yield from _efficiencies(results, network_busbw, ring_busbw, group_facts["transports"])
        if node_count == 2:
            yield absent("ring_efficiency", "there are only 2 nodes")
        groups = {_nodes_label(count): result for count, result in results.items()}
        yield wrong_data([*in_groups(groups), *in_pairs(pair_timings, range(context.world_size))])
        rank_counts = ", ".join(f"{result.timings.rank_count} on {label}" for label, result in groups.items())
        yield fact(
            "method",
            f"{transport_text(group_facts)}: all-reduce of {format_bytes(size)} over the first nodes in rank "
            f"order ({rank_counts}), the other nodes idle; efficiency.BASE = busbw of all nodes / busbw of BASE; "
            f"network_busbw: each GPU of the first node exchanges {format_bytes(pair_size)} with the same GPU of the "
            "second, sum per direction; link_efficiency = busbw.2nodes / the lower of busbw.1node and network_busbw; "
            "ring_efficiency: all nodes / the first and the last node, with NCCL_ALGO=Ring in new processes",
        )


def gpu_size(rank_count: int) -> int:
    """Bytes of each all-reduce of the check in a job with this number of GPUs."""
    return min(max(GPU_SIZE, rank_count * BYTES_PER_RANK), MAX_GPU_SIZE)


def ranks_by_node_count(members: Sequence[Sequence[int]]) -> dict[int, list[int]]:
    """Number of nodes → the ranks of that many first nodes, for powers of two and for all nodes.

    ``members``: the ranks of each node. Groups of a single rank are omitted.
    """
    node_counts = [2**power for power in range(len(members).bit_length()) if 2**power < len(members)]
    node_counts.append(len(members))
    ranks_by_count = {count: sorted(chain.from_iterable(members[:count])) for count in node_counts}
    return {count: ranks for count, ranks in ranks_by_count.items() if len(ranks) > 1}


def _by_node_count(results: Mapping[int, CollectiveResult]) -> Answers:
    """Yield busbw by number of nodes, and the ratios of all nodes' busbw to that of one node and of two nodes."""
    busbw: dict[int, float] = {}  # number of nodes → median GB/s
    for count, result in results.items():
        samples = result.busbw
        busbw[count] = median(samples)
        yield value(f"busbw.{_nodes_label(count)}", samples)
    largest = max(busbw)
    for base in (1, 2):
        if base in busbw and base < largest:
            yield value(f"efficiency.{_nodes_label(base)}", busbw[largest] / busbw[base])
    x, y = tuple(map(float, busbw)), tuple(busbw.values())
    yield Series(name="busbw", subject=CLUSTER, x=x, y=y, x_unit="nodes", y_unit="GB/s")


def _efficiencies(
    results: Mapping[int, CollectiveResult],
    network_busbw: Sequence[float],
    ring_busbw: Mapping[str, Sequence[float]],
    transports: Mapping[str, int],
) -> Iterator[Value | NoValue]:
    """Yield the two efficiencies that rules evaluate, and the bandwidths (GB/s) that they compare.

    CPU threads limit NCCL's sockets. Collectives use another number of threads than sends and receives, so that the
    bandwidths of both cannot be compared.

    The samples of an efficiency are the ratios of the windows, so that its interval has the noise of both bandwidths.
    """
    yield value("network_busbw", network_busbw)
    if networks.slowest(transports)[0] == "tcp":
        yield absent("link_efficiency", "NCCL uses sockets between nodes, which its threads limit")
    else:
        bases = [network_busbw, *([results[1].busbw] if 1 in results else [])]
        yield _efficiency("link_efficiency", results[2].busbw, min(bases, key=median))
    for name, samples in ring_busbw.items():
        yield value(f"ring_busbw.{name}", samples)
    if ring_busbw:
        yield _efficiency("ring_efficiency", ring_busbw[ALL_NODES], ring_busbw[TWO_NODES])


def _efficiency(name: str, samples: Sequence[float], base: Sequence[float]) -> Value:
    return value(name, median(samples) / median(base))._replace(samples=ratios(samples, base))


def _measure_rings(
    members: Sequence[Sequence[int]], size: int, context: Context, seconds: float
) -> dict[str, Sequence[float]]:
    """Return busbw (GB/s) of every window with NCCL_ALGO=Ring, by group: TWO_NODES (first and last node), ALL_NODES.

    All ranks call this together and return the result of rank 0. Raises SeatrialError if a child process fails or
    receives wrong data.
    """
    groups = {TWO_NODES: [*members[0], *members[-1]], ALL_NODES: list(chain.from_iterable(members))}
    results = run_rings(context, groups, size, seconds, RING_LIMIT_S)
    # Each child reports the sum over all ranks of its groups
    if wrong_elements := max(result["wrong_elements"] for result in results):
        raise SeatrialError(f"NCCL_ALGO=Ring: {wrong_elements} wrong elements; collectives.all_reduce locates them")
    return {name: results[0]["busbw"][name][0] for name in groups}


def _nodes_label(count: int) -> str:
    return "1node" if count == 1 else f"{count}nodes"


CHECK = group_check(
    name="collectives.scaling",
    title="All-reduce scaling with the number of nodes",
    declared=(
        metric(
            "link_efficiency",
            f"> {MIN_LINK_EFFICIENCY} of the base",
            "busbw of two nodes ÷ the lower of busbw of one node and network_busbw: the all-reduce of two nodes is "
            "much slower than the all-reduce of one node, and than the transfers of their NICs.",
            "Compare busbw.1node, busbw.2nodes and network_busbw. Unset NCCL_* variables and run with NCCL_DEBUG=INFO: "
            "each GPU should use the NIC next to it (nvidia-smi topo -m) with GDRDMA. collectives.nccl_settings shows "
            "whether another algorithm is faster.",
            when="backend == nccl",
            speed=True,
        ),
        metric(
            "ring_efficiency",
            f"> {MIN_RING_EFFICIENCY} of the base",
            "busbw of all nodes ÷ busbw of the first and the last node, both with NCCL_ALGO=Ring: the larger ring is "
            "slower, although both send the same over each NIC. A node or a path between other nodes is slow, or the "
            "fabric is congested.",
            "Run collectives.pairs to locate a slow node or path, collectives.rails for a slow rail. If both are good, "
            "check congestion: adaptive routing, PFC and ECN counters of the switches, oversubscribed uplinks.",
            when="backend == nccl",
            speed=True,
        ),
        bandwidth("busbw.*", meaning="bus bandwidth by number of nodes"),
        metric("efficiency.*", unit="of the base", meaning="busbw of all nodes ÷ busbw of fewer nodes", speed=True),
        bandwidth(
            "network_busbw",
            meaning="GB/s per direction while all GPUs of a node exchange data with the same GPUs of the next node",
        ),
        bandwidth(
            "ring_busbw.*",
            meaning="bus bandwidth with NCCL_ALGO=Ring by number of nodes",
        ),
        wrong_data_metric(
            "wrong_data in the evidence has the number of nodes, rank, offset and flipped bits; collectives.pairs "
            "names sender and receiver."
        ),
    ),
    measure=measure,
    options=GroupOptions,
    skip_if=(SkipIf.ONE_NODE,),
)
