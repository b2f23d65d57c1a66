"""All-reduce over several nodes with NCCL_ALGO=Ring, which loads the network ports fully.

On two nodes NCCL's trees send half as much over the network as a ring does. The default all-reduce of nodes with NVLink
switches therefore hardly tests the network (NVIDIA/nccl-tests#196, #309).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from seatrial.checks.check import Context
from seatrial.checks.declare import Answers, absent, fact, metric, value
from seatrial.checks.fabric._nccl_log import logging_environment
from seatrial.checks.fabric._results import bandwidth
from seatrial.checks.fabric._sizes import CollectiveOptions, default_gpu_sizes, omitted_sizes
from seatrial.hardware.network_time import OPERATIONS_PER_SIZE, limit_with_network
from seatrial.model import SeatrialError, format_bytes, parse_bytes, size_label

SIZE = parse_bytes("8GiB")  # the largest default size of the all-reduce
OPERATIONS = OPERATIONS_PER_SIZE + 1  # one more: the first operation, whose algorithm NCCL logs
ENVIRONMENT = {"NCCL_ALGO": "Ring"}
LIMIT_S = 300.0  # time limit of the child processes; limit_with_network adds the transfer time of a slow network
_ALL_RANKS = "all_ranks"  # name of the only group, which contains all ranks


def run_rings(
    context: Context, groups: Mapping[str, Sequence[int]], size: int, seconds: float, limit_s: float
) -> list[dict[str, Any]]:
    """The results by rank, in the format of bench.nccl_settings, for groups of ranks. All ranks call this together.

    ``limit_s``: of the child processes, without the transfer time of a slow network. Raises SeatrialError if one fails.
    """
    from seatrial.bench import child_ranks

    results = child_ranks.run_child_ranks(
        "seatrial.bench.nccl_settings",
        {"groups": {name: [sorted(ranks)] for name, ranks in groups.items()}, "size": size, "seconds": seconds}
        | {"untimed_sizes": []},
        {**logging_environment(context.artifacts_dir, "ring"), **ENVIRONMENT},
        device=context.device,
        local_rank=context.local_rank,
        file_prefix=context.artifacts_dir / "ring",
        limit_s=limit_with_network(limit_s, context.tcp_network, "all_reduce", size, len(groups) * OPERATIONS),
    )
    if failure := child_ranks.first_failure_text(results):
        raise SeatrialError(f"all-reduce with NCCL_ALGO=Ring: {failure}")
    return [result.value for result in results]


_WHEN = "backend == nccl and nodes >= 2"
DECLARED = (
    bandwidth(
        "busbw_ring.*",
        meaning="bus bandwidth of the all-reduce with NCCL_ALGO=Ring",
    ),
    bandwidth(
        f"busbw_ring.{size_label(SIZE)}",
        ">= 0.90 reference",
        "A ring sends its whole bus bandwidth over the network ports, so a port, a path or a PCIe link between GPU and "
        "NIC is slow. On two nodes NCCL's default algorithm may hide this.",
        "collectives.pairs and collectives.rails name the node and the rail. On that node: ibstat (rate of each port), "
        "lspci -vv | grep LnkSta (slot of the NIC), nvidia-smi topo -m. In the NCCL log look for GDRDMA in NET/IB "
        "lines: without it, each byte passes through host memory. In virtual machines check ACS and the IOMMU.",
        when=_WHEN,
        warn=">= 0.95 reference",
        reference=f"all_reduce.busbw_ring.{size_label(SIZE)}",
    ),
    metric(
        "wrong_elements_ring",
        "== 0",
        "Data was corrupted in transfer with NCCL_ALGO=Ring; training uses the same ports and links.",
        "Do not train on these nodes. collectives.pairs names sender and receiver.",
        when=_WHEN,
        unit="count",
    ),
)


def measure(context: Context, options: CollectiveOptions) -> Answers:
    """Yield on rank 0 the bus bandwidth and the wrong elements with NCCL_ALGO=Ring; nothing on one node or on CPUs.

    Raises SeatrialError if a child process fails.
    """
    from seatrial.bench import rank
    from seatrial.discover import nccl_log

    nodes = len(set(rank.gather(context.node)))
    if nodes < 2 or not context.on_gpu:
        return
    context.progress("NCCL_ALGO=Ring")
    network = context.tcp_network
    omitted = omitted_sizes("all_reduce", options, network)
    size = max(size for size in default_gpu_sizes("all_reduce", nodes) if size not in omitted)
    groups = {_ALL_RANKS: range(context.world_size)}
    rank_0_result = run_rings(context, groups, size, options.seconds_per_size, LIMIT_S)[0]
    if context.rank == 0:
        busbw = f"busbw_ring.{size_label(size)}"
        yield value(busbw, rank_0_result["busbw"][_ALL_RANKS][0])
        if network and size != SIZE:
            too_slow = network.too_slow_reason("all_reduce", SIZE)
            yield absent(f"busbw_ring.{size_label(SIZE)}", too_slow, instead=busbw)
        yield value("wrong_elements_ring", rank_0_result["wrong_elements"])
        log = nccl_log.read(Path(rank_0_result["log"]), rank_0_result["log_bytes"])
        choice = log.find_choice("AllReduce", size)
        algorithm = f"NCCL logs {choice.algorithm}" if choice else "NCCL logs no algorithm"
        text = f"all-reduce of {format_bytes(size)} in new processes with NCCL_ALGO=Ring; {algorithm}"
        yield fact("ring", text)
