"""Selects the compute ports of the nodes: the ports that NCCL should use, without those for storage and management.

1. With NCCL_NET=Socket, or NCCL_IB_DISABLE other than 0, a node has no compute ports.
2. If NCCL_IB_HCA lists ports, these are the compute ports.
3. Otherwise the compute ports of a node are those of one kind (NIC model, board, link layer): the kind with the highest
   total rate on a node. Two groups of ports are left out: ports whose interface has the default route (management),
   unless the node has no others, and ports that are not ACTIVE and need not be (see _unused_ports).
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from seatrial.model import SeatrialError
from seatrial.util import data_files

if TYPE_CHECKING:
    from seatrial.discover.rdma_ports import PortDetails

Kind = tuple[str, str, str]  # PortDetails.kind


@dataclass(frozen=True)
class NodePorts:
    """The RDMA ports of one node, and NCCL's settings there; empty or None for a setting that is not set.

    ``gid_index``: None for a negative NCCL_IB_GID_INDEX too. ``rdma_off``: the setting that keeps NCCL from using RDMA,
    as NAME=VALUE.
    """

    ports: tuple[PortDetails, ...]
    nccl_ib_hca: str = ""
    gid_index: int | None = None
    rdma_off: str = ""


@dataclass(frozen=True)
class ComputePorts:
    """``by_node``: node → its compute ports, sorted. ``others``: NODE/PORT → why this port is not a compute port."""

    by_node: Mapping[str, tuple[PortDetails, ...]]
    others: Mapping[str, str]

    @property
    def absence_reason(self) -> str:
        """Why no node has a compute port; empty if a node has one."""
        if any(self.by_node.values()):
            return ""
        others = "; ".join(f"{name}: {reason}" for name, reason in self.others.items())
        return f"no RDMA port for compute on any node{f' ({others})' if others else ''}"

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


def port_names(compute: ComputePorts) -> dict[str, list[str]]:
    """Node → names of its compute ports, for the fact PORTS_USED."""
    return {node: [port.name for port in ports] for node, ports in compute.by_node.items()}


def select_compute_ports(nodes: Mapping[str, NodePorts]) -> ComputePorts:
    """The compute ports of all nodes. Raises SeatrialError if a node has ports and its NCCL_IB_HCA selects none."""
    others: dict[str, str] = {}
    candidates = {node: _candidates(node, node_ports, others) for node, node_ports in nodes.items()}
    rate_by_kind = _rate_by_kind(candidates)
    compute: dict[str, tuple[PortDetails, ...]] = {}
    for node, ports in candidates.items():
        compute[node] = ports
        if ports and not _is_list(nodes[node].nccl_ib_hca):
            kind = max((port.kind for port in ports), key=rate_by_kind.__getitem__)
            compute[node] = tuple(port for port in ports if port.kind == kind)
            reason = f"not of the compute ports' kind ({kind_text(kind)})"
            others |= {
                f"{node}/{port.name}": f"{kind_text(port.kind)}: {reason}" for port in ports if port.kind != kind
            }
    unused = {
        place: reason
        for place, reason in _unused_ports(compute).items()
        if not _is_list(nodes[place.partition("/")[0]].nccl_ib_hca)
    }
    by_node = {
        node: tuple(port for port in ports if f"{node}/{port.name}" not in unused) for node, ports in compute.items()
    }
    return ComputePorts(by_node, {**others, **unused})


def kind_text(kind: Kind) -> str:
    """The kind of a port as text: ``MT4129 (MT_0000000838), InfiniBand``."""
    model, board, layer = kind
    return f"{model}{f' ({board})' if board else ''}, {layer}"


def _candidates(node: str, node_ports: NodePorts, others: dict[str, str]) -> tuple[PortDetails, ...]:
    """The ports that may be compute ports. Adds NODE/PORT → reason to ``others`` for each port that may not."""
    setting, ports = node_ports.nccl_ib_hca, sorted(node_ports.ports, key=_natural_order)
    if node_ports.rdma_off:
        others |= {f"{node}/{port.name}": f"{node_ports.rdma_off}: NCCL uses no RDMA port" for port in ports}
        return ()
    selected = [port for port in ports if _is_selected(port, setting)]
    if ports and not selected:
        names = ", ".join(port.name for port in ports)
        raise SeatrialError(f"NCCL_IB_HCA={setting} on {node} selects none of its RDMA ports: {names}")
    not_selected = f"NCCL_IB_HCA={setting} does not select it"
    others |= {f"{node}/{port.name}": not_selected for port in ports if port not in selected}
    routed = [port for port in selected if port.has_default_route]
    if _is_list(setting) or len(routed) == len(selected):
        return tuple(selected)
    others |= {f"{node}/{port.name}": f"management: {port.netdev} has the default route" for port in routed}
    return tuple(port for port in selected if not port.has_default_route)


def _natural_order(port: PortDetails) -> list[tuple[int, str]]:
    """A key that sorts mlx5_2 before mlx5_10."""
    return [(int(digits or 0), text) for text, digits in re.findall(r"(\D*)(\d*)", port.name)]


def _is_list(setting: str) -> bool:
    """Whether NCCL_IB_HCA lists the ports to use, and not only those to exclude."""
    return bool(setting) and not setting.startswith("^")


def _is_selected(port: PortDetails, setting: str) -> bool:
    """Whether NCCL_IB_HCA selects the port: ``^`` excludes, ``=`` matches whole names, else prefixes; ``NAME:PORT``."""
    if not setting:
        return True
    names = setting.removeprefix("^")
    is_exact, listed = names.startswith("="), names.removeprefix("=").split(",")
    matches = False
    for entry in filter(None, listed):
        name, _, number = entry.partition(":")
        name_matches = port.device == name if is_exact else port.device.startswith(name)
        matches |= name_matches and number in ("", port.port)
    return matches is not setting.startswith("^")


def _rate_by_kind(candidates: Mapping[str, Sequence[PortDetails]]) -> dict[Kind, float]:
    """Kind → the largest total rate of its ports on one node, in Gbit/s.

    A port that is down counts with the rate of another port of its kind, or with that of its model in nics.yaml.
    """
    rates: dict[Kind, float] = {}
    for port in (port for ports in candidates.values() for port in ports):
        rates[port.kind] = max(rates.get(port.kind, 0.0), port.rate_gbps or 0.0)
    rates = {kind: rate or _model_rates().get(kind[0], {}).get("gbps", 0.0) for kind, rate in rates.items()}
    totals: dict[Kind, float] = dict.fromkeys(rates, 0.0)
    for ports in candidates.values():
        for kind in {port.kind for port in ports}:
            total = sum(port.rate_gbps or rates[kind] for port in ports if port.kind == kind)
            totals[kind] = max(totals[kind], total)
    return totals


@cache
def _model_rates() -> dict[str, dict[str, float]]:
    rates: dict[str, dict[str, float]] = data_files.read("nics.yaml")
    return rates


def _unused_ports(compute: Mapping[str, Sequence[PortDetails]]) -> dict[str, str]:
    """NODE/PORT → reason, for each port that is not ACTIVE and need not be.

    A port should be ACTIVE in each of these cases:

    - The port of this name is ACTIVE on another node.
    - Most ports of its node are ACTIVE, and its NIC has no ACTIVE port.
    - Its node has no ACTIVE port at all.
    """
    active_names = {port.name for ports in compute.values() for port in ports if port.is_active}
    unused = {}
    for node, ports in compute.items():
        active = [port for port in ports if port.is_active]
        if not active:
            continue
        active_nics = {port.nic_address for port in active if port.nic_address}
        most_are_active = 2 * len(active) > len(ports)
        for port in ports:
            should_be_active = most_are_active and port.nic_address not in active_nics
            if port.state and not port.is_active and port.name not in active_names and not should_be_active:
                unused[f"{node}/{port.name}"] = f"unused: {port.state}, and not ACTIVE on any other node"
    return unused
