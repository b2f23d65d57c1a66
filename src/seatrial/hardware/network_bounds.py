"""The bus bandwidth that the links of several nodes allow: by operation, algorithm and number of nodes. Pure.

The slowest link that the operation uses sets the bound: the network ports of a node, the PCIe links between its
GPUs and its ports, or its NVLinks. The shares of a bound that good clusters reach are in ``network_limits``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from math import inf

from seatrial.hardware.links import network_to_busbw_ratio, nvlink_to_busbw_ratio
from seatrial.model import format_value
from seatrial.util.text import plural

# The share of the PCIe rate that GPUs without NVLink are assumed to reach between each other, through the root
# complexes. If the network is faster than this share, PCIe is the binding link, and no limit is known.
PCIE_SHARE = 1 / 3
# A measured value above this multiple of a bound is a fault of the measurement or of the bound. Hard: the ports of a
# node with the algorithm that sends the least, or the one in NCCL's log. Soft: an algorithm or link that is assumed;
# SHARP reaches 480 GB/s where a ring is bounded by 400.
HARD_TOLERANCE, SOFT_TOLERANCE = 1.03, 1.20


# Measurements in which each GPU sends over its own ports, to the GPU of the same index on other nodes
EACH_GPU = ("pairs", "rails")


class LinkKind(StrEnum):
    """The kind of the binding link, which limits an operation."""

    PORTS = "network ports"
    PCIE = "PCIe of the GPUs"
    NVLINK = "NVLink"


@dataclass(frozen=True)
class NodeLinks:
    """The links of one node. Rates are unidirectional; None: unknown, or no such link.

    The node has ``ports`` network ports of ``port_gbps`` Gbit/s each; ``ports_text`` names them. ``nvlink`` (the rate
    that NCCL's topology search assumes) and ``pcie`` are per GPU in GB/s. ``busbw``: bus bandwidth of an all-reduce
    inside one node, with NVLS if the GPU model has it (``nvls``).
    """

    gpus: int
    ports: int
    port_gbps: float
    ports_text: str
    nvlink: float | None = None
    pcie: float | None = None
    busbw: float | None = None
    nvls: bool = False

    @property
    def port_rate(self) -> float:
        """GB/s of all ports."""
        return self.ports * self.port_gbps / 8


@dataclass(frozen=True)
class NetworkBound:
    """The bound of a bus bandwidth in GB/s, its binding link, and the arithmetic as text."""

    value: float
    link: LinkKind
    arithmetic: str


def default_algorithm(operation: str, nodes: int, *, nvls: bool) -> str:
    """NCCL's usual algorithm at large sizes.

    All-reduce: Tree on two and three nodes (NVLSTree with NVLS), Ring on more. Other collectives use Ring; all-to-all,
    send_receive and what each GPU sends over its own ports are point to point. Source: NVIDIA/nccl-tests#196 and #160,
    answers of the maintainers.
    """
    if operation in ("all_to_all", "send_receive", *EACH_GPU):
        return "point to point"
    if operation != "all_reduce" or nodes > 3:
        return "Ring"
    return "NVLSTree" if nvls else "Tree"


def network_bound(operation: str, algorithm: str, nodes: int, node: NodeLinks) -> NetworkBound | None:
    """The bound of ``operation`` over several nodes; None for an operation without a formula."""
    ranks = nodes * node.gpus
    if operation == "send_receive":
        network = _point_to_point_bound(node)
    elif operation in EACH_GPU:
        if node.ports % node.gpus:
            return None  # GPUs that share a port do not share its rate equally
        value = node.port_rate / node.gpus
        text = f"{_rate_text(node)} ÷ {plural(node.gpus, 'GPU')} = {_gbs(value)}"
        network = NetworkBound(value, LinkKind.PORTS, text)
    elif (ratio := network_to_busbw_ratio(operation, algorithm, ranks, nodes)) is None:
        return None
    else:
        network = _ports_bound(operation, algorithm, ratio, node)
    bounds = [network, *_node_bounds(operation, algorithm, ranks, nodes, node)]
    lowest = min(bounds, key=lambda bound: bound.value)
    return replace(lowest, arithmetic=f"{lowest.arithmetic}; binding link: {lowest.link}")


def highest_busbw(bound: NetworkBound, operation: str, nodes: int, node: NodeLinks, *, assumed: bool) -> float:
    """The largest plausible bus bandwidth in GB/s; ``assumed``: the algorithm of ``bound`` is not in NCCL's log."""
    is_hard = bound.link is LinkKind.PORTS and not assumed
    ratio = network_to_busbw_ratio(operation, "NVLS", nodes * node.gpus, nodes)  # no algorithm sends less
    ports = HARD_TOLERANCE * node.port_rate / min(ratio, 1.0) if ratio and operation == "all_reduce" else inf
    return min(bound.value * (HARD_TOLERANCE if is_hard else SOFT_TOLERANCE), ports)


def _ports_bound(operation: str, algorithm: str, ratio: float, node: NodeLinks) -> NetworkBound:
    if operation == "all_to_all" and not node.nvlink:
        # Without NVLink, blocks for GPUs of the same node may take the ports too (NVIDIA/nccl, transport selection)
        ratio = float(node.gpus)
    value = node.port_rate / ratio
    sent = f"{operation} ({algorithm}) sends {ratio:.4g} × its busbw out of a node"
    text = f"{_rate_text(node)}; {sent}: {_gbs(node.port_rate)} ÷ {ratio:.4g} = {_gbs(value)}"
    return NetworkBound(value, LinkKind.PORTS, text)


def _point_to_point_bound(node: NodeLinks) -> NetworkBound:
    """The bound of send_receive, in which each rank sends to the next rank.

    Only the last GPU of a node sends to another node. It uses its share of the node's ports, but at least one port.
    """
    value = max(node.port_rate / node.gpus, node.port_gbps / 8)
    text = f"{_rate_text(node)}; one of {plural(node.gpus, 'GPU')} sends to the next node: {_gbs(value)} over its ports"
    return NetworkBound(value, LinkKind.PORTS, text)


def _node_bounds(operation: str, algorithm: str, ranks: int, nodes: int, node: NodeLinks) -> list[NetworkBound]:
    """The bounds of the PCIe links between GPUs and ports, and of the links between the GPUs of a node."""
    bounds = [_pcie_bound(operation, algorithm, ranks, nodes, node)] if node.pcie else []
    if node.gpus == 1 or not node.nvlink or operation in ("all_to_all", "send_receive", *EACH_GPU):
        return bounds
    if operation == "all_reduce" and algorithm != "Ring":
        return bounds + _hierarchical_bounds(algorithm, ranks, nodes, node)
    # Data takes g hops per node with g GPUs. One of them is over the network, so that NVLinks carry g−1 of g hops
    value = node.nvlink * node.gpus / (node.gpus - 1)
    text = f"{_gbs(node.nvlink)} of NVLink × {node.gpus} ÷ {node.gpus - 1} = {_gbs(value)}"
    return [*bounds, NetworkBound(value, LinkKind.NVLINK, text)]


def _pcie_bound(operation: str, algorithm: str, ranks: int, nodes: int, node: NodeLinks) -> NetworkBound:
    assert node.pcie
    if operation in ("send_receive", *EACH_GPU) or (operation == "all_to_all" and not node.nvlink):
        return NetworkBound(node.pcie, LinkKind.PCIE, f"a GPU sends over PCIe: {_gbs(node.pcie)}")
    if not node.nvlink and node.gpus > 1:
        value = node.pcie * PCIE_SHARE
        text = f"between GPUs, {PCIE_SHARE:.0%} of the {_gbs(node.pcie)} of PCIe: {_gbs(value)}"
        return NetworkBound(value, LinkKind.PCIE, text)
    ratio = network_to_busbw_ratio(operation, algorithm, ranks, nodes) or 1.0
    value = node.gpus * node.pcie / ratio
    text = f"{node.gpus} × {_gbs(node.pcie)} of PCIe ÷ {ratio:.4g} = {_gbs(value)}"
    return NetworkBound(value, LinkKind.PCIE, text)


def _hierarchical_bounds(algorithm: str, ranks: int, nodes: int, node: NodeLinks) -> list[NetworkBound]:
    """The bound inside a node: the known busbw of an all-reduce on one node, else NVLink for Tree, else none."""
    if node.busbw and not (node.nvls and algorithm == "Tree"):
        return [NetworkBound(node.busbw, LinkKind.NVLINK, f"an all-reduce inside one node reaches {_gbs(node.busbw)}")]
    if not node.nvlink or algorithm != "Tree":
        return []
    ratio = nvlink_to_busbw_ratio("all_reduce", "Tree", ranks, nodes)
    value = node.nvlink / ratio
    text = f"{_gbs(node.nvlink)} of NVLink; a tree sends {ratio:.4g} × the busbw: {_gbs(value)}"
    return [NetworkBound(value, LinkKind.NVLINK, text)]


def _rate_text(node: NodeLinks) -> str:
    return f"{node.ports_text}: {node.ports} × {node.port_gbps:g} Gb/s ÷ 8 = {_gbs(node.port_rate)} out of a node"


def _gbs(value: float) -> str:
    return format_value(value, "GB/s")
