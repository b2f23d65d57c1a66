"""Network interfaces, and InfiniBand or RoCE ports, as /sys shows them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path

import psutil

from seatrial.discover.file_readers import FieldReader, list_names, printable, read_line, read_number
from seatrial.model import Frozen


class Nic(Frozen):
    """One network interface. ``speed_mbps`` is in Mbit/s as the kernel gives it."""

    name: str
    state: str | None
    speed_mbps: int | None
    mtu: int | None
    mac: str | None
    driver: str | None
    numa_node: int | None
    addresses: tuple[str, ...]
    unreadable: dict[str, str] = {}


class NicFacts(Frozen):
    """Every physical interface, and the virtual ones that carry an address; the rest (veth and such) is counted."""

    interfaces: tuple[Nic, ...]
    omitted_virtual: int
    unreadable: dict[str, str] = {}


class RdmaPort(Frozen):
    """``state`` is the logical state (``ACTIVE``), ``physical`` the cable's (``LinkUp``), ``netdev`` for RoCE only."""

    port: str
    state: str | None
    physical_state: str | None
    rate: str | None
    link_layer: str | None
    netdev: str | None
    unreadable: dict[str, str] = {}


class RdmaDevice(Frozen):
    """One RDMA device. ``verbs`` is whether programs in this container can open it (/dev/infiniband/uverbs*)."""

    name: str
    model: str | None
    firmware: str | None
    numa_node: int | None
    verbs_accessible: bool | None
    ports: tuple[RdmaPort, ...]
    unreadable: dict[str, str] = {}


class RdmaFacts(Frozen):
    """``devices`` is empty where there are none; where that could not be told, ``unread`` says why."""

    devices: tuple[RdmaDevice, ...]
    peermem: bool  # the module nvidia_peermem is loaded: GPUDirect RDMA without dma-buf
    unreadable: dict[str, str] = {}

    @property
    def status_readable(self) -> bool:
        """Whether the devices, the access to them and the states of their ports could all be read."""
        ports = [port for device in self.devices for port in device.ports]
        doubtful = [
            device for device in self.devices if device.verbs_accessible is None or "ports" in device.unreadable
        ]
        return "devices" not in self.unreadable and not doubtful and all(port.state for port in ports)

    @property
    def inaccessible_devices(self) -> list[str]:
        """The devices that /sys shows and that no program here can open."""
        return [device.name for device in self.devices if device.verbs_accessible is False]

    @property
    def inactive_ports(self) -> list[str]:
        """The ports that no traffic can use now, with their states: ``mlx5_3/1 (DOWN, Polling)``."""
        return [
            f"{device.name}/{port.port} ({port.state}, {port.physical_state or 'physical state unknown'})"
            for device in self.devices
            for port in device.ports
            if port.state not in (None, "ACTIVE")
        ]


def read_nics(root: Path = Path("/")) -> NicFacts:
    attempt = FieldReader()
    folder = root / "sys/class/net"
    found = [
        name
        for name in attempt("interfaces", lambda: list_names(folder)) or []
        if os.path.isdir(folder / name) and name != "lo"
    ]
    assigned = attempt("addresses", interface_addresses) or {}
    routable = {
        name for name, given in assigned.items() if not all(ipaddress.ip_address(one).is_link_local for one in given)
    }
    shown = [name for name in found if name in routable or os.path.exists(folder / name / "device")]
    return NicFacts(
        interfaces=tuple(_nic(folder / name, assigned.get(name, ())) for name in shown),
        omitted_virtual=len(found) - len(shown),
        unreadable=attempt.unreadable,
    )


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """The IPv4 and IPv6 addresses of each interface of this machine."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        for name, entries in psutil.net_if_addrs().items()
    }


def read_rdma(root: Path = Path("/")) -> RdmaFacts:
    attempt = FieldReader()
    return RdmaFacts(
        devices=tuple(_device(root, name) for name in attempt("devices", lambda: _device_names(root)) or []),
        peermem=os.path.exists(root / "sys/module/nvidia_peermem"),
        unreadable=attempt.unreadable,
    )


def _nic(folder: Path, assigned: tuple[str, ...]) -> Nic:
    attempt = FieldReader()
    physical = os.path.exists(folder / "device")
    driver = folder / "device" / "driver"
    return Nic(
        name=printable(folder.name),
        state=attempt("state", lambda: read_line(folder / "operstate")),
        speed_mbps=attempt("speed_mbps", lambda: _speed(folder)),
        mtu=attempt("mtu", lambda: read_number(folder / "mtu")),
        mac=attempt("mac", lambda: read_line(folder / "address")),
        driver=attempt("driver", lambda: printable(driver.resolve(strict=True).name)) if physical else None,
        numa_node=attempt("numa_node", lambda: _numa_node(folder)),
        addresses=assigned,
        unreadable=attempt.unreadable,
    )


def _speed(folder: Path) -> int:
    speed = read_number(folder / "speed")  # EINVAL where the link is down
    if speed < 0:
        raise ValueError("the driver does not know its speed")
    return speed


def _numa_node(folder: Path) -> int | None:
    """The NUMA node of a device; None for one that is not on PCI, and where the firmware does not say (-1)."""
    path = folder / "device" / "numa_node"
    node = read_number(path) if path.exists() else -1
    return node if node >= 0 else None


def _device_names(root: Path) -> list[str]:
    """The RDMA devices. Without the folder there are none, provided that /sys is there to say so."""
    folder = root / "sys/class/infiniband"
    if not folder.exists():
        list_names(root / "sys/class")
        return []
    return list_names(folder)


def _device(root: Path, name: str) -> RdmaDevice:
    attempt = FieldReader()
    folder = root / "sys/class/infiniband" / name
    ports = attempt("ports", lambda: sorted(list_names(folder / "ports"))) or []
    return RdmaDevice(
        name=printable(name),
        model=attempt("model", lambda: read_line(folder / "hca_type")),
        firmware=attempt("firmware", lambda: read_line(folder / "fw_ver")),
        numa_node=attempt("numa_node", lambda: _numa_node(folder)),
        verbs_accessible=attempt("verbs", lambda: _has_verbs(root, name)),
        ports=tuple(_port(folder / "ports" / port) for port in ports),
        unreadable=attempt.unreadable,
    )


def _has_verbs(root: Path, device: str) -> bool:
    """Whether this user may open the node that libibverbs needs.

    A container always sees the host's /sys/class/infiniband, and /dev/infiniband only where somebody passed it in.
    """
    folder = root / "sys/class/infiniband_verbs"
    if not folder.exists():  # the module ib_uverbs is not loaded
        return False
    nodes = [
        name
        for name in list_names(folder)
        if name.startswith("uverbs") and read_line(folder / name / "ibdev") == device
    ]
    return any(os.access(root / "dev/infiniband" / node, os.R_OK | os.W_OK) for node in nodes)


def _port(folder: Path) -> RdmaPort:
    attempt = FieldReader()
    layer = attempt("link_layer", lambda: read_line(folder / "link_layer"))
    return RdmaPort(
        port=printable(folder.name),
        state=attempt("state", lambda: _state(folder / "state")),
        physical_state=attempt("physical", lambda: _state(folder / "phys_state")),
        rate=attempt("rate", lambda: read_line(folder / "rate")),
        link_layer=layer,
        netdev=attempt("netdev", lambda: read_line(folder / "gid_attrs/ndevs/0")) if layer == "Ethernet" else None,
        unreadable=attempt.unreadable,
    )


def _state(path: Path) -> str:
    """The word of ``4: ACTIVE``. Raises ValueError on anything else."""
    value = read_line(path)
    found = re.fullmatch(r"\d+: (\w+)", value)
    if not found:
        raise ValueError(f"{path}: expected a state such as '4: ACTIVE', found {value[:60]!r}")
    return found[1]
