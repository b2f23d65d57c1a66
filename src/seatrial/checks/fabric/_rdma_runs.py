"""Runs perftest between the compute ports of two nodes, on the ranks nearest to the ports."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import takewhile
from math import ceil
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Context, Options
from seatrial.checks.fabric._compute_ports import NodePorts
from seatrial.checks.fabric._rdma_results import RailPath
from seatrial.discover.file_readers import parse_id_list, read_line
from seatrial.model import ByteSize, parse_bytes

if TYPE_CHECKING:
    from seatrial.discover.rdma_ports import PortDetails

SECONDS = 0.5  # duration of a bandwidth test at the port's rate
MAX_ITERATIONS = 20_000  # with more iterations perftest does not report the peak
LATENCY_ITERATIONS = 1000  # perftest's default


class RdmaOptions(Options):
    """Options of fabric.rdma.

    ``rounds``: number of rounds; by default all with up to 4 nodes, else 3. ``size``: bytes per RDMA write. ``qps``:
    number of queue pairs. ``transfer_limit_s``: time limit of one run of perftest. ``gpu_memory``: transfer from and to
    GPU memory if possible.
    """

    rounds: int | None = Field(default=None, ge=1)
    size: ByteSize = Field(default=parse_bytes("1MiB"), ge=2)
    qps: int = Field(default=4, ge=1, le=64)
    transfer_limit_s: float = Field(default=20.0, gt=0, allow_inf_nan=False)
    gpu_memory: bool = True


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs: node, CUDA index and PCI path of its GPU, and the number of CPUs it may use."""

    node: str
    gpu_index: int | None
    pci_path: tuple[str, ...]
    cpu_count: int


def rank_place(context: Context) -> RankPlace:
    from seatrial.bench import rank
    from seatrial.discover import rdma_ports

    address = rank.gpu_pci_address(context.device)
    path = rdma_ports.pci_path(context.root / "sys/bus/pci/devices" / address) if address else ()
    index = int(context.device.partition(":")[2]) if context.on_gpu else None
    return RankPlace(context.node, index, path, len(os.sched_getaffinity(0)))


class TransferRunner:
    """Runs the transfers of a round on the ranks nearest to the ports.

    ``ports``: node → its port on each rail, None if the port cannot be used. ``cuda_options``: options of ib_write_bw
    for GPU memory; empty for host memory. The first option gets the CUDA index of the GPU as its value.
    """

    def __init__(
        self,
        context: Context,
        options: RdmaOptions,
        nodes: Mapping[str, NodePorts],
        ports: Mapping[str, Sequence[PortDetails | None]],
        places: Sequence[RankPlace],
        cuda_options: Sequence[str],
    ) -> None:
        self._context, self._options, self._nodes, self._ports = context, options, nodes, ports
        self._places, self._cuda_options = places, cuda_options
        self._ranks = {node: ranks_of_ports(node_ports, node, places) for node, node_ports in ports.items()}
        # The rails of a node are split into batches that run one after another: perftest polls, so that each concurrent
        # rail of a rank needs a CPU
        self._batches = max(
            ceil(ranks.count(rank) / places[rank].cpu_count) for ranks in self._ranks.values() for rank in {*ranks}
        )

    def run_round(self, paired: Sequence[tuple[str, str]]) -> list[RailPath]:
        """The bandwidths in both directions and the latency of all rails of all pairs."""
        from seatrial.discover import perftest

        paths: list[RailPath] = []
        for batch in range(self._batches):
            for tool, is_reversed in (
                (perftest.BANDWIDTH_TOOL, False),
                (perftest.BANDWIDTH_TOOL, True),
                (perftest.LATENCY_TOOL, False),
            ):
                ends = [(b, a) if is_reversed else (a, b) for a, b in paired]
                planned = [
                    RailPath(tool, source, target, rail, source_port, target_port)
                    for source, target in ends
                    for rail, (source_port, target_port) in enumerate(
                        zip(self._ports[source], self._ports[target], strict=False)
                    )
                    if source_port and target_port and rail % self._batches == batch
                ]
                paths += self._run(planned)
        return paths

    def _run(self, planned: Sequence[RailPath]) -> list[RailPath]:
        """Run the planned transfers concurrently, and return them with their values or errors."""
        from seatrial.bench.perftest import Transfer, run_transfers

        context = self._context
        transfers = [
            Transfer(path.key, self._ranks[path.target][path.rail], self._ranks[path.source][path.rail])
            for path in planned
        ]
        argv = {
            path.key: self._argv(path, path.target if transfer.server == context.rank else path.source)
            for path, transfer in zip(planned, transfers, strict=True)
            if context.rank in (transfer.server, transfer.client)
        }
        results = run_transfers(transfers, argv, context.node, self._options.transfer_limit_s)
        return [path.with_result(results[path.key]) for path in planned]

    def _argv(self, path: RailPath, node: str) -> list[str]:
        """The command of the side of a transfer that runs on ``node``, without the server's TCP port and address."""
        from seatrial.discover import perftest

        port = path.source_port if node == path.source else path.target_port
        command = [*_cpu_binding(self._context, port), path.tool, "-d", port.device, "-i", port.port, "-F"]
        gid = port.roce_gid(self._nodes[node].gid_index) if port.link_layer == "Ethernet" else None
        command += ["-x", str(gid.index)] if gid else []
        if path.tool == perftest.LATENCY_TOOL:
            return [*command, "-n", str(LATENCY_ITERATIONS)]
        options, rate = self._options, path.rate_gbps
        iterations = int(SECONDS * rate * 1e9 / 8 / options.size / options.qps)
        command += ["-s", str(options.size), "-q", str(options.qps), "--report_gbits"]
        command += ["-n", str(min(max(iterations, 100), MAX_ITERATIONS))]
        if self._cuda_options:
            use_cuda, *others = self._cuda_options
            gpu = self._places[self._ranks[node][path.rail]].gpu_index
            command += [f"{use_cuda}={gpu}", *others]
        return command


def ranks_of_ports(ports: Sequence[PortDetails | None], node: str, places: Sequence[RankPlace]) -> list[int]:
    """The rank that runs perftest on each port: the rank whose GPU is nearest by PCI path.

    Of several such ranks, the rank with the fewest ports.
    """
    ranks = [rank for rank, place in enumerate(places) if place.node == node]
    chosen: list[int] = []
    for port in ports:
        path = port.pci_path if port else ()
        shared = {rank: _shared_length(path, places[rank].pci_path) for rank in ranks}
        chosen.append(min(ranks, key=lambda rank: (-shared[rank], chosen.count(rank), rank)))
    return chosen


def _shared_length(path: Sequence[str], other: Sequence[str]) -> int:
    """The number of PCI bridges from the root that two devices have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path, other, strict=False)))


def _cpu_binding(context: Context, port: PortDetails) -> list[str]:
    """The prefix that binds a command to the CPUs of the port's NUMA node; empty if that is not possible or needed."""
    allowed = os.sched_getaffinity(0)
    path = context.root / f"sys/devices/system/node/node{port.numa_node}/cpulist"
    if port.numa_node is None or not path.exists() or not shutil.which("taskset"):
        return []
    near = allowed.intersection(parse_id_list(read_line(path)))
    return ["taskset", "-c", ",".join(map(str, sorted(near)))] if near and near != allowed else []
