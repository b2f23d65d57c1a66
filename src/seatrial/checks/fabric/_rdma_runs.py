"""The options of fabric.rdma, and its runs of perftest between two nodes' ports, by the ranks nearest to the ports."""

from __future__ import annotations

import os
import shutil
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain, product, takewhile
from math import ceil
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.check import Context, Options, Seconds
from seatrial.checks.fabric._compute_ports import NodePorts
from seatrial.checks.fabric._rdma_results import RailPath
from seatrial.discover.file_readers import parse_id_list, read_line

if TYPE_CHECKING:
    from seatrial.discover.rdma_ports import PortDetails

SECONDS = 0.5  # duration of a bandwidth test at the port's rate
WRITE_BYTES, QUEUE_PAIRS = 2**20, 4  # of a bandwidth test
# Iterations of each queue pair in a bandwidth test. Above the maximum, perftest does not report the peak bandwidth.
MIN_ITERATIONS, MAX_ITERATIONS = 100, 20_000
LATENCY_ITERATIONS = 1000  # perftest's default


class RdmaOptions(Options):
    """Options of fabric.rdma.

    ``rounds``: number of rounds; by default as many as cover all pairs on up to 4 nodes, and 3 on more nodes.
    ``transfer_limit_s``: time limit of one run of perftest.
    ``gpu_memory``: transfer from and to GPU memory if possible.
    """

    rounds: int | None = Field(default=None, ge=1)
    transfer_limit_s: Seconds = 20.0
    gpu_memory: bool = True


@dataclass(frozen=True)
class RankPlace:
    """Where a rank runs: node, CUDA index and PCI path of its GPU, and the number of CPUs that it may use.

    Without a GPU the index is None and the path is ().
    """

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


@dataclass(frozen=True)
class TransferRunner:
    """Runs the transfers of a round on the ranks nearest to the ports.

    ``ports``: node → its port on each rail, None if the port cannot be used. ``places``: by rank. ``cuda_options``:
    options of ib_write_bw for GPU memory; empty for host memory. The first option gets the CUDA index of the GPU as its
    value.
    """

    context: Context
    options: RdmaOptions
    nodes: Mapping[str, NodePorts]
    ports: Mapping[str, Sequence[PortDetails | None]]
    places: Sequence[RankPlace]
    cuda_options: Sequence[str]

    @cached_property
    def _ranks(self) -> dict[str, list[int]]:
        """Node → the rank of each rail."""
        return {node: ranks_of_ports(ports, node, self.places) for node, ports in self.ports.items()}

    @cached_property
    def _batch_count(self) -> int:
        """The number of batches of the rails of a node, which run one after another.

        A process of perftest polls and so needs a CPU of its own: in a batch, no rank has more rails than CPUs.
        """
        rails_by_rank = Counter(chain.from_iterable(self._ranks.values()))
        return max(ceil(rails / self.places[rank].cpu_count) for rank, rails in rails_by_rank.items())

    def run_round(self, paired: Sequence[tuple[str, str]]) -> list[RailPath]:
        """The bandwidths in both directions and the latency of all rails of all pairs of nodes."""
        from seatrial.discover.perftest import BANDWIDTH_TOOL, LATENCY_TOOL

        reversed_pairs = [(b, a) for a, b in paired]
        runs = (BANDWIDTH_TOOL, paired), (BANDWIDTH_TOOL, reversed_pairs), (LATENCY_TOOL, paired)
        paths: list[RailPath] = []
        for batch, (tool, directed_pairs) in product(range(self._batch_count), runs):
            planned = []
            for source, target in directed_pairs:
                ports = enumerate(zip(self.ports[source], self.ports[target], strict=False))
                planned += [
                    RailPath(tool, source, target, rail, source_port, target_port)
                    for rail, (source_port, target_port) in ports
                    if source_port and target_port and rail % self._batch_count == batch
                ]
            paths += self._run(planned)
        return paths

    def _run(self, planned: Sequence[RailPath]) -> list[RailPath]:
        """Run the planned transfers concurrently, and return them with their values or errors."""
        from seatrial.bench.perftest import Transfer, run_transfers

        context = self.context
        transfers: list[Transfer] = []
        argv_by_path: dict[str, list[str]] = {}  # of the paths on which this rank is the server or the client
        for path in planned:
            server, client = self._ranks[path.target][path.rail], self._ranks[path.source][path.rail]
            transfers.append(Transfer(path.key, server, client))
            if context.rank in (server, client):
                argv_by_path[path.key] = self._argv(path, path.target if context.rank == server else path.source)
        results = run_transfers(transfers, argv_by_path, context.node, self.options.transfer_limit_s)
        return [path.with_result(results[path.key]) for path in planned]

    def _argv(self, path: RailPath, node: str) -> list[str]:
        """The command of the server or the client on ``node``, without the server's TCP port and address."""
        from seatrial.discover import perftest

        port = path.source_port if node == path.source else path.target_port
        command = [*_cpu_binding(self.context, port), path.tool, "-d", port.device, "-i", port.port, "-F"]
        gid = port.roce_gid(self.nodes[node].gid_index) if port.link_layer == "Ethernet" else None
        command += ["-x", str(gid.index)] if gid else []
        if path.tool == perftest.LATENCY_TOOL:
            return [*command, "-n", str(LATENCY_ITERATIONS)]
        iterations = int(SECONDS * path.rate_gbps * 1e9 / 8 / WRITE_BYTES / QUEUE_PAIRS)
        command += ["-s", str(WRITE_BYTES), "-q", str(QUEUE_PAIRS), "--report_gbits"]
        command += ["-n", str(min(max(iterations, MIN_ITERATIONS), MAX_ITERATIONS))]
        if self.cuda_options:
            use_cuda, *more_options = self.cuda_options
            gpu_index = self.places[self._ranks[node][path.rail]].gpu_index
            command += [f"{use_cuda}={gpu_index}", *more_options]
        return command


def ranks_of_ports(ports: Sequence[PortDetails | None], node: str, places: Sequence[RankPlace]) -> list[int]:
    """The rank that runs perftest on each port: the rank of ``node`` whose GPU is nearest by PCI path.

    Of several equally near ranks, the rank with the fewest ports.
    """
    ranks = [rank for rank, place in enumerate(places) if place.node == node]
    chosen: list[int] = []
    for port in ports:
        port_path = port.pci_path if port else ()
        shared = {rank: _shared_bridges(port_path, places[rank].pci_path) for rank in ranks}
        chosen.append(min(ranks, key=lambda rank: (-shared[rank], chosen.count(rank), rank)))
    return chosen


def _shared_bridges(path_a: Sequence[str], path_b: Sequence[str]) -> int:
    """The number of PCI bridges from the root that two devices have in common."""
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(path_a, path_b, strict=False)))


def _cpu_binding(context: Context, port: PortDetails) -> list[str]:
    """The prefix that binds a command to the CPUs of the port's NUMA node; empty if impossible or unnecessary."""
    allowed = os.sched_getaffinity(0)
    path = context.root / f"sys/devices/system/node/node{port.numa_node}/cpulist"
    if port.numa_node is None or not path.exists() or not shutil.which("taskset"):
        return []
    near = allowed.intersection(parse_id_list(read_line(path)))
    return ["taskset", "-c", ",".join(map(str, sorted(near)))] if near and near != allowed else []
