"""The expected bus bandwidth of a collective between nodes, from the discovered links and the GPU's data. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import chain
from typing import TYPE_CHECKING

from pydantic import JsonValue

from seatrial.config.schema import Fabric
from seatrial.hardware.links import Links, all_known
from seatrial.hardware.network_bounds import (
    SOFT_TOLERANCE,
    LinkKind,
    NetworkBound,
    NodeLinks,
    default_algorithm,
    highest_busbw,
    network_bound,
)
from seatrial.hardware.network_limits import NetworkLimit, find_limit
from seatrial.model import format_bytes, format_value, parse_bytes

if TYPE_CHECKING:
    from seatrial.hardware.references import Sku

# Metric → the algorithm that the check forces; empty: NCCL chooses
_ALGORITHM_BY_METRIC = {"busbw": "", "busbw_ring": "Ring"}
# Sizes at which the all-reduce of one node reaches its full bandwidth (data/skus)
_SATURATING_SIZES = ("1GiB", "4GiB", "8GiB", "16GiB")


@dataclass(frozen=True)
class ModelValue:
    """The bound of a metric, its limits and its largest plausible value; ``name``: network and algorithm."""

    name: str
    bound: NetworkBound
    limit: NetworkLimit
    highest: float

    @property
    def source(self) -> str:
        setting = f"; depends on {self.limit.setting}" if self.limit.setting else ""
        return f"{self.limit.reason}: {self.limit.source}{setting}"


def model_value(
    key: str, facts: Mapping[str, JsonValue], skus: Sequence[Sku], links: Links, tcp: Fabric | None
) -> ModelValue | str:
    """The expected value of ``key`` (such as all_gather.busbw.1GiB) on several nodes, or why there is none.

    Reads the facts ``world_size``, ``nodes`` and ``backend_environment``. With several GPU models it is the lowest of
    their values.
    """
    operation, quantity, size = key_parts(key)
    ranks, nodes = facts.get("world_size"), facts.get("nodes")
    if quantity not in _ALGORITHM_BY_METRIC or type(ranks) is not int or type(nodes) is not int or nodes < 2:
        return "no model of this metric"
    if ranks % nodes:
        return f"{ranks} GPUs on {nodes} nodes: the nodes have different numbers of GPUs"
    fabric = links.network if links.network in ("efa", "tcp", "mnnvl") else "rdma"
    if (limit := find_limit(operation, fabric, nodes)) is None:
        return f"no published share of the network's bound for {operation} on {nodes} nodes"
    if (size_bytes := parse_bytes(size)) < limit.min_size:
        sizes = f"from {format_bytes(limit.min_size)} on, not at {format_bytes(size_bytes)}"
        return f"{operation} on {nodes} nodes has limits {sizes}"
    if links.network == "mnnvl":
        if not (bound := _nvlink_domain_bound(skus)):
            return "no NVLink in the SKU data"
        return ModelValue(f"NVLink between {nodes} nodes", bound, limit, SOFT_TOLERANCE * bound.value)
    network = _network(links, tcp, ranks // nodes)
    if isinstance(network, str):
        return network
    environment = facts.get("backend_environment")
    environment = environment if isinstance(environment, dict) else {}
    if any(sku.across_nodes for sku in skus) and environment.get("NCCL_MNNVL_ENABLE") != "0":
        return "NVLink can connect the nodes of this GPU model: the share of the traffic between nodes is unknown"
    nvls = all(sku.nvls for sku in skus) and environment.get("NCCL_NVLS_ENABLE") != "0"
    forced_or_logged = _ALGORITHM_BY_METRIC[quantity] or links.algorithms.get((operation, size), "")
    algorithm = forced_or_logged or default_algorithm(operation, nodes, nvls=nvls)
    if algorithm.startswith("CollNet"):  # published runs are at half of its bound, but not slower than Ring's
        algorithm = "Ring"
    model_nodes = [node_links(sku, network) for sku in skus] or [network]
    bounds = all_known(network_bound(operation, algorithm, nodes, node) for node in model_nodes)
    if not bounds:
        return f"no formula for {operation} between nodes"
    lowest = min(bounds, key=lambda bound: bound.value)
    if lowest.link is LinkKind.PCIE:
        value = format_value(lowest.value, "GB/s")
        return f"PCIe limits {operation} to {value}; no source states the share of it that good clusters reach"
    is_assumed = not forced_or_logged and operation == "all_reduce"
    assumed = "" if forced_or_logged or algorithm == "point to point" else " (assumed, not in the log)"
    highest = highest_busbw(lowest, operation, nodes, model_nodes[0], assumed=is_assumed)
    return ModelValue(f"{links.fabric}, {algorithm}{assumed} on {nodes} nodes", lowest, limit, highest)


def _nvlink_domain_bound(skus: Sequence[Sku]) -> NetworkBound | None:
    """The rate of a GPU's NVLinks, the lowest of all models: with NVLink between nodes, all GPUs are as on one node."""
    slowest = min((spec.value for spec in all_known(sku.spec.get("nvlink") for sku in skus)), default=None)
    if slowest is None:
        return None
    text = f"{format_value(slowest, 'GB/s')} of NVLink per GPU; binding link: {LinkKind.NVLINK}"
    return NetworkBound(slowest, LinkKind.NVLINK, text)


def key_parts(key: str) -> tuple[str, str, str]:
    """Operation, quantity and size of a key, such as all_reduce, busbw and 8GiB; missing parts are empty."""
    operation, quantity, size = (*key.split(".", 2), "", "")[:3]
    return operation, quantity, size


def node_links(sku: Sku, node: NodeLinks) -> NodeLinks:
    """The links of a node with GPUs of this model; ``node`` has their number and the network ports."""
    nvlink = sku.spec.get("nvlink_nccl") or sku.spec.get("nvlink")
    pcie = sku.spec.get("pcie")
    references = chain.from_iterable(sku.expected.get(f"all_reduce.busbw.{size}", ()) for size in _SATURATING_SIZES)
    node_busbw = (each.value for each in references if (each.gpus, each.nodes) == (node.gpus, 1))
    return replace(
        node,
        nvlink=nvlink.value if nvlink else None,
        pcie=pcie.value if pcie else None,
        busbw=max(node_busbw, default=None),
        nvls=sku.nvls,
    )


def _network(links: Links, tcp: Fabric | None, gpus: int) -> NodeLinks | str:
    """The ports of a node with ``gpus`` GPUs, or why they are unknown."""
    if links.network in ("rdma", "efa"):
        if links.ports is None:
            return "the rate of the RDMA ports is not known on all nodes, or the nodes have different ports"
        return NodeLinks(gpus, links.ports.count, links.ports.gbps, f"RDMA ports ({links.ports.kind})")
    if links.network != "tcp":
        if links.network or links.unknown_network:
            return f"no data of the network {links.unknown_network or links.network} that NCCL uses between nodes"
        return "the network between nodes is unknown: no log of NCCL names it"
    if tcp is None:
        return "sockets between nodes have no reference value; without an RDMA network set cluster.fabric: {kind: tcp}"
    interfaces = ", ".join(links.tcp.names) if links.tcp else "TCP"
    read_gbps = links.tcp.gbps if links.tcp else None
    # The higher rate counts: neither a port that negotiated a lower rate nor the trial lowers the threshold
    if tcp.rate and tcp.rate >= (read_gbps or 0):
        differs = f"; the interface reports {read_gbps:g} Gb/s" if read_gbps not in (None, tcp.rate) else ""
        return NodeLinks(gpus, 1, tcp.rate, f"{interfaces}, rate from cluster.fabric.rate{differs}")
    if read_gbps:
        return NodeLinks(gpus, 1, read_gbps, f"{interfaces}, rate read from the interface")
    return f"the rate of {interfaces} cannot be read, or differs between nodes: set cluster.fabric.rate, e.g. 100 Gb/s"
