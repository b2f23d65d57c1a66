"""Settings of kernel, CPU, PCIe and NVIDIA driver that affect training. A setting without a value has a reason."""

from __future__ import annotations

import errno
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

from pydantic import JsonValue

from seatrial.discover import cpu_memory, fabric, pcie
from seatrial.discover.file_readers import list_names, read_line, read_number, read_or_none, read_text
from seatrial.discover.host import has_capability
from seatrial.util.text import error_text

_CPUS = "sys/devices/system/cpu"
_CAP_SYS_ADMIN = 21  # capabilities(7): may read GPU performance counters in any case
_DMA_BUF_KERNEL = (5, 12)  # first kernel with dma-buf for RDMA (NVIDIA GPU Operator, GPUDirect RDMA)
_SMALL_PAGE = 4096  # bytes
# Errors which show that this hardware or this kernel does not have the file, or that this user may not read it
_ABSENT = (errno.ENOENT, errno.ENODEV, errno.ENXIO, errno.EOPNOTSUPP, errno.ENOTDIR, errno.EACCES, errno.EPERM)
# Types of an IOMMU group (Linux, sysfs-kernel-iommu_groups): with and without translation of addresses
_TRANSLATED, _PASSTHROUGH = ("DMA", "DMA-FQ"), ("identity",)


class NotSupportedError(Exception):
    """The machine does not have the setting; the message is the reason."""


class Setting(NamedTuple):
    """The value of a setting, or the reason why it is unknown.

    ``is_absent``: this machine does not have the setting, or this user may not read it; otherwise reading it failed.
    """

    value: JsonValue = None
    reason: str = ""
    is_absent: bool = False


def read(root: Path = Path("/")) -> dict[str, Setting]:
    """The settings in /proc, /sys and /dev under ``root``, by the names in ``_READERS``."""
    return {name: _setting(read_value, root) for name, read_value in _READERS.items()}


def is_gpu_node(root: Path) -> bool:
    """Whether the machine has an NVIDIA GPU on its PCI bus, or the NVIDIA driver is loaded."""
    return (root / "proc/driver/nvidia/version").exists() or bool(read_or_none(lambda: pcie.gpus(root)))


def _setting(read_value: Callable[[Path], JsonValue], root: Path) -> Setting:
    try:
        return Setting(read_value(root))
    except (NotSupportedError, OSError, ValueError) as error:
        is_absent = isinstance(error, NotSupportedError) or getattr(error, "errno", None) in _ABSENT
        return Setting(reason=error_text(error), is_absent=is_absent)


def _kernel_module(root: Path) -> str:
    """``open`` or ``proprietary``: the kind of the loaded NVIDIA kernel module."""
    return "open" if "Open Kernel Module" in read_text(root / "proc/driver/nvidia/version") else "proprietary"


def _gpudirect_rdma(root: Path) -> str:
    """The kernel interface by which a NIC can access GPU memory: ``dma-buf``, a module or ``none``.

    dma-buf needs the open kernel module (NVIDIA GPU Operator, GPUDirect RDMA).
    """
    release = re.match(r"(\d+)\.(\d+)", read_line(root / "proc/sys/kernel/osrelease"))
    is_new_kernel = release and (int(release[1]), int(release[2])) >= _DMA_BUF_KERNEL
    if _kernel_module(root) == "open" and is_new_kernel:
        return "dma-buf"
    return fabric.peermem_module(root) or "none"


def _redirecting_bridges(root: Path) -> JsonValue:
    """The addresses of PCIe bridges that redirect peer-to-peer traffic by ACS (Access Control Services).

    Only the bridges above GPUs and RDMA devices are read.
    """
    is_virtual = re.search(r"^flags\s*:.*\bhypervisor\b", read_text(root / "proc/cpuinfo"), re.MULTILINE)
    if is_virtual:
        raise NotSupportedError("virtual machine: the hypervisor controls ACS")
    bridges = pcie.bridges_above([*pcie.gpus(root), *pcie.rdma_devices(root)])
    redirects_by_bridge = {bridge.name: pcie.redirects_peer_traffic(bridge) for bridge in bridges}
    if all(redirects is None for redirects in redirects_by_bridge.values()):
        raise NotSupportedError("no PCIe bridge above a GPU or RDMA device has ACS")
    return [bridge for bridge, redirects in redirects_by_bridge.items() if redirects]


def _iommu(root: Path) -> str:
    """``translated`` if the IOMMU translates addresses of at least one GPU or RDMA device, else ``passthrough``."""
    groups = [device / "iommu_group" for device in (*pcie.gpus(root), *pcie.rdma_devices(root))]
    types = {read_line(group / "type") for group in groups if group.exists()}
    if not types & {*_TRANSLATED, *_PASSTHROUGH}:  # a device that is assigned to a virtual machine has another type
        raise NotSupportedError("no GPU or RDMA device is behind an active IOMMU")
    return "translated" if types & {*_TRANSLATED} else "passthrough"


def _cpu_governor(root: Path) -> str:
    """The frequency governors of the CPUs, such as ``performance``; different ones are joined by commas."""
    files = sorted((root / _CPUS).glob("cpu[0-9]*/cpufreq/scaling_governor"))
    if not files:
        raise NotSupportedError("no CPU has frequency scaling that the kernel controls")
    return ", ".join(sorted({read_line(file) for file in files}))


def _turbo(root: Path) -> bool:
    """Whether CPUs may exceed their base frequency."""
    intel_file = root / _CPUS / "intel_pstate/no_turbo"
    return not read_number(intel_file) if intel_file.exists() else bool(read_number(root / _CPUS / "cpufreq/boost"))


def _deepest_idle_state(root: Path) -> str:
    """The enabled idle state of CPU 0 with the longest exit latency, such as ``C6, 133 us``."""
    folder = root / _CPUS / "cpu0/cpuidle"
    states = [folder / name for name in list_names(folder)]
    enabled = [state for state in states if not read_number(state / "disable")]
    if not enabled:
        raise NotSupportedError("all idle states are disabled")
    deepest = max(enabled, key=lambda state: read_number(state / "latency"))
    return f"{read_line(deepest / 'name')}, {read_number(deepest / 'latency')} us"


def _transparent_hugepages(root: Path) -> str:
    """Which memory the kernel backs with transparent huge pages: ``always`` (all), ``madvise`` or ``never``."""
    if os.sysconf("SC_PAGESIZE") != _SMALL_PAGE:  # with 64 KiB pages a huge page has 512 MiB, too large to be useful
        raise NotSupportedError(f"the kernel uses pages of {os.sysconf('SC_PAGESIZE')} bytes")
    path = root / "sys/kernel/mm/transparent_hugepage/enabled"
    match = re.search(r"\[(always|madvise|never)\]", read_line(path))
    if not match:
        raise ValueError(f"{path}: expected a choice such as [madvise], read {read_line(path)[:60]!r}")
    return match[1]


def _hugepages_bytes(root: Path) -> int:
    """Memory that is reserved for huge pages, in bytes."""
    path = root / "proc/meminfo"
    text = read_text(path)
    count = re.search(r"^HugePages_Total:\s*(\d+)$", text, re.MULTILINE)
    size = re.search(r"^Hugepagesize:\s*(\d+) kB$", text, re.MULTILINE)
    if not count or not size:
        raise NotSupportedError(f"{path}: no huge pages in this kernel")
    return int(count[1]) * int(size[1]) * 1024


def _numa_balancing(root: Path) -> bool:
    """Whether the kernel moves pages between NUMA nodes."""
    if sum(bool(node.cpus) for node in cpu_memory.read_cpu(root).numa) < 2:
        raise NotSupportedError("one NUMA node")
    return bool(read_number(root / "proc/sys/kernel/numa_balancing"))


def _gdrcopy(root: Path) -> bool:
    """Whether this user can open GDRCopy's device."""
    if not (root / "sys/module/gdrdrv").exists():
        raise NotSupportedError("GDRCopy's kernel module gdrdrv is not loaded")
    return os.access(root / "dev/gdrdrv", os.R_OK | os.W_OK)


def _performance_counters(root: Path) -> bool:
    """Whether this user may read the GPUs' performance counters."""
    path = root / "proc/driver/nvidia/params"
    match = re.search(r"^RmProfilingAdminOnly:\s*([01])$", read_text(path), re.MULTILINE)
    if not match:
        raise NotSupportedError(f"{path}: no RmProfilingAdminOnly")
    return match[1] == "0" or has_capability(root / "proc/self", _CAP_SYS_ADMIN)


# Setting → the function that reads it, whose docstring has the possible values
_READERS: dict[str, Callable[[Path], JsonValue]] = {
    "kernel_module": _kernel_module,
    "gpudirect_rdma": _gpudirect_rdma,
    "acs": _redirecting_bridges,
    "iommu": _iommu,
    "cpu_governor": _cpu_governor,
    "turbo": _turbo,
    "idle_state": _deepest_idle_state,
    "transparent_hugepages": _transparent_hugepages,
    "hugepages_bytes": _hugepages_bytes,
    "numa_balancing": _numa_balancing,
    "gdrcopy": _gdrcopy,
    "performance_counters": _performance_counters,
}
