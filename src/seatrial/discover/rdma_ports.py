"""Details of RDMA ports: state, GIDs, MTU, PCI bandwidth and fastest link mode.

They are read from /sys, the routing table, ethtool and ibv_devinfo.
"""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from seatrial.discover import fabric
from seatrial.discover.file_readers import FieldReader, list_names, read_line, read_number, read_or_none, read_text
from seatrial.model import Frozen
from seatrial.util import processes
from seatrial.util.text import printable

TOOL_TIMEOUT_S = 5.0
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec\b")
_PCI_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
_PCI_SPEED = re.compile(r"(\d+(?:\.\d+)?) GT/s")
_DEVINFO = re.compile(r"^hca_id:\s*(\S+)|^\s+port:\s*(\d+)|^\s+active_mtu:\s*(\d+)", re.MULTILINE)
_LINK_MODE = re.compile(r"\b(\d+)base\w*/Full")
# Each row: (highest speed in GT/s, share of payload in the transferred bits). The encoding is 8b/10b up to 5 GT/s,
# 128b/130b up to 32 GT/s (PCI Express Base Specification 5.0, 4.2.1 and 4.2.2), and from 64 GT/s a flit has 236 bytes
# of payload in 256 (6.0, 4.2.3).
_PCI_ENCODING = ((5.0, 8 / 10), (32.0, 128 / 130), (float("inf"), 236 / 256))


class Gid(Frozen):
    """One non-zero entry of a port's GID table; ``type`` is ``RoCE v2`` or ``IB/RoCE v1``."""

    index: int
    address: str
    type: str | None

    @property
    def is_valid(self) -> bool:
        """Whether NCCL accepts the GID: it is not link-local (validGid in net_ib/connect.cc)."""
        return not ipaddress.ip_address(self.address).is_link_local


class PortDetails(fabric.RdmaPort):
    """One RDMA port with further details. Rates and bandwidths are in Gbit/s, one direction.

    ``name`` is the device, with ``:PORT`` if it has several ports, as in NCCL_IB_HCA.
    ``netdev``: the network interface of a RoCE port. ``mtu``: MTU of this interface.
    ``active_mtu``: MTU of RDMA packets; None without ibv_devinfo.
    ``has_default_route``: whether a default route uses ``netdev``, or a bond, bridge or VLAN above it.
    ``pci_path``: PCI addresses from the root port to the device.
    ``capability_gbps``: the fastest mode that ethtool lists. ``pci_gbps``: the present bandwidth of the PCI link.
    """

    name: str
    device: str
    model: str | None
    board: str | None
    firmware: str | None
    numa_node: int | None
    verbs_accessible: bool | None
    has_default_route: bool
    mtu: int | None
    active_mtu: int | None
    gids: tuple[Gid, ...]
    pci_path: tuple[str, ...]
    pci_gbps: float | None
    capability_gbps: float | None

    @property
    def is_active(self) -> bool:
        return self.state == "ACTIVE"

    @property
    def rate_gbps(self) -> float | None:
        """The rate of an active port; 0 in other states, in which the file ``rate`` is meaningless; None if unknown."""
        if self.state is None:
            return None
        if not self.is_active:
            return 0.0
        match = _RATE.match(self.rate or "")
        return float(match[1]) if match else None

    @property
    def kind(self) -> tuple[str, str, str]:
        """Model, board and link layer; the compute ports of a node have all three in common."""
        return self.model or "unknown model", self.board or "", self.link_layer or "unknown link layer"

    @property
    def nic_address(self) -> str:
        """The PCI address without the function number. All ports of a NIC share it. Empty if unknown."""
        return self.pci_path[-1].rpartition(".")[0] if self.pci_path else ""

    def roce_gid(self, configured_index: int | None) -> Gid | None:
        """The RoCE v2 GID that NCCL uses; None if there is no valid one."""
        return usable_roce_gid(self.gids, configured_index)


def usable_roce_gid(gids: Sequence[Gid], configured_index: int | None = None) -> Gid | None:
    """The RoCE v2 GID that NCCL uses of the table of a port; None if there is no valid one.

    ``configured_index``: NCCL_IB_GID_INDEX, the only GID that NCCL then uses; None if it is not set: NCCL uses the
    first valid GID, IPv4 before IPv6.
    """
    valid = [gid for gid in gids if gid.type == "RoCE v2" and gid.is_valid]
    if configured_index is not None:
        return next((gid for gid in valid if gid.index == configured_index), None)
    return min(valid, key=lambda gid: (":" in gid.address, gid.index), default=None)


def read_ports(root: Path) -> tuple[PortDetails, ...]:
    """All RDMA ports. Raises OSError if the devices or their ports cannot be listed."""
    rdma = fabric.read_rdma(root)
    if reason := rdma.unreadable.get("devices"):
        raise OSError(reason)
    for device in rdma.devices:
        if reason := device.unreadable.get("ports"):
            raise OSError(reason)
    routed_netdevs = default_route_interfaces(root)
    # /sys does not show the active MTU; empty if ibv_devinfo is missing or does not answer
    devinfo = read_or_none(lambda: processes.run_command(["ibv_devinfo"], TOOL_TIMEOUT_S).out) or ""
    active_mtus = parse_devinfo(devinfo)
    return tuple(
        _details(root, device, port, routed_netdevs, active_mtus.get((device.name, port.port)))
        for device in rdma.devices
        for port in device.ports
    )


def default_route_interfaces(root: Path) -> frozenset[str]:
    """The interfaces of the default routes; of a bond, bridge or VLAN also the interfaces below it."""
    pending: set[str] = set()
    for interface, destination, *columns in _table(root / "proc/net/route", 11):
        mask = columns[5]  # after gateway, flags, reference count, use and metric
        if destination == mask == "00000000":
            pending.add(interface)
    for destination, prefix_length, *columns in _table(root / "proc/net/ipv6_route", 10):
        if destination == "0" * 32 and prefix_length == "00":
            pending.add(columns[-1])
    pending.discard("lo")
    interfaces: set[str] = set()
    while pending:
        interface = pending.pop()
        interfaces.add(interface)
        links = _names(root / "sys/class/net" / interface)
        lower = {link.removeprefix("lower_") for link in links if link.startswith("lower_")}
        pending |= lower - interfaces
    return frozenset(interfaces)


def pci_path(device: Path) -> tuple[str, ...]:
    """The PCI addresses from the root port to ``device``, a link in /sys; empty if it is not on PCI."""
    return tuple(part for part in device.resolve().parts if _PCI_ADDRESS.fullmatch(part))


def pci_bandwidth(folder: Path) -> float:
    """The rate of a device's PCI link in one direction, in Gbit/s: after line encoding, with packet headers.

    Raises OSError or ValueError.
    """
    speed, lanes = read_line(folder / "current_link_speed"), read_number(folder / "current_link_width")
    match = _PCI_SPEED.match(speed)
    if not match or not lanes:
        raise ValueError(f"{folder}: no PCI link of its own ({speed} x{lanes}); a virtual function has none")
    gigatransfers_s = float(match[1])
    payload_share = next(share for limit, share in _PCI_ENCODING if gigatransfers_s <= limit)
    return lanes * gigatransfers_s * payload_share


def parse_link_modes(text: str) -> float:
    """Gbit/s of the fastest supported link mode in the output of ``ethtool DEV``. Raises ValueError if it has none."""
    supported = text.partition("Supported link modes:")[2].partition("Supported pause")[0]
    if not (modes := _LINK_MODE.findall(supported)):
        raise ValueError("ethtool lists no supported link mode")
    return max(map(int, modes)) / 1000


def parse_devinfo(text: str) -> dict[tuple[str, str], int]:
    """(device, port) → active MTU in bytes, from the output of ``ibv_devinfo``."""
    mtus: dict[tuple[str, str], int] = {}
    device = port = ""
    for new_device, new_port, mtu in _DEVINFO.findall(text):  # each match has one of the three
        device, port = new_device or device, new_port or port
        if mtu:
            mtus[device, port] = int(mtu)
    return mtus


def _details(
    root: Path, device: fabric.RdmaDevice, port: fabric.RdmaPort, routed_netdevs: frozenset[str], active_mtu: int | None
) -> PortDetails:
    """The details of ``port``. ``routed_netdevs``: the result of ``default_route_interfaces``."""
    reader = FieldReader()
    folder = root / "sys/class/infiniband" / device.name
    is_ethernet = port.link_layer == "Ethernet"
    netdev = (port.netdev or _only_netdev(folder)) if is_ethernet else None
    board = folder / "board_id"
    path = pci_path(folder / "device")
    unreadable = device.unreadable | port.unreadable
    unreadable.pop("netdev", None)  # not an error: _only_netdev is used instead
    return PortDetails(
        name=device.name if len(device.ports) == 1 else f"{device.name}:{port.port}",
        device=device.name,
        **port.model_dump(exclude={"netdev", "unreadable"}),
        **device.model_dump(include={"model", "firmware", "numa_node", "verbs_accessible"}),
        board=reader("board", lambda: read_line(board)) if board.exists() else None,
        netdev=netdev,
        has_default_route=netdev in routed_netdevs,
        mtu=reader("mtu", lambda: read_number(root / "sys/class/net" / netdev / "mtu")) if netdev else None,
        active_mtu=active_mtu,
        gids=_gids(folder / "ports" / port.port) if is_ethernet else (),
        pci_path=path,
        pci_gbps=reader("pci_gbps", lambda: pci_bandwidth(folder / "device")) if path else None,
        capability_gbps=reader("capability_gbps", lambda: _ethtool_capability(netdev)) if netdev else None,
        unreadable={**unreadable, **reader.unreadable},
    )


def _only_netdev(folder: Path) -> str | None:
    """The interface of a device with exactly one interface, else None.

    It replaces an unreadable ``netdev``, since ``gid_attrs/ndevs`` cannot be read in another network namespace.
    """
    names = _names(folder / "device/net")
    return printable(names[0]) if len(names) == 1 else None


def _gids(folder: Path) -> tuple[Gid, ...]:
    """The GIDs of a RoCE port that are neither zero nor the empty default GID, with their types."""
    gids = []
    for index in sorted(map(int, filter(str.isdecimal, _names(folder / "gids")))):
        try:
            address = ipaddress.IPv6Address(read_line(folder / "gids" / str(index)))
        except (OSError, ValueError):
            continue
        if int(address) not in (0, 0xFE80 << 112):
            # None for a GID of another network namespace, whose type cannot be read
            kind = read_or_none(partial(read_line, folder / "gid_attrs/types" / str(index)))
            gids.append(Gid(index=index, address=str(address.ipv4_mapped or address), type=kind))
    return tuple(gids)


def _table(path: Path, columns: int) -> list[list[str]]:
    """The rows with exactly ``columns`` columns of a table in /proc; empty if there is no such file."""
    text = read_or_none(lambda: read_text(path)) or ""
    return [row for row in map(str.split, text.splitlines()) if len(row) == columns]


def _ethtool_capability(netdev: str) -> float:
    """Gbit/s of the fastest link mode. Raises OSError without ethtool, ValueError if it lists no mode or hangs."""
    result = processes.run_command(["ethtool", netdev], TOOL_TIMEOUT_S)
    if result.code is None:
        raise ValueError(f"ethtool {netdev} did not end within {TOOL_TIMEOUT_S:g} s")
    return parse_link_modes(result.out)


def _names(folder: Path) -> Sequence[str]:
    """The sorted names in a folder; empty if it cannot be listed."""
    return read_or_none(lambda: list_names(folder)) or ()
