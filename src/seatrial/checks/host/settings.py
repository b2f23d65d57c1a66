"""host.settings: settings of kernel, CPU, PCIe and NVIDIA driver that make training slow or break GPUDirect."""

from __future__ import annotations

import platform
from collections.abc import Callable, Mapping
from typing import Any

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, absent, unreadable, value, warning
from seatrial.model import Phase, Scope

# Setting → its metric, and how the metric's value follows from the setting's
METRIC_BY_SETTING: Mapping[str, tuple[str, Callable[[Any], float]]] = {
    "kernel_module": ("open_kernel_module", lambda kind: kind == "open"),
    "gpudirect_rdma": ("gpudirect_rdma_available", lambda interface: interface != "none"),
    "acs": ("acs_redirecting_bridges", len),
    "iommu": ("iommu_translates", lambda mode: mode == "translated"),
    "cpu_governor": ("governor_performance", lambda governors: governors == "performance"),
    "turbo": ("turbo_enabled", bool),
    "transparent_hugepages": ("transparent_hugepages_enabled", lambda mode: mode != "never"),
    "numa_balancing": ("numa_balancing_enabled", bool),
    "gdrcopy": ("gdrcopy_accessible", bool),
    "performance_counters": ("performance_counters_readable", bool),
}


def measure(context: Context, _options: Options) -> Answers:
    """Yield the metric of each setting, or why it has none; a few settings are facts only."""
    from seatrial.discover import fabric, settings

    context.progress("reading /proc and /sys")
    values = settings.read(context.root)
    recorded = {name: values[name].value for name in ("idle_state", "hugepages_bytes")}
    yield from facts({"architecture": platform.machine(), **recorded})
    if not settings.is_gpu_node(context.root):
        yield absent("*", "no NVIDIA GPU on this machine")
        return
    for name, (metric_name, convert) in METRIC_BY_SETTING.items():
        setting = values[name]
        if name == "gpudirect_rdma" and not fabric.read_rdma(context.root).devices:
            yield absent(metric_name, "no RDMA device")
        elif not setting.reason:
            yield value(metric_name, convert(setting.value), evidence={name: setting.value})
        else:  # most users are not root, and may not read some settings
            yield (absent if setting.is_absent else unreadable)(metric_name, setting.reason)


CHECK = Check(
    name="host.settings",
    title="Settings of kernel, CPU, PCIe and NVIDIA driver",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    rights="root, to read ACS of PCIe bridges; without it this metric is SKIP",
    measure=measure,
    limit_s=60,
    declared=(  # warnings, since training works with any value of a setting
        warning(
            "open_kernel_module",
            "yes",
            "The proprietary kernel module is loaded. Blackwell GPUs and dma-buf need the open one.",
            "Install the open kernel module (nvidia-open, or --kernel-module-type=open) and reboot; then: cat "
            "/proc/driver/nvidia/version",
        ),
        warning(
            "gpudirect_rdma_available",
            "yes",
            "NICs cannot reach GPU memory: dma-buf needs the open kernel module and kernel 5.12 or newer, otherwise "
            "nvidia_peermem must be loaded. NCCL copies through host memory instead, at a part of the bandwidth.",
            "Install the open kernel module (dma-buf, kernel 5.12 or newer); or: modprobe nvidia_peermem, and add it "
            "to /etc/modules-load.d/",
            cause=Cause(
                id="gpudirect_unavailable",
                title="NICs have no access to GPU memory",
                place="node",
                explains=("fabric.rdma", "collectives.*", "train.*"),
                first_command="lsmod | grep -E 'nvidia_peermem|nvidia'; cat /proc/driver/nvidia/version; uname -r",
                action="fix-config",
            ),
        ),
        warning(
            "acs_redirecting_bridges",
            "== 0 devices",
            "ACS of these PCIe bridges sends traffic between GPUs and NICs through the root complex: GPUDirect is "
            "slow.",
            "Disable ACS in the BIOS, or at each boot for every bridge under acs: setpci -s BRIDGE ECAP_ACS+0x6.w=0000 "
            "(NCCL user guide, PCI Access Control Services); check: lspci -vvv | grep ACSCtl. Hosts of virtual "
            "machines need ACS: use ATS there.",
            cause=Cause(
                id="acs_redirects",
                title="PCIe ACS sends peer-to-peer traffic through the root complex",
                place="node",
                explains=("transfer.*", "fabric.rdma", "collectives.*", "train.*"),
                first_command="lspci -vvv | grep -i ACSCtl",
                action="fix-config",
            ),
        ),
        warning(
            "iommu_translates",
            "no",
            "The IOMMU translates each address of GPUs or NICs: traffic between them goes through the root complex, "
            "and host copies are slower.",
            "Kernel option iommu=pt (on Intel also intel_iommu=on), or disable the IOMMU in the BIOS; reboot; check: "
            "cat /sys/kernel/iommu_groups/*/type",
            when="architecture == x86_64",  # not Grace, where the GPU needs the translation
            cause=Cause(
                id="iommu_translates",
                title="the IOMMU translates the addresses of GPUs or NICs",
                place="node",
                explains=("transfer.*", "fabric.rdma", "collectives.*", "train.*"),
                first_command="cat /proc/cmdline; grep -H . /sys/kernel/iommu_groups/*/type | head",
                action="fix-config",
            ),
        ),
        warning(
            "governor_performance",
            "yes",
            "CPUs reduce their clocks between short loads: kernel launches, data loading and communication are slower.",
            "cpupower frequency-set -g performance; permanently: tuned-adm profile hpc-compute, or a systemd unit",
        ),
        warning(
            "turbo_enabled",
            "yes",
            "CPUs cannot exceed their base frequency: single-threaded work, such as kernel launches, is slower.",
            "Enable turbo (boost) in the BIOS; or: echo 0 > /sys/devices/system/cpu/intel_pstate/no_turbo, "
            "echo 1 > /sys/devices/system/cpu/cpufreq/boost",
        ),
        warning(
            "transparent_hugepages_enabled",
            "yes",
            "Programs cannot get huge pages: large allocations in host memory cause more page faults and TLB misses.",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; permanently: kernel option "
            "transparent_hugepage=madvise",
        ),
        warning(
            "numa_balancing_enabled",
            "no",
            "The kernel unmaps and moves pages between NUMA nodes: irregular delays in data loading and communication.",
            "sysctl -w kernel.numa_balancing=0; permanently: a file in /etc/sysctl.d/",
            cause=Cause(
                id="numa_balancing",
                title="the kernel moves pages between NUMA nodes",
                place="node",
                explains=("transfer.host", "train.*"),
                first_command="cat /proc/sys/kernel/numa_balancing",
                action="fix-config",
            ),
        ),
        warning(
            "gdrcopy_accessible",
            "yes",
            "GDRCopy's module is loaded, but this user cannot open /dev/gdrdrv: NVSHMEM and UCX copy small messages "
            "through the copy engine, with a higher latency.",
            "ls -l /dev/gdrdrv; chmod 666 /dev/gdrdrv (udev rule). Container: --device=/dev/gdrdrv",
        ),
        warning(
            "performance_counters_readable",
            "yes",
            "Only administrators may read GPU performance counters: Nsight Compute and CUPTI end with "
            "ERR_NVGPUCTRPERM.",
            "To let users profile: 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' in /etc/modprobe.d/, then "
            "reload the driver",
        ),
    ),
)
