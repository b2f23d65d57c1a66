"""Expected seconds of operations between nodes over TCP, from the rate of the nodes' interfaces. Pure."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from seatrial.hardware.network_bounds import NodeLinks, network_bound
from seatrial.hardware.network_limits import NetworkLimit, find_limit
from seatrial.model import format_bytes

# A size is timed by at least five operations: three before the timing, one timed and one whose data is checked
# (bench.collectives, time_operation)
OPERATIONS_PER_SIZE = 5
SLOW_FACTOR = 4.0  # a time limit is extended by this multiple of the expected time; see also model.job.REQUEST_FACTOR
# Default sizes that take longer are not timed, except the smallest size whose bandwidth is judged over TCP
# (``min_size`` in data/network_limits.yaml) and smaller ones
MAX_SIZE_S = 60.0


@dataclass(frozen=True)
class TcpNetwork:
    """A TCP network of ``nodes`` nodes with ``gpus`` GPUs each; a node's interfaces carry ``gbps`` Gbit/s each way."""

    nodes: int
    gpus: int
    gbps: float

    def operation_s(self, operation: str, size: int) -> float:
        """Seconds of one operation on buffers of ``size`` bytes, at the bandwidth below which TCP gets a WARN.

        The algorithm is assumed to be Ring, since other algorithms send less data only on few nodes. For an operation
        without a limit, the limit of the all-reduce is assumed. Raises ValueError for an unknown operation.
        """
        bound = network_bound(operation, "Ring", self.nodes, NodeLinks(self.gpus, 1, self.gbps, "TCP"))
        if bound is None:
            raise ValueError(f"no formula for {operation} between nodes")
        busbw = bound.value * _limit(operation, self.nodes).warn_below
        return size * busbw_factor(operation, self.nodes * self.gpus) / (busbw * 1e9)

    def size_s(self, operation: str, size: int) -> float:
        """Seconds to time one size in bytes."""
        return OPERATIONS_PER_SIZE * self.operation_s(operation, size)

    def too_slow_reason(self, operation: str, size: int) -> str:
        seconds = f"about {self.size_s(operation, size):.0f} s on a network of {self.gbps:g} Gb/s"
        return f"{format_bytes(size)} takes {seconds} (limit {MAX_SIZE_S:g} s)"

    def too_slow_sizes(self, operation: str, sizes: Iterable[int]) -> list[int]:
        """The sizes (bytes) that take longer than MAX_SIZE_S and exceed the smallest size that is judged over TCP."""
        smallest = _limit(operation, self.nodes).min_size
        return [size for size in sizes if size > smallest and self.size_s(operation, size) > MAX_SIZE_S]


def limit_with_network(limit_s: float, network: TcpNetwork | None, operation: str, size: int, count: int) -> float:
    """``limit_s``, extended by SLOW_FACTOR times the seconds of ``count`` operations if the network is known."""
    return limit_s + (SLOW_FACTOR * count * network.operation_s(operation, size) if network else 0.0)


def busbw_factor(operation: str, ranks: int) -> float:
    """The bus bandwidth divided by the algorithm bandwidth (nccl-tests, doc/PERFORMANCE.md)."""
    if operation == "all_reduce":
        return 2 * (ranks - 1) / ranks
    return (ranks - 1) / ranks if operation in ("all_gather", "reduce_scatter", "all_to_all") else 1.0


def _limit(operation: str, nodes: int) -> NetworkLimit:
    """The limit of the operation over TCP; for operations without a limit, the limit of the all-reduce."""
    limit = find_limit(operation, "tcp", nodes) or find_limit("all_reduce", "tcp", nodes)
    if limit is None:
        raise ValueError(f"data/network_limits.yaml has no limit for TCP on {nodes} nodes")
    return limit
