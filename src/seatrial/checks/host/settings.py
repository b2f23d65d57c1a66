"""host.settings: settings of kernel, CPU, PCIe and NVIDIA driver that make training slow or break GPUDirect."""

from __future__ import annotations

import platform
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

from seatrial.checks.base import NOT_SUPPORTED, PERMISSION_DENIED, Check, Context, Options, RuleFact, facts, metric
from seatrial.model import NOT_REPORTED, Observation, Outcome, Phase, Rule, Scope

if TYPE_CHECKING:
    from seatrial.discover.settings import Setting


class SettingMetric(NamedTuple):
    """The metric of a setting. ``from_setting``: computes the metric's value from the setting's value."""

    name: str
    unit: Literal["bool", "devices"]
    from_setting: Callable[[Any], float]


METRIC_BY_SETTING: Mapping[str, SettingMetric] = {
    "kernel_module": SettingMetric("open_kernel_module", "bool", lambda kind: kind == "open"),
    "gpudirect_rdma": SettingMetric("gpudirect_rdma_available", "bool", lambda interface: interface != "none"),
    "acs": SettingMetric("acs_redirecting_bridges", "devices", len),
    "iommu": SettingMetric("iommu_translates", "bool", lambda mode: mode == "translated"),
    "cpu_governor": SettingMetric("governor_performance", "bool", lambda governors: governors == "performance"),
    "turbo": SettingMetric("turbo_enabled", "bool", bool),
    "transparent_hugepages": SettingMetric("transparent_hugepages_enabled", "bool", lambda mode: mode != "never"),
    "numa_balancing": SettingMetric("numa_balancing_enabled", "bool", bool),
    "gdrcopy": SettingMetric("gdrcopy_accessible", "bool", bool),
    "performance_counters": SettingMetric("performance_counters_readable", "bool", bool),
}


def measure(context: Context, _options: Options) -> Iterator[Observation]:
    """Yield each setting, its status, and the metric of each readable setting."""
    from seatrial.discover import fabric, settings
    from seatrial.discover.settings import Setting

    context.progress("reading /proc and /sys")
    node = settings.read(context.root)
    yield from facts(
        {
            "gpu_node": "yes" if node.gpu_node else "no",
            "rdma_present": "yes" if fabric.read_rdma(context.root).devices else "no",
            "architecture": platform.machine(),
        }
    )
    unreadable: dict[str, str] = {}  # metric → why its setting could not be read
    for name in type(node).model_fields:
        setting = getattr(node, name)
        if not isinstance(setting, Setting):
            continue
        yield from facts({name: setting.value, f"{name}_status": _status(setting)})
        setting_metric = METRIC_BY_SETTING.get(name)
        if setting_metric and setting.status == "readable":
            value = setting_metric.from_setting(setting.value)
            yield metric(setting_metric.name, value, setting_metric.unit, context.node)
        elif setting_metric and setting.status == "unreadable":
            unreadable[setting_metric.name] = setting.reason
    yield from facts({NOT_REPORTED: unreadable})


def _status(setting: Setting) -> str:
    """The fact SETTING_status.

    An unreadable setting has the status ``readable`` too: the rule then applies, and the missing metric is an ERROR.
    """
    states = {"not_supported": NOT_SUPPORTED, "permission_denied": PERMISSION_DENIED}
    return f"{states[setting.status]}: {setting.reason}" if setting.status in states else "readable"


def _rule(setting: str, expect: str, meaning: str, fix: str, applies_if: Mapping[str, str] | None = None) -> Rule:
    """A rule on one setting of a GPU node. A violation is WARN, since training works with any value of the setting."""
    return Rule(
        metric=METRIC_BY_SETTING[setting].name,
        expect=expect,
        outcome_if_violated=Outcome.WARN,
        applies_if={"gpu_node": "yes", **(applies_if or {}), f"{setting}_status": "readable"},
        evidence_facts=(setting,),
        meaning=meaning,
        fix=fix,
    )


RULES = (
    _rule(
        "kernel_module",
        "== 1 bool",
        "The proprietary kernel module is loaded. Blackwell GPUs and dma-buf need the open one.",
        "Install the open kernel module (nvidia-open, or --kernel-module-type=open) and reboot; then: cat "
        "/proc/driver/nvidia/version",
    ),
    _rule(
        "gpudirect_rdma",
        "== 1 bool",
        "NICs cannot reach GPU memory: dma-buf needs the open kernel module and kernel 5.12 or newer, otherwise "
        "nvidia_peermem must be loaded. NCCL copies through host memory instead, at a part of the bandwidth.",
        "Install the open kernel module; or: modprobe nvidia_peermem, and add it to /etc/modules-load.d/",
        {"rdma_present": "yes"},
    ),
    _rule(
        "acs",
        "== 0 devices",
        "ACS of these PCIe bridges sends traffic between GPUs and NICs through the root complex: GPUDirect is slow.",
        "Disable ACS in the BIOS, or at each boot for every bridge in fact acs: setpci -s BRIDGE ECAP_ACS+0x6.w=0000; "
        "check: lspci -vvv | grep ACSCtl. Hosts of virtual machines need ACS: use ATS there.",
    ),
    _rule(
        "iommu",
        "== 0 bool",
        "The IOMMU translates each address of GPUs or NICs: traffic between them goes through the root complex, and "
        "host copies are slower.",
        "Kernel option iommu=pt (on Intel also intel_iommu=on), or disable the IOMMU in the BIOS; reboot; check: "
        "cat /sys/kernel/iommu_groups/*/type",
        {"architecture": "x86_64"},  # not Grace, where the GPU needs the translation
    ),
    _rule(
        "cpu_governor",
        "== 1 bool",
        "CPUs reduce their clocks between short loads: kernel launches, data loading and communication are slower.",
        "cpupower frequency-set -g performance; permanently: tuned-adm profile hpc-compute, or a systemd unit",
    ),
    _rule(
        "turbo",
        "== 1 bool",
        "CPUs cannot exceed their base frequency: single-threaded work, such as kernel launches, is slower.",
        "Enable turbo (boost) in the BIOS; or: echo 0 > /sys/devices/system/cpu/intel_pstate/no_turbo, "
        "echo 1 > /sys/devices/system/cpu/cpufreq/boost",
    ),
    _rule(
        "transparent_hugepages",
        "== 1 bool",
        "Programs cannot get huge pages: large allocations in host memory cause more page faults and TLB misses.",
        "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled; permanently: kernel option "
        "transparent_hugepage=madvise",
    ),
    _rule(
        "numa_balancing",
        "== 0 bool",
        "The kernel unmaps and moves pages between NUMA nodes: irregular delays in data loading and communication.",
        "sysctl -w kernel.numa_balancing=0; permanently: a file in /etc/sysctl.d/",
    ),
    _rule(
        "gdrcopy",
        "== 1 bool",
        "GDRCopy's module is loaded, but this user cannot open /dev/gdrdrv: NVSHMEM and UCX copy small messages "
        "through the copy engine, with a higher latency.",
        "ls -l /dev/gdrdrv; chmod 666 /dev/gdrdrv (udev rule). Container: --device=/dev/gdrdrv",
    ),
    _rule(
        "performance_counters",
        "== 1 bool",
        "Only administrators may read GPU performance counters: Nsight Compute and CUPTI end with ERR_NVGPUCTRPERM.",
        "To let users profile: 'options nvidia NVreg_RestrictProfilingToAdminUsers=0' in /etc/modprobe.d/, then "
        "reload the driver",
    ),
)

_READABLE = RuleFact(values="readable", permission_denied=Outcome.SKIP)  # SKIP, not UNJUDGED: most users are not root

CHECK = Check(
    name="host.settings",
    title="Settings of kernel, CPU, PCIe and NVIDIA driver",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    rights="root, to read ACS of PCIe bridges; without it this metric is SKIP",
    metrics={row.name: row.unit for row in METRIC_BY_SETTING.values()},
    rules=RULES,
    rule_facts={
        "gpu_node": RuleFact(reason="no NVIDIA GPU on this machine"),
        "rdma_present": RuleFact(reason="no RDMA device"),
        "architecture": RuleFact(values=r"\w+", reason="the rule does not apply to the architecture {}"),
        **{f"{setting}_status": _READABLE for setting in METRIC_BY_SETTING},
    },
    measure=measure,
    limit_s=60,
)
