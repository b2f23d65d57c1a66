"""Selects the compute ports of the nodes: the ports that NCCL should use, without those for storage and management.

1. With NCCL_NET=Socket, or NCCL_IB_DISABLE other than 0, a node has no compute ports.
2. If NCCL_IB_HCA lists ports, these are the compute ports.
3. Otherwise the compute ports of a node are its ports of one kind (NIC model, board, link layer). Of the node's kinds,
   this is the one whose ports have the highest total rate on any single node. Two groups of ports are excluded: ports
   whose interface has the default route (management), unless the node has no others but unused ports of the same NIC,
   and ports that are neither ACTIVE nor required to be (see _unused_ports).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.model import NotApplicable, SeatrialError
from seatrial.util import data_files
from seatrial.util.grouping import grouped

if TYPE_CHECKING:
    from seatrial.discover.rdma_ports import PortDetails

Kind = tuple[str, str, str]  # PortDetails.kind: NIC model, board, link layer


@dataclass(frozen=True)
class NodePorts:
    """The RDMA ports of one node, and NCCL's settings there; empty or None for a setting that is not set.

    ``gid_index``: NCCL_IB_GID_INDEX; a negative value counts as not set. ``rdma_off``: the setting that keeps NCCL from
    using RDMA, as NAME=VALUE.
    """

    ports: tuple[PortDetails, ...]
    nccl_ib_hca: str = ""
    gid_index: int | None = None
    rdma_off: str = ""


@dataclass(frozen=True)
class ComputePorts:
    """``by_node``: node → its compute ports, sorted. ``others``: NODE/PORT → why this port is not a compute port.

    Iteration yields (node, compute port).
    """

    by_node: Mapping[str, tuple[PortDetails, ...]]
    others: Mapping[str, str]

    def __iter__(self) -> Iterator[tuple[str, PortDetails]]:
        return ((node, port) for node, ports in self.by_node.items() for port in ports)


def read_node_ports(root: Path) -> NodePorts:
    """The ports of this node and NCCL's settings.

    Raises OSError if the ports cannot be read, and ValueError if NCCL_IB_GID_INDEX is not an integer.
    """
    from seatrial.discover import rdma_ports

    names = ("NCCL_IB_HCA", "NCCL_IB_GID_INDEX", "NCCL_IB_DISABLE", "NCCL_NET")
    hca, index, disable, net = (os.environ.get(name, "").strip() for name in names)
    if not (index or "-1").removeprefix("-").isdecimal():
        raise ValueError(f"NCCL_IB_GID_INDEX={index}: expected an integer")
    rdma_off = f"NCCL_IB_DISABLE={disable}" if disable not in ("", "0") else ""
    rdma_off = f"NCCL_NET={net}" if net.lower() == "socket" else rdma_off
    gid_index = int(index) if index and not index.startswith("-") else None
    return NodePorts(rdma_ports.read_ports(root), hca, gid_index, rdma_off)


def select_compute_ports(nodes: Mapping[str, NodePorts]) -> ComputePorts:
    """The compute ports of all nodes.

    Raises NotApplicable if no node has one, and SeatrialError if a node has ports and its NCCL_IB_HCA selects none.
    """
    kept = {node: sorted(node_ports.ports, key=_natural_order) for node, node_ports in nodes.items()}
    others: dict[str, str] = {}

    def exclude(node: str, reasons: Mapping[str, str]) -> None:
        """Move ports of a node from ``kept`` to ``others``; ``reasons``: port → why it is not a compute port."""
        others.update((f"{node}/{name}", reason) for name, reason in reasons.items())
        kept[node] = [port for port in kept[node] if port.name not in reasons]

    for node, node_ports in nodes.items():
        setting, rdma_off = node_ports.nccl_ib_hca, node_ports.rdma_off
        reason = f"{rdma_off}: NCCL uses no RDMA port" if rdma_off else f"NCCL_IB_HCA={setting} does not select it"
        exclude(node, {port.name: reason for port in kept[node] if rdma_off or not _is_selected(port, setting)})
        if node_ports.ports and not kept[node] and not rdma_off:
            names = ", ".join(port.name for port in sorted(node_ports.ports, key=_natural_order))
            raise SeatrialError(f"NCCL_IB_HCA={setting} on {node} selects none of its RDMA ports: {names}")
    without_list = [node for node, node_ports in nodes.items() if not _is_list(node_ports.nccl_ib_hca)]
    for node in without_list:
        management = [port for port in kept[node] if port.has_default_route]
        nics = {port.nic_address for port in management if port.nic_address}
        rest = [port for port in kept[node] if not port.has_default_route]
        if not all(port.state and not port.is_active and port.nic_address in nics for port in rest):
            exclude(node, {port.name: f"management: {port.netdev} has the default route" for port in management})
    rate_by_kind = _rate_by_kind(kept)
    for node in without_list:
        kind = max((port.kind for port in kept[node]), key=rate_by_kind.__getitem__, default=("", "", ""))
        reason = f"not of the compute ports' kind ({_kind_text(kind)})"
        exclude(node, {port.name: f"{_kind_text(port.kind)}: {reason}" for port in kept[node] if port.kind != kind})
    unused = _unused_ports(kept)
    for node in without_list:
        exclude(node, unused[node])
    if not any(kept.values()):
        reasons = "; ".join(f"{name}: {reason}" for name, reason in others.items())
        raise NotApplicable(f"no RDMA port for compute on any node{f' ({reasons})' if reasons else ''}")
    return ComputePorts({node: tuple(ports) for node, ports in kept.items()}, others)


def _kind_text(kind: Kind) -> str:
    """The kind of a port as text: ``MT4129 (MT_0000000838), InfiniBand``."""
    model, board, layer = kind
    return f"{model}{f' ({board})' if board else ''}, {layer}"


def _natural_order(port: PortDetails) -> list[tuple[int, str]]:
    """A key that sorts mlx5_2 before mlx5_10."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", port.name)]


def _is_list(setting: str) -> bool:
    """Whether NCCL_IB_HCA lists ports to use; with a leading ``^`` it lists ports to exclude."""
    return bool(setting) and not setting.startswith("^")


def _is_selected(port: PortDetails, setting: str) -> bool:
    """Whether NCCL_IB_HCA selects the port; an empty ``setting`` selects every port.

    The setting lists DEVICE or DEVICE:PORT. A leading ``^`` excludes the listed ports. ``=`` requires equal device
    names; otherwise DEVICE is a prefix of the name.
    """
    if not setting:
        return True
    excludes, without_caret = setting.startswith("^"), setting.removeprefix("^")
    is_exact, listed = without_caret.startswith("="), without_caret.removeprefix("=").split(",")
    is_listed = False
    for device_and_port in filter(None, listed):
        device, _, number = device_and_port.partition(":")
        device_matches = port.device == device if is_exact else port.device.startswith(device)
        is_listed |= device_matches and number in ("", port.port)
    return not is_listed if excludes else is_listed


def _rate_by_kind(candidates: Mapping[str, Sequence[PortDetails]]) -> dict[Kind, float]:
    """Kind → the largest total rate of its ports on one node, in Gbit/s.

    A port that is down counts with the highest rate of a port of its kind. If all ports of its kind are down, it counts
    with the rate of its NIC model in nics.yaml.
    """
    nic_models: dict[str, dict[str, float]] = data_files.read("nics.yaml")  # NIC model → rate of a port in ``gbps``
    rates = grouped((port.kind, port.rate_gbps or 0.0) for port in chain.from_iterable(candidates.values()))
    port_rates = {kind: max(found) or nic_models.get(kind[0], {}).get("gbps", 0.0) for kind, found in rates.items()}
    totals: dict[Kind, float] = dict.fromkeys(port_rates, 0.0)
    for ports in candidates.values():
        for kind, found in grouped((port.kind, port.rate_gbps or port_rates[port.kind]) for port in ports).items():
            totals[kind] = max(totals[kind], sum(found))
    return totals


def _unused_ports(ports_by_node: Mapping[str, Sequence[PortDetails]]) -> dict[str, dict[str, str]]:
    """Node → port → reason, for each port that is not ACTIVE and is not required to be ACTIVE.

    A port is required to be ACTIVE in each of these cases:

    - The port of this name is ACTIVE on another node.
    - Most ports of its node are ACTIVE, and its NIC has no ACTIVE port.
    - Its node has no ACTIVE port at all.
    """
    active_names = {port.name for port in chain.from_iterable(ports_by_node.values()) if port.is_active}
    unused: dict[str, dict[str, str]] = {node: {} for node in ports_by_node}
    for node, ports in ports_by_node.items():
        active = [port for port in ports if port.is_active]
        if not active:
            continue
        active_nics = {port.nic_address for port in active if port.nic_address}
        most_are_active = 2 * len(active) > len(ports)
        for port in ports:
            should_be_active = most_are_active and port.nic_address not in active_nics
            if port.state and not port.is_active and port.name not in active_names and not should_be_active:
                unused[node][port.name] = f"unused: {port.state}, and not ACTIVE on any other node"
    return unused
