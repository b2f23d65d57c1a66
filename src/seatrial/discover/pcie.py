"""The PCIe devices of the data path, the bridges above them, and the ACS settings of these bridges."""

from __future__ import annotations

import errno
import re
import struct
from collections.abc import Iterator
from pathlib import Path

from seatrial.discover.file_readers import list_names, read_line

NVIDIA = "0x10de"
GPU_CLASSES = ("0x0300", "0x0302")  # VGA and 3D controllers; NVSwitches and audio functions are other classes
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]")
# PCI Express Base Specification: extended capabilities start at 0x100, each with a 4-byte header (16-bit ID, 4-bit
# version, 12-bit offset of the next one). ACS: capability register at +4, control register at +6.
_EXTENDED_START, _EXTENDED_SIZE, _ACS_ID, _ACS_CONTROL = 0x100, 4096, 0x000D, 6
_STANDARD_HEADER = 64  # bytes that users other than root may read (Linux, pci_read_config)
# Control bits that send peer-to-peer traffic through the root complex: P2P Request Redirect, P2P Completion Redirect
_REDIRECT = 1 << 2 | 1 << 3


def gpus(root: Path) -> list[Path]:
    """The folders in /sys of the NVIDIA GPUs on the PCI bus, with links resolved; empty without a PCI bus.

    Raises OSError, also without /sys/bus, or ValueError.
    """
    if "pci" not in list_names(root / "sys/bus"):
        return []
    folder = root / "sys/bus/pci/devices"
    return [
        (folder / name).resolve()
        for name in list_names(folder)
        if read_line(folder / name / "vendor") == NVIDIA and read_line(folder / name / "class").startswith(GPU_CLASSES)
    ]


def rdma_devices(root: Path) -> list[Path]:
    """The folders in /sys of the PCI devices behind InfiniBand and RoCE devices, with links resolved."""
    folder = root / "sys/class/infiniband"
    links = [folder / name / "device" for name in list_names(folder)] if folder.is_dir() else []
    return [link.resolve() for link in links if link.exists()]


def bridges_above(devices: list[Path]) -> list[Path]:
    """The folders of all bridges between these devices and their root complex, sorted by address."""
    parents = {parent for device in devices for parent in device.parents}
    bridges = [parent for parent in parents if _ADDRESS.fullmatch(parent.name)]
    return sorted(bridges, key=lambda bridge: bridge.name)


def redirects_peer_traffic(bridge: Path) -> bool | None:
    """Whether ACS sends peer-to-peer traffic through the root complex; None if the bridge has no ACS.

    Raises PermissionError for users other than root, and OSError or ValueError if the configuration is unreadable.
    """
    config = (bridge / "config").read_bytes()
    if len(config) <= _STANDARD_HEADER:
        raise PermissionError(errno.EACCES, "only root may read the PCIe configuration", str(bridge / "config"))
    for offset, capability in _extended_capabilities(config):
        if capability == _ACS_ID:
            (control,) = struct.unpack_from("<H", config, offset + _ACS_CONTROL)
            return bool(control & _REDIRECT)
    return None


def _extended_capabilities(config: bytes) -> Iterator[tuple[int, int]]:
    """(offset, ID) of each extended capability. Raises ValueError for a damaged list."""
    offset, visited = _EXTENDED_START, set[int]()
    while len(config) == _EXTENDED_SIZE and offset:
        if offset < _EXTENDED_START or offset in visited or offset + 8 > _EXTENDED_SIZE:
            raise ValueError(f"PCIe configuration: invalid extended capability at {offset:#x}")
        visited.add(offset)
        (header,) = struct.unpack_from("<I", config, offset)
        if header in (0, 0xFFFFFFFF):  # no capability, or the device does not respond
            return
        yield offset, header & 0xFFFF
        offset = header >> 20
