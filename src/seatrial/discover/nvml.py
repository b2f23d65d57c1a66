"""NVML, asked one question at a time. Any of them may be refused: then the reason is kept in place of the answer."""

from __future__ import annotations

import ctypes
import math
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal

from seatrial.model import Frozen

# A refusal that speaks of the kind of GPU, not of its health: a GeForce has no ECC.
_NOT_HERE = ("NotSupported",)
# A refusal that speaks of the driver: its library does not have the function, or not with these arguments. Whether the
# GPU has the thing that was asked for is not known then.
_OTHER_DRIVER = ("FunctionNotFound", "ArgumentVersionMismatch", "Deprecated")
_GONE = ("GpuIsLost", "ResetRequired")
_NO_PCI_ADDRESS = "FFFFFFFF:"  # of a switch that a virtual machine does not see
_NO_SUCH_LINK = ("NotSupported", "InvalidArgument")

_WHY_NO_INIT = {
    "LibraryNotFound": "libnvidia-ml.so.1 is not here: no driver is installed, or a container was started without GPUs",
    "DriverNotLoaded": "the NVIDIA kernel module is not loaded",
    "LibRmVersionMismatch": "kernel module and libraries are of different driver versions",
    "NoPermission": "this user may not open /dev/nvidiactl",
}


class NvmlUnavailableError(Exception):
    """NVML cannot be used at all. The message is the reason."""


@contextmanager
def nvml_session() -> Iterator[Any]:
    """The pynvml module, initialised, and shut down afterwards. Raises NvmlUnavailableError."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        hint = _WHY_NO_INIT.get(error_kind(error))
        raise NvmlUnavailableError(f"NVML: {error}" + (f" ({hint})" if hint else "")) from error
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):  # what was read stands, even if the driver died meanwhile
            pynvml.nvmlShutdown()


def error_kind(error: Exception) -> str:
    """``NVMLError_GpuIsLost`` → ``GpuIsLost``."""
    return type(error).__name__.removeprefix("NVMLError_")


class NvmlReader:
    """The questions put to one GPU (or to the driver), and what it refused to answer."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.unreadable: dict[str, str] = {}
        self.unsupported: set[str] = set()
        self.permission_denied: set[str] = set()  # to this user
        self.gpu_lost: str | None = None  # why the GPU cannot be used any more
        self._muted: frozenset[str] = frozenset()

    @property
    def unavailable(self) -> dict[str, str]:
        """The fields that this kind of GPU does not have, or this user may not read, with the reason."""
        return {field: self.unreadable[field] for field in sorted(self.unsupported | self.permission_denied)}

    def skip_unreadable(self) -> None:
        """Do not ask again for the fields that were refused so far."""
        self._muted = frozenset(self.unreadable)

    def query(self, fields: str | Sequence[str], function: str, *arguments: Any) -> Any:
        """The answer of ``function``; None when it is refused, with the reason in ``unread`` of each field."""
        names = [fields] if isinstance(fields, str) else fields
        if names[0] in self._muted:
            return None
        try:
            return getattr(self.nvml, function)(*arguments)
        except self.nvml.NVMLError as error:
            for field in names:
                self.record_error(field, function, error)
            return None

    def record_error(self, field: str, function: str, error: Exception) -> None:
        self.unreadable[field] = str(error)
        if error_kind(error) in _OTHER_DRIVER:
            self.unreadable[field] = f"{error}: the driver is too old for {function}, or too new for this nvidia-ml-py"
        if error_kind(error) in _NOT_HERE:
            self.unsupported.add(field)
        if error_kind(error) == "NoPermission":
            self.permission_denied.add(field)
        if error_kind(error) in _GONE:
            self.gpu_lost = str(error)


class NvLink(Frozen):
    """One NVLink port. ``active`` is None where NVML would not say."""

    link: int
    active: bool | None
    version: str | None = None
    remote: Literal["gpu", "switch", "npu"] | None = None
    remote_pci: str | None = None
    speed_mbps: int | None = None  # MB/s, one way


class Fabric(Frozen):
    """The GPU's membership of an NVSwitch fabric. ``status`` is 0 when the fabric manager finished without error."""

    state: Literal["not supported", "not started", "in progress", "completed"]
    status: int
    problems: tuple[str, ...] = ()


class GpuProcess(Frozen):
    """A process that holds a context on the GPU. ``memory`` in bytes, None where the driver hides it."""

    pid: int
    kind: Literal["compute", "graphics"]
    memory: int | None


class Gpu(Frozen):
    """What NVML said of one GPU. A field that is None was refused: ``unread`` says why.

    ``unsupported`` are those of the refused fields that this kind of GPU simply does not have.
    Sizes are bytes, powers watts, temperatures degrees Celsius, clocks MHz. Judge ``pcie_width`` at any time, but
    ``pcie_gen`` only under load: an idle GPU lowers its PCIe generation to save power.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None  # as /sys writes it: 0000:1b:00.0
    serial: str | None = None
    vbios: str | None = None
    compute_capability: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None  # without what the driver reserves for itself
    mig_mode: bool | None = None
    ecc_mode: bool | None = None
    ecc_corrected: int | None = None  # since the last driver load
    ecc_uncorrected: int | None = None
    ecc_corrected_ever: int | None = None
    ecc_uncorrected_ever: int | None = None
    rows_remapped_correctable: int | None = None
    rows_remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_retired: int | None = None  # what GPUs before Ampere have in place of row remapping
    retirement_pending: bool | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None  # of card and slot together
    nvlinks: tuple[NvLink, ...] = ()
    fabric: Fabric | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_enforced_w: float | None = None
    persistence_mode: bool | None = None
    clocks_event_reasons: tuple[str, ...] | None = None  # why clocks are lower than they could be
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    numa_node: int | None = None
    cpu_affinity: str | None = None  # CPUs near the GPU, as taskset writes them: 0-31,64-95
    processes: tuple[GpuProcess, ...] | None = None
    unreadable: dict[str, str] = {}
    unsupported: tuple[str, ...] = ()

    @property
    def nvlink_states_readable(self) -> bool:
        """Whether NVML told the state of every NVLink that it counts."""
        return all(link.active is not None for link in self.nvlinks)

    @property
    def active_nvlinks(self) -> int:
        """How many NVLinks are active."""
        return sum(link.active is True for link in self.nvlinks)


# Fields whose answer is stored as it is.
_PLAIN = {
    "name": "nvmlDeviceGetName",
    "uuid": "nvmlDeviceGetUUID",
    "serial": "nvmlDeviceGetSerial",
    "vbios": "nvmlDeviceGetVbiosVersion",
    "pcie_gen": "nvmlDeviceGetCurrPcieLinkGeneration",
    "pcie_gen_max": "nvmlDeviceGetMaxPcieLinkGeneration",
    "pcie_width": "nvmlDeviceGetCurrPcieLinkWidth",
    "pcie_width_max": "nvmlDeviceGetMaxPcieLinkWidth",
    "persistence_mode": "nvmlDeviceGetPersistenceMode",
    "retirement_pending": "nvmlDeviceGetRetiredPagesPendingStatus",
}
_MILLIWATTS = {
    "power_limit_w": "nvmlDeviceGetPowerManagementLimit",
    "power_default_w": "nvmlDeviceGetPowerManagementDefaultLimit",
    "power_enforced_w": "nvmlDeviceGetEnforcedPowerLimit",
}
CLOCKS_EVENT_REASON_NAMES = {
    "nvmlClocksEventReasonGpuIdle": "idle",
    "nvmlClocksEventReasonApplicationsClocksSetting": "application clocks",
    "nvmlClocksEventReasonSwPowerCap": "software power cap",
    "nvmlClocksEventReasonHwSlowdown": "hardware slowdown",
    "nvmlClocksEventReasonSyncBoost": "sync boost",
    "nvmlClocksEventReasonSwThermalSlowdown": "software thermal slowdown",
    "nvmlClocksEventReasonHwThermalSlowdown": "hardware thermal slowdown",
    "nvmlClocksEventReasonHwPowerBrakeSlowdown": "hardware power brake",
    "nvmlClocksEventReasonDisplayClockSetting": "display clocks",
}
_NVLINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
_REMOTES: dict[int, Literal["gpu", "npu", "switch"]] = {0: "gpu", 1: "npu", 2: "switch"}
_FABRIC_STATES = ("not supported", "not started", "in progress", "completed")
# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: where each answer stands (2 bits, 1 is yes), and what a yes means.
_FABRIC_HEALTH = {0: "degraded bandwidth", 2: "route recovery", 4: "route unhealthy", 6: "access timeout recovery"}


def read_gpu(interview: NvmlReader, index: int, handle: Any) -> Gpu:
    """Everything NVML tells of one GPU. Never raises for a refusal: see Gpu.unread, and ``interview.gone``."""

    def ask(field: str, function: str, *arguments: Any) -> Any:
        return interview.query(field, function, handle, *arguments)

    nvml = interview.nvml
    fields: dict[str, Any] = {field: ask(field, function) for field, function in _PLAIN.items()}
    for field, function in _MILLIWATTS.items():
        milliwatts = ask(field, function)
        fields[field] = None if milliwatts is None else milliwatts / 1000
    if pci := ask("pci_bus_id", "nvmlDeviceGetPciInfo_v3"):
        fields["pci_bus_id"] = pci_address(pci.busId)
    if capability := ask("compute_capability", "nvmlDeviceGetCudaComputeCapability"):
        fields["compute_capability"] = "{}.{}".format(*capability)
    if mig := ask("mig_mode", "nvmlDeviceGetMigMode"):
        fields["mig_mode"] = mig[0]
    fields |= read_load(interview, handle)
    fields["clocks_event_reasons"] = clocks_event_reason_names(nvml, fields["clocks_event_reasons"])
    fields["sm_clock_max_mhz"] = ask("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
    fields["memory_clock_mhz"] = ask("memory_clock_mhz", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)
    fields |= _memory(interview, handle)
    fields |= _locality(interview, handle)
    fields["nvlinks"] = _nvlinks(interview, handle)
    fields["fabric"] = _fabric(interview, handle)
    fields["processes"] = _processes(interview, handle)
    return Gpu(
        index=index,
        **fields,
        unreadable=interview.unreadable,
        unsupported=tuple(sorted(interview.unsupported)),
    )


def read_load(interview: NvmlReader, handle: Any) -> dict[str, Any]:
    """Watts, degrees Celsius, MHz, and the reasons for lower clocks as NVML's bits: what load changes on a GPU."""
    nvml = interview.nvml
    milliwatts = interview.query("power_w", "nvmlDeviceGetPowerUsage", handle)
    return {
        "power_w": None if milliwatts is None else milliwatts / 1000,
        "temperature_c": interview.query(
            "temperature_c", "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU
        ),
        "sm_clock_mhz": interview.query("sm_clock_mhz", "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "clocks_event_reasons": interview.query(
            "clocks_event_reasons", "nvmlDeviceGetCurrentClocksEventReasons", handle
        ),
    }


def clocks_event_reason_names(nvml: Any, mask: int | None) -> tuple[str, ...] | None:
    """The reasons for lower clocks by name; None where NVML refused its bits."""
    if mask is None:
        return None
    return tuple(name for constant, name in CLOCKS_EVENT_REASON_NAMES.items() if mask & getattr(nvml, constant))


def pci_address(bus_id: str) -> str:
    """NVML's ``00000000:1B:00.0`` as /sys writes it: ``0000:1b:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _memory(interview: NvmlReader, handle: Any) -> dict[str, Any]:
    """Size and use of the GPU's memory, its error counts and its repairs."""
    nvml = interview.nvml
    fields: dict[str, Any] = {}
    if memory := interview.query(
        ("memory_total_bytes", "memory_used_bytes"), "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2
    ):
        fields |= {"memory_total_bytes": memory.total, "memory_used_bytes": memory.used}
    if ecc := interview.query("ecc_mode", "nvmlDeviceGetEccMode", handle):
        fields["ecc_mode"] = ecc[0]
    for since, counter in (("", nvml.NVML_VOLATILE_ECC), ("_ever", nvml.NVML_AGGREGATE_ECC)):
        for error in ("corrected", "uncorrected"):
            field, kind = f"ecc_{error}{since}", getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{error.upper()}")
            fields[field] = interview.query(field, "nvmlDeviceGetTotalEccErrors", handle, kind, counter)
    names = ("rows_remapped_correctable", "rows_remapped_uncorrectable", "remap_pending", "remap_failed")
    if rows := interview.query(names, "nvmlDeviceGetRemappedRows", handle):
        fields |= dict(zip(names, rows, strict=True))
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    pages = [interview.query("pages_retired", "nvmlDeviceGetRetiredPages", handle, cause) for cause in causes]
    if None not in pages:
        fields["pages_retired"] = sum(map(len, pages))
    return fields


def _locality(interview: NvmlReader, handle: Any) -> dict[str, Any]:
    """The NUMA node and the CPUs that are nearest to the GPU."""
    scope = interview.nvml.NVML_AFFINITY_SCOPE_NODE
    words = math.ceil(max(os.cpu_count() or 1, 1024) / 64)  # CPU numbers may have gaps: leave room for them
    fields: dict[str, Any] = {}
    cpus = interview.query("cpu_affinity", "nvmlDeviceGetCpuAffinityWithinScope", handle, words, scope)
    if cpus is not None:
        fields["cpu_affinity"] = _ranges(_bits(cpus))
    nodes = interview.query("numa_node", "nvmlDeviceGetMemoryAffinity", handle, words, scope)
    if nodes is not None:
        near = _bits(nodes)
        fields["numa_node"] = near[0] if len(near) == 1 else None
        if len(near) != 1:
            interview.unreadable["numa_node"] = f"NVML names {len(near)} nearest NUMA nodes: {_ranges(near) or 'none'}"
    return fields


def _bits(words: Any) -> list[int]:
    return [64 * place + bit for place, word in enumerate(words) for bit in range(64) if word >> bit & 1]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 8] → ``0-2,8``."""
    starts = [number for number in numbers if number - 1 not in numbers]
    ends = [number for number in numbers if number + 1 not in numbers]
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in zip(starts, ends, strict=True))


def _nvlinks(interview: NvmlReader, handle: Any) -> tuple[NvLink, ...]:
    """Every port that the GPU has. NVML counts up to a bound above what any GPU has, and refuses the surplus."""
    nvml, links = interview.nvml, []
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            active = bool(nvml.nvmlDeviceGetNvLinkState(handle, number))
        except nvml.NVMLError as error:
            if error_kind(error) in _NO_SUCH_LINK:
                continue
            interview.record_error(f"nvlinks[{number}]", "nvmlDeviceGetNvLinkState", error)
            links.append(NvLink(link=number, active=None))
            continue
        links.append(_active_link(interview, handle, number) if active else NvLink(link=number, active=False))
    if not links:
        interview.unreadable["nvlinks"] = "this GPU has no NVLink"
        interview.unsupported.add("nvlinks")
    return tuple(links)


def _active_link(interview: NvmlReader, handle: Any, number: int) -> NvLink:
    field = f"nvlinks[{number}]"
    version = interview.query(f"{field}.version", "nvmlDeviceGetNvLinkVersion", handle, number)
    remote = interview.query(f"{field}.remote", "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
    pci = interview.query(f"{field}.remote_pci", "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
    question = [(interview.nvml.NVML_FI_DEV_NVLINK_GET_SPEED, number)]
    speeds = interview.query(f"{field}.speed", "nvmlDeviceGetFieldValues", handle, question)
    if speeds is not None and speeds[0].nvmlReturn:
        error = interview.nvml.NVMLError(speeds[0].nvmlReturn)
        interview.record_error(f"{field}.speed", "nvmlDeviceGetFieldValues", error)
        speeds = None
    return NvLink(
        link=number,
        active=True,
        version=None if version is None else _NVLINK_VERSIONS.get(version, f"unknown ({version})"),
        remote=None if remote is None else _REMOTES.get(remote),
        remote_pci=pci_address(pci.busId) if pci and not pci.busId.startswith(_NO_PCI_ADDRESS) else None,
        speed_mbps=speeds[0].value.uiVal if speeds else None,
    )


def _fabric(interview: NvmlReader, handle: Any) -> Fabric | None:
    info = interview.nvml.c_nvmlGpuFabricInfoV_t()
    interview.query("fabric", "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    if "fabric" in interview.unreadable:
        return None
    if info.state >= len(_FABRIC_STATES):
        interview.unreadable["fabric"] = f"NVML reports fabric state {info.state}, which is not known here"
        return None
    problems = tuple(name for shift, name in _FABRIC_HEALTH.items() if info.healthMask >> shift & 3 == 1)
    return Fabric(state=_FABRIC_STATES[info.state], status=info.status, problems=problems)


def _processes(interview: NvmlReader, handle: Any) -> tuple[GpuProcess, ...] | None:
    """Processes with a context. One that draws as well (a desktop) counts as graphics."""
    compute = interview.query("processes", "nvmlDeviceGetComputeRunningProcesses_v3", handle)
    graphics = interview.query("graphics_processes", "nvmlDeviceGetGraphicsRunningProcesses_v3", handle)
    if compute is None:
        return None
    drawing = {process.pid for process in graphics or ()}
    found = {process.pid: process for process in [*compute, *(graphics or ())]}
    return tuple(
        GpuProcess(pid=pid, kind="graphics" if pid in drawing else "compute", memory=process.usedGpuMemory)
        for pid, process in sorted(found.items())
    )
