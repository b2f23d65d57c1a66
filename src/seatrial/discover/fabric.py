"""Network interfaces, and InfiniBand or RoCE ports, from /sys."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import re
import socket
import struct
from array import array
from pathlib import Path

import psutil

from seatrial.discover.file_readers import FieldReader, FileFacts, list_names, read_line, read_number
from seatrial.util.text import printable

# Drivers of virtual interfaces that report a constant speed: veth, as in pods, 10 Gb/s
_CONSTANT_SPEED = ("veth", "tun")
# By which a NIC reaches GPU memory without dma-buf: of the driver, of Mellanox for drivers before 470, of EFA
_PEERMEM_MODULES = ("nvidia_peermem", "nv_peer_mem", "efa_nv_peermem")
_SIOCETHTOOL, _ETHTOOL_GDRVINFO, _DRVINFO_BYTES = 0x8946, 3, 196  # linux/sockios.h, linux/ethtool.h


class Nic(FileFacts):
    """One network interface; ``speed_mbit_s`` is in Mbit/s, the unit of ethtool and of /sys/class/net/NAME/speed."""

    name: str
    state: str | None
    speed_mbit_s: int | None
    mtu: int | None
    mac: str | None
    driver: str | None
    numa_node: int | None
    addresses: tuple[str, ...]


class NicFacts(FileFacts):
    """``interfaces``: the physical ones, and virtual ones with an address that is not link-local.

    ``omitted_virtual``: number of the other interfaces, not counting the loopback.
    """

    interfaces: tuple[Nic, ...]
    omitted_virtual: int


class RdmaPort(FileFacts):
    """A port of an RDMA device, with the texts of /sys.

    ``state``: logical state, such as ACTIVE. ``physical_state``: such as LinkUp. ``rate``: such as 400 Gb/sec (4X NDR).
    ``netdev``: the network interface of a RoCE port, None for InfiniBand.
    """

    port: str
    state: str | None
    physical_state: str | None
    rate: str | None
    link_layer: str | None
    netdev: str | None


class RdmaDevice(FileFacts):
    """One RDMA device. ``verbs_accessible``: whether this user can open /dev/infiniband/uverbs* of the device here."""

    name: str
    model: str | None
    firmware: str | None
    numa_node: int | None
    verbs_accessible: bool | None
    ports: tuple[RdmaPort, ...]


class RdmaFacts(FileFacts):
    """The RDMA devices; ``devices`` is empty if there are none, or if /sys is unreadable."""

    devices: tuple[RdmaDevice, ...]
    peermem: bool  # a module of _PEERMEM_MODULES is loaded: GPUDirect RDMA works without dma-buf

    @property
    def status_readable(self) -> bool:
        """Whether all devices, the access to them and the states of their ports could be read."""
        if "devices" in self.unreadable:
            return False
        if any(device.verbs_accessible is None or "ports" in device.unreadable for device in self.devices):
            return False
        return all(port.state for device in self.devices for port in device.ports)

    @property
    def inaccessible_devices(self) -> list[str]:
        """The names of devices in /sys whose verbs this user cannot open."""
        return [device.name for device in self.devices if device.verbs_accessible is False]

    @property
    def inactive_ports(self) -> list[str]:
        """The ports that are not active, with their states: ``mlx5_3/1 (DOWN, Polling)``."""
        return [
            f"{device.name}/{port.port} ({port.state}, {port.physical_state or 'physical state unknown'})"
            for device in self.devices
            for port in device.ports
            if port.state not in (None, "ACTIVE")
        ]


def read_nics(root: Path) -> NicFacts:
    """The network interfaces in /sys under ``root``, without the loopback."""
    reader = FieldReader()
    folder = root / "sys/class/net"
    names = [
        name
        for name in reader("interfaces", lambda: list_names(folder)) or []
        if os.path.isdir(folder / name) and name != "lo"  # bonding_masters is a file
    ]
    addresses = reader("addresses", interface_addresses) or {}
    routable = {
        name
        for name, assigned in addresses.items()
        if not all(ipaddress.ip_address(address).is_link_local for address in assigned)
    }
    reported = [name for name in names if name in routable or os.path.exists(folder / name / "device")]
    return NicFacts(
        interfaces=tuple(_nic(folder / name, addresses.get(name, ())) for name in reported),
        omitted_virtual=len(names) - len(reported),
        unreadable=reader.unreadable,
    )


def interface_addresses() -> dict[str, tuple[str, ...]]:
    """The IPv4 and IPv6 addresses of each interface of this machine."""
    families = (socket.AF_INET, socket.AF_INET6)
    return {
        name: tuple(entry.address.partition("%")[0] for entry in entries if entry.family in families)
        for name, entries in psutil.net_if_addrs().items()
    }


def read_rdma(root: Path) -> RdmaFacts:
    reader = FieldReader()
    return RdmaFacts(
        devices=tuple(_device(root, name) for name in reader("devices", lambda: _device_names(root)) or []),
        peermem=bool(peermem_module(root)),
        unreadable=reader.unreadable,
    )


def peermem_module(root: Path) -> str:
    """The loaded module of _PEERMEM_MODULES; empty if there is none."""
    return next((name for name in _PEERMEM_MODULES if os.path.exists(root / "sys/module" / name)), "")


def _nic(folder: Path, addresses: tuple[str, ...]) -> Nic:
    reader = FieldReader()
    is_physical = os.path.exists(folder / "device")
    driver = folder / "device" / "driver"
    return Nic(
        name=printable(folder.name),
        state=reader("state", lambda: read_line(folder / "operstate")),
        speed_mbit_s=reader("speed_mbit_s", lambda: _speed(folder)),
        mtu=reader("mtu", lambda: read_number(folder / "mtu")),
        mac=reader("mac", lambda: read_line(folder / "address")),
        driver=reader("driver", lambda: printable(driver.resolve(strict=True).name)) if is_physical else None,
        numa_node=reader("numa_node", lambda: _numa_node(folder)),
        addresses=addresses,
        unreadable=reader.unreadable,
    )


def _speed(folder: Path) -> int:
    """The speed of an interface in Mbit/s. Raises OSError with EINVAL if the link is down."""
    if (driver := ethtool_driver(folder.name)) in _CONSTANT_SPEED:
        raise ValueError(f"{folder}: the driver {driver} reports a constant")
    speed = read_number(folder / "speed")
    if speed < 0:
        raise ValueError(f"{folder / 'speed'}: {speed}, the driver reports no speed")
    return speed


def ethtool_driver(interface: str) -> str:
    """The driver of an interface of this machine, as in ``ethtool -i``, also of a virtual one; empty if unknown."""
    info = array("B", struct.pack("I", _ETHTOOL_GDRVINFO).ljust(_DRVINFO_BYTES, b"\0"))
    request = struct.pack("16sP16x", os.fsencode(interface), info.buffer_info()[0])  # struct ifreq
    try:
        with socket.socket() as any_socket:
            fcntl.ioctl(any_socket, _SIOCETHTOOL, request)
    except OSError:
        return ""
    return info.tobytes()[4:36].partition(b"\0")[0].decode(errors="replace")


def _numa_node(folder: Path) -> int | None:
    """The NUMA node of a device; None for a device that is not on PCI, or if the firmware reports -1."""
    path = folder / "device" / "numa_node"
    node = read_number(path) if path.exists() else -1
    return node if node >= 0 else None


def _device_names(root: Path) -> list[str]:
    """The names of the RDMA devices; empty if /sys/class exists without infiniband. Raises OSError without /sys."""
    return list_names(root / "sys/class/infiniband") if "infiniband" in list_names(root / "sys/class") else []


def _device(root: Path, name: str) -> RdmaDevice:
    reader = FieldReader()
    folder = root / "sys/class/infiniband" / name
    ports = reader("ports", lambda: list_names(folder / "ports")) or []
    return RdmaDevice(
        name=printable(name),
        model=reader("model", lambda: read_line(folder / "hca_type")),
        firmware=reader("firmware", lambda: read_line(folder / "fw_ver")),
        numa_node=reader("numa_node", lambda: _numa_node(folder)),
        verbs_accessible=reader("verbs_accessible", lambda: _can_open_verbs(root, name)),
        ports=tuple(_port(folder / "ports" / port) for port in ports),
        unreadable=reader.unreadable,
    )


def _can_open_verbs(root: Path, device: str) -> bool:
    """Whether this user can open the device node that libibverbs needs.

    A container always sees the host's /sys/class/infiniband, but /dev/infiniband only if it was passed in.
    """
    folder = root / "sys/class/infiniband_verbs"
    if not folder.exists():  # the module ib_uverbs is not loaded
        return False
    device_nodes = [
        name
        for name in list_names(folder)
        if name.startswith("uverbs") and read_line(folder / name / "ibdev") == device
    ]
    return any(os.access(root / "dev/infiniband" / name, os.R_OK | os.W_OK) for name in device_nodes)


def _port(folder: Path) -> RdmaPort:
    reader = FieldReader()
    link_layer = reader("link_layer", lambda: read_line(folder / "link_layer"))
    is_ethernet = link_layer == "Ethernet"
    return RdmaPort(
        port=printable(folder.name),
        state=reader("state", lambda: _state(folder / "state")),
        physical_state=reader("physical_state", lambda: _state(folder / "phys_state")),
        rate=reader("rate", lambda: read_line(folder / "rate")),
        link_layer=link_layer,
        netdev=reader("netdev", lambda: read_line(folder / "gid_attrs/ndevs/0")) if is_ethernet else None,
        unreadable=reader.unreadable,
    )


def _state(path: Path) -> str:
    """The name in a state such as ``4: ACTIVE``."""
    value = read_line(path)
    match = re.fullmatch(r"\d+: (\w+)", value)
    if not match:
        raise ValueError(f"{path}: expected a state such as '4: ACTIVE', read {value[:60]!r}")
    return match[1]
