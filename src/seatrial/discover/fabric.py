"""Network interfaces, and InfiniBand or RoCE ports, as /sys shows them."""

from __future__ import annotations

import ipaddress
import os
import re
import socket
from pathlib import Path

import psutil

from seatrial.discover.reading import Attempts, line, names, number, printable
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
    unread: dict[str, str] = {}


class NicFacts(Frozen):
    """Every physical interface, and the virtual ones that carry an address; the rest (veth and such) is counted."""

    interfaces: tuple[Nic, ...]
    left_out_virtual: int
    unread: dict[str, str] = {}


class RdmaPort(Frozen):
    """``state`` is the logical state (``ACTIVE``), ``physical`` the cable's (``LinkUp``), ``netdev`` for RoCE only."""

    port: str
    state: str | None
    physical: str | None
    rate: str | None
    link_layer: str | None
    netdev: str | None
    unread: dict[str, str] = {}


class RdmaDevice(Frozen):
    """One RDMA device. ``verbs`` is whether programs in this container can open it (/dev/infiniband/uverbs*)."""

    name: str
    model: str | None
    firmware: str | None
    numa_node: int | None
    verbs: bool | None
    ports: tuple[RdmaPort, ...]
    unread: dict[str, str] = {}


class RdmaFacts(Frozen):
    """``devices`` is empty where there are none; where that could not be told, ``unread`` says why."""

    devices: tuple[RdmaDevice, ...]
    peermem: bool  # the module nvidia_peermem is loaded: GPUDirect RDMA without dma-buf
    unread: dict[str, str] = {}

    @property
    def known(self) -> bool:
        """Whether the devices, the access to them and the states of their ports could all be read."""
        ports = [port for device in self.devices for port in device.ports]
        doubtful = [device for device in self.devices if device.verbs is None or "ports" in device.unread]
        return "devices" not in self.unread and not doubtful and all(port.state for port in ports)

    @property
    def closed_devices(self) -> list[str]:
        """The devices that /sys shows and that no program here can open."""
        return [device.name for device in self.devices if device.verbs is False]

    @property
    def idle_ports(self) -> list[str]:
        """The ports that no traffic can use now, with their states: ``mlx5_3/1 (DOWN, Polling)``."""
        return [
            f"{device.name}/{port.port} ({port.state}, {port.physical or 'physical state unknown'})"
            for device in self.devices
            for port in device.ports
            if port.state not in (None, "ACTIVE")
        ]


def read_nics(root: Path = Path("/")) -> NicFacts:
    attempt = Attempts()
    folder = root / "sys/class/net"
    found = [
        name
        for name in attempt("interfaces", lambda: names(folder)) or []
        if os.path.isdir(folder / name) and name != "lo"
    ]
    assigned = attempt("addresses", addresses) or {}
    routable = {
        name for name, given in assigned.items() if not all(ipaddress.ip_address(one).is_link_local for one in given)
    }
    shown = [name for name in found if name in routable or os.path.exists(folder / name / "device")]
    return NicFacts(
        interfaces=tuple(_nic(folder / name, assigned.get(name, ())) for name in shown),
        left_out_virtual=len(found) - len(shown),
        unread=attempt.unread,
    )


def addresses() -> dict[str, tuple[str, ...]]:
    """The IPv4 and IPv6 addresses of each interface of this machine."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        for name, entries in psutil.net_if_addrs().items()
    }


def read_rdma(root: Path = Path("/")) -> RdmaFacts:
    attempt = Attempts()
    return RdmaFacts(
        devices=tuple(_device(root, name) for name in attempt("devices", lambda: _device_names(root)) or []),
        peermem=os.path.exists(root / "sys/module/nvidia_peermem"),
        unread=attempt.unread,
    )


def _nic(folder: Path, assigned: tuple[str, ...]) -> Nic:
    attempt = Attempts()
    physical = os.path.exists(folder / "device")
    driver = folder / "device" / "driver"
    return Nic(
        name=printable(folder.name),
        state=attempt("state", lambda: line(folder / "operstate")),
        speed_mbps=attempt("speed_mbps", lambda: _speed(folder)),
        mtu=attempt("mtu", lambda: number(folder / "mtu")),
        mac=attempt("mac", lambda: line(folder / "address")),
        driver=attempt("driver", lambda: printable(driver.resolve(strict=True).name)) if physical else None,
        numa_node=attempt("numa_node", lambda: _numa_node(folder)),
        addresses=assigned,
        unread=attempt.unread,
    )


def _speed(folder: Path) -> int:
    speed = number(folder / "speed")  # EINVAL where the link is down
    if speed < 0:
        raise ValueError("the driver does not know its speed")
    return speed


def _numa_node(folder: Path) -> int | None:
    """The NUMA node of a device; None for one that is not on PCI, and where the firmware does not say (-1)."""
    path = folder / "device" / "numa_node"
    node = number(path) if path.exists() else -1
    return node if node >= 0 else None


def _device_names(root: Path) -> list[str]:
    """The RDMA devices. Without the folder there are none, provided that /sys is there to say so."""
    folder = root / "sys/class/infiniband"
    if not folder.exists():
        names(root / "sys/class")
        return []
    return names(folder)


def _device(root: Path, name: str) -> RdmaDevice:
    attempt = Attempts()
    folder = root / "sys/class/infiniband" / name
    ports = attempt("ports", lambda: sorted(names(folder / "ports"))) or []
    return RdmaDevice(
        name=printable(name),
        model=attempt("model", lambda: line(folder / "hca_type")),
        firmware=attempt("firmware", lambda: line(folder / "fw_ver")),
        numa_node=attempt("numa_node", lambda: _numa_node(folder)),
        verbs=attempt("verbs", lambda: _has_verbs(root, name)),
        ports=tuple(_port(folder / "ports" / port) for port in ports),
        unread=attempt.unread,
    )


def _has_verbs(root: Path, device: str) -> bool:
    """Whether this user may open the node that libibverbs needs.

    A container always sees the host's /sys/class/infiniband, and /dev/infiniband only where somebody passed it in.
    """
    folder = root / "sys/class/infiniband_verbs"
    if not folder.exists():  # the module ib_uverbs is not loaded
        return False
    nodes = [name for name in names(folder) if name.startswith("uverbs") and line(folder / name / "ibdev") == device]
    return any(os.access(root / "dev/infiniband" / node, os.R_OK | os.W_OK) for node in nodes)


def _port(folder: Path) -> RdmaPort:
    attempt = Attempts()
    layer = attempt("link_layer", lambda: line(folder / "link_layer"))
    return RdmaPort(
        port=printable(folder.name),
        state=attempt("state", lambda: _state(folder / "state")),
        physical=attempt("physical", lambda: _state(folder / "phys_state")),
        rate=attempt("rate", lambda: line(folder / "rate")),
        link_layer=layer,
        netdev=attempt("netdev", lambda: line(folder / "gid_attrs/ndevs/0")) if layer == "Ethernet" else None,
        unread=attempt.unread,
    )


def _state(path: Path) -> str:
    """The word of ``4: ACTIVE``. Raises ValueError on anything else."""
    value = line(path)
    found = re.fullmatch(r"\d+: (\w+)", value)
    if not found:
        raise ValueError(f"{path}: expected a state such as '4: ACTIVE', found {value[:60]!r}")
    return found[1]
