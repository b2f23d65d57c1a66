"""Reads the facts of a GPU through NVML. A field that cannot be read is None, and the error is recorded."""

import ctypes
import math
import os
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import Any, Literal
from uuid import UUID

from seatrial.discover.file_readers import id_list
from seatrial.model import Frozen

# Errors due to the driver version: its library lacks the function or these arguments. They do not show whether the GPU
# supports the feature.
_DRIVER_MISMATCH = ("FunctionNotFound", "ArgumentVersionMismatch", "Deprecated")
_GPU_LOST = ("GpuIsLost", "ResetRequired")
_NO_PCI_ADDRESS = "FFFFFFFF:"  # NVML's address of a switch that is not visible in a virtual machine
NO_SUCH_LINK = ("NotSupported", "InvalidArgument")  # errors for a link number that the GPU does not have

_INIT_ERRORS = {
    "LibraryNotFound": "libnvidia-ml.so.1 not found: no driver installed, or a container started without GPUs",
    "DriverNotLoaded": "the NVIDIA kernel module is not loaded",
    "LibRmVersionMismatch": "kernel module and libraries have different driver versions",
    "NoPermission": "this user has no permission to open /dev/nvidiactl",
}


class NvmlUnavailableError(Exception):
    """NVML cannot be initialised; the message is the reason."""


@contextmanager
def nvml_session() -> Iterator[Any]:
    """The initialised pynvml module, shut down at the end of the block. Raises NvmlUnavailableError."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        hint = _INIT_ERRORS.get(error_kind(error))
        raise NvmlUnavailableError(f"NVML: {error}" + (f" ({hint})" if hint else "")) from error
    try:
        yield pynvml
    finally:
        with suppress(pynvml.NVMLError):  # earlier readings stay valid if the driver has failed
            pynvml.nvmlShutdown()


def error_kind(error: Exception) -> str:
    """The name of an NVML error without prefix: ``NVMLError_GpuIsLost`` → ``GpuIsLost``."""
    return type(error).__name__.removeprefix("NVMLError_")


class NvmlReader:
    """Calls NVML functions for one GPU, or for the driver, and records errors by field (such as ``power_w``)."""

    def __init__(self, nvml: Any) -> None:
        self.nvml = nvml
        self.unreadable: dict[str, str] = {}  # field → error
        self.unsupported: set[str] = set()  # fields that the GPU does not support
        self.permission_denied: set[str] = set()  # fields that this user may not read
        self.gpu_lost: str | None = None  # the error that shows that the GPU is lost
        self._skipped: frozenset[str] = frozenset()

    @property
    def unavailable(self) -> dict[str, str]:
        """Fields that this GPU does not support or this user may not read, with the error."""
        return {field: self.unreadable[field] for field in sorted(self.unsupported | self.permission_denied)}

    def skip_unreadable(self) -> None:
        """From now on do not query the fields that have failed so far."""
        self._skipped = frozenset(self.unreadable)

    def query(self, fields: str | Sequence[str], function: str, *arguments: Any) -> Any:
        """The result of an NVML function; None if it fails (recorded for each of ``fields``) or is skipped."""
        names = [fields] if isinstance(fields, str) else fields
        if names[0] in self._skipped:
            return None
        try:
            return getattr(self.nvml, function)(*arguments)
        except self.nvml.NVMLError as error:
            for field in names:
                self.record_error(field, function, error)
            return None

    def record_error(self, field: str, function: str, error: Exception) -> None:
        """Record the error of ``field``; note if the error means no support, no permission, or that the GPU is lost."""
        self.unreadable[field] = str(error)
        if error_kind(error) in _DRIVER_MISMATCH:
            self.unreadable[field] = f"{error}: the driver is too old for {function}, or too new for this nvidia-ml-py"
        if error_kind(error) == "NotSupported":  # by this GPU model; no sign of a fault
            self.unsupported.add(field)
        if error_kind(error) == "NoPermission":
            self.permission_denied.add(field)
        if error_kind(error) in _GPU_LOST:
            self.gpu_lost = str(error)


class MemoryGrowth:
    """The growth of the memory in use on GPUs, by all processes, since this object was made.

    ``bytes``: index → the largest rise above the lowest earlier reading that the calls of ``read`` have seen. A GPU
    whose first reading fails is not in it.
    """

    def __init__(self, nvml: Any, indices: Iterable[int]) -> None:
        self.bytes: dict[int, int] = {}
        self.reader = NvmlReader(nvml)
        self._handles = {index: nvml.nvmlDeviceGetHandleByIndex(index) for index in indices}
        self._lowest: dict[int, int] = {}
        self.read()
        self.reader.skip_unreadable()

    def read(self) -> None:
        for index, handle in self._handles.items():
            version = self.reader.nvml.nvmlMemory_v2
            if memory := self.reader.query(f"memory of gpu{index}", "nvmlDeviceGetMemoryInfo", handle, version):
                lowest = self._lowest[index] = min(memory.used, self._lowest.get(index, memory.used))
                self.bytes[index] = max(memory.used - lowest, self.bytes.get(index, 0))


class NvLink(Frozen):
    """One NVLink port; ``active`` is None if its state could not be read.

    ``speed_gb_s``: GB/s per direction, as `nvidia-smi nvlink -s` prints it.
    """

    link: int
    active: bool | None
    version: str | None = None
    remote: Literal["gpu", "switch", "npu"] | None = None  # npu: the NVLink unit of an IBM POWER CPU
    remote_pci: str | None = None
    speed_gb_s: float | None = None


class Fabric(Frozen):
    """The GPU's registration with the NVSwitch fabric; ``status`` is 0 if it completed without error.

    ``cluster_uuid`` and ``clique`` identify the NVLink domain: the GPUs, also of other nodes, that this GPU reaches by
    NVLink. The UUID is empty if the domain is one node.
    """

    state: Literal["not supported", "not started", "in progress", "completed"]
    status: int
    problems: tuple[str, ...] = ()
    cluster_uuid: str = ""
    clique: int | None = None

    @property
    def domain(self) -> str:
        """The NVLink domain across nodes that the GPU has joined, as ``UUID.CLIQUE``; empty if it has joined none."""
        return f"{self.cluster_uuid}.{self.clique}" if self.cluster_uuid and self.state == "completed" else ""


class GpuProcess(Frozen):
    """A process with a context on the GPU; ``memory`` is in bytes, None if the driver does not show it."""

    pid: int
    kind: Literal["compute", "graphics"]
    memory: int | None


class Gpu(Frozen):
    """One GPU as read through NVML: bytes, watts, degrees Celsius, MHz.

    Fields that could not be read are None; ``unreadable`` has the errors, ``unsupported`` the fields that this GPU
    model does not support. An idle GPU lowers ``pcie_gen`` to save power, but not ``pcie_width``.
    """

    index: int
    name: str | None = None
    uuid: str | None = None
    pci_bus_id: str | None = None  # in the format of /sys: 0000:1b:00.0
    serial: str | None = None
    vbios: str | None = None
    compute_capability: str | None = None
    memory_total_bytes: int | None = None
    memory_used_bytes: int | None = None  # without the memory that the driver reserves
    mig_mode: bool | None = None
    ecc_mode: bool | None = None
    ecc_corrected: int | None = None  # since the driver was loaded
    ecc_uncorrected: int | None = None
    ecc_corrected_aggregate: int | None = None  # over the lifetime of the GPU
    ecc_uncorrected_aggregate: int | None = None
    rows_remapped_correctable: int | None = None
    rows_remapped_uncorrectable: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    pages_retired: int | None = None  # GPUs before Ampere retire pages instead of remapping rows
    retirement_pending: bool | None = None
    pcie_gen: int | None = None
    pcie_gen_max: int | None = None  # pcie_*_max: the maximum that both the GPU and its slot support
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    nvlinks: tuple[NvLink, ...] = ()
    fabric: Fabric | None = None
    power_w: float | None = None
    power_limit_w: float | None = None
    power_default_w: float | None = None
    power_enforced_w: float | None = None
    persistence_mode: bool | None = None
    clocks_event_reasons: tuple[str, ...] | None = None  # reasons for reduced clocks
    temperature_c: int | None = None
    sm_clock_mhz: int | None = None
    sm_clock_max_mhz: int | None = None
    memory_clock_mhz: int | None = None
    memory_clock_max_mhz: int | None = None
    memory_bus_width_bits: int | None = None
    cores: int | None = None  # FP32 cores
    c2c: bool | None = None  # the path to the host is NVLink-C2C
    numa_node: int | None = None
    cpu_affinity: str | None = None  # CPUs near the GPU in the format of taskset: 0-31,64-95
    processes: tuple[GpuProcess, ...] | None = None
    unreadable: dict[str, str] = {}
    unsupported: tuple[str, ...] = ()

    @property
    def nvlink_states_readable(self) -> bool:
        """Whether the state of every NVLink could be read."""
        return all(link.active is not None for link in self.nvlinks)

    @property
    def active_nvlinks(self) -> int:
        """The number of active NVLinks."""
        return sum(link.active is True for link in self.nvlinks)


# Field → NVML function whose result needs no conversion
_UNCONVERTED = {
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
    "memory_bus_width_bits": "nvmlDeviceGetMemoryBusWidth",
    "cores": "nvmlDeviceGetNumGpuCores",
}
# Field → NVML function that returns milliwatts
_MILLIWATTS = {
    "power_limit_w": "nvmlDeviceGetPowerManagementLimit",
    "power_default_w": "nvmlDeviceGetPowerManagementDefaultLimit",
    "power_enforced_w": "nvmlDeviceGetEnforcedPowerLimit",
}
# NVML constant of a bit in the mask of clocks event reasons → its name in seatrial
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
# nvml.h: the values of NVML_NVLINK_VERSION_*, nvmlIntNvLinkDeviceType_t and NVML_GPU_FABRIC_STATE_* (by index)
_NVLINK_VERSIONS = {1: "1.0", 2: "2.0", 3: "2.2", 4: "3.0", 5: "3.1", 6: "4.0", 7: "5.0", 8: "6.0"}
_REMOTE_TYPES: dict[int, Literal["gpu", "npu", "switch"]] = {0: "gpu", 1: "npu", 2: "switch"}
_FABRIC_STATES = ("not supported", "not started", "in progress", "completed")
# nvml.h, NVML_GPU_FABRIC_HEALTH_MASK_*: first bit of each 2-bit value → meaning of the value 1
_FABRIC_HEALTH = {0: "degraded bandwidth", 2: "route recovery", 4: "route unhealthy", 6: "access timeout recovery"}
# Value of bits 8 to 11 of the same mask → meaning; only for GPUs in an NVLink domain across nodes
_FABRIC_MISCONFIGURATION = {
    2: "incorrect system GUID",
    3: "incorrect chassis serial number",
    4: "no partition",
    5: "insufficient NVLinks",
    6: "incompatible GPU firmware",
    7: "invalid location",
    8: "invalid GPU state",
}


def read_gpu(reader: NvmlReader, index: int, handle: Any) -> Gpu:
    """All fields of one GPU; errors are in ``Gpu.unreadable`` and ``reader.gpu_lost``."""

    def query(field: str, function: str, *arguments: Any) -> Any:
        return reader.query(field, function, handle, *arguments)

    nvml = reader.nvml
    fields: dict[str, Any] = {field: query(field, function) for field, function in _UNCONVERTED.items()}
    for field, function in _MILLIWATTS.items():
        milliwatts = query(field, function)
        fields[field] = None if milliwatts is None else milliwatts / 1000
    if pci := query("pci_bus_id", "nvmlDeviceGetPciInfo_v3"):
        fields["pci_bus_id"] = pci_address(pci.busId)
    if capability := query("compute_capability", "nvmlDeviceGetCudaComputeCapability"):
        fields["compute_capability"] = "{}.{}".format(*capability)
    if mig := query("mig_mode", "nvmlDeviceGetMigMode"):
        fields["mig_mode"] = mig[0]  # NVML returns (current, pending)
    fields |= read_load(reader, handle)
    fields["clocks_event_reasons"] = clocks_event_reason_names(nvml, fields["clocks_event_reasons"])
    fields["sm_clock_max_mhz"] = query("sm_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_SM)
    fields["memory_clock_mhz"] = query("memory_clock_mhz", "nvmlDeviceGetClockInfo", nvml.NVML_CLOCK_MEM)
    fields["memory_clock_max_mhz"] = query("memory_clock_max_mhz", "nvmlDeviceGetMaxClockInfo", nvml.NVML_CLOCK_MEM)
    if c2c := query("c2c", "nvmlDeviceGetC2cModeInfoV"):
        fields["c2c"] = c2c.isC2cEnabled
    fields |= _memory(reader, handle)
    fields |= _locality(reader, handle)
    fields["nvlinks"] = _nvlinks(reader, handle)
    fields["fabric"] = _fabric(reader, handle)
    fields["processes"] = _processes(reader, handle)
    unsupported = tuple(sorted(reader.unsupported))
    return Gpu(index=index, **fields, unreadable=reader.unreadable, unsupported=unsupported)


def read_load(reader: NvmlReader, handle: Any) -> dict[str, Any]:
    """Power (W), temperature (°C), SM clock (MHz) and the clocks event reasons as a bit mask."""
    nvml = reader.nvml
    milliwatts = reader.query("power_w", "nvmlDeviceGetPowerUsage", handle)
    return {
        "power_w": None if milliwatts is None else milliwatts / 1000,
        "temperature_c": reader.query("temperature_c", "nvmlDeviceGetTemperature", handle, nvml.NVML_TEMPERATURE_GPU),
        "sm_clock_mhz": reader.query("sm_clock_mhz", "nvmlDeviceGetClockInfo", handle, nvml.NVML_CLOCK_SM),
        "clocks_event_reasons": reader.query("clocks_event_reasons", "nvmlDeviceGetCurrentClocksEventReasons", handle),
    }


def clocks_event_reason_names(nvml: Any, mask: int | None) -> tuple[str, ...] | None:
    """The names of the clocks event reasons in ``mask``; None if the mask could not be read."""
    if mask is None:
        return None
    return tuple(name for constant, name in CLOCKS_EVENT_REASON_NAMES.items() if mask & getattr(nvml, constant))


def pci_address(bus_id: str) -> str:
    """A PCI address in the format of /sys: ``00000000:1B:00.0`` → ``0000:1b:00.0``."""
    domain, _, rest = bus_id.partition(":")
    return f"{int(domain, 16):04x}:{rest.lower()}"


def _memory(reader: NvmlReader, handle: Any) -> dict[str, Any]:
    """Size and use of the GPU's memory, its ECC errors, remapped rows and retired pages."""
    nvml = reader.nvml
    fields: dict[str, Any] = {}
    if memory := reader.query(
        ("memory_total_bytes", "memory_used_bytes"), "nvmlDeviceGetMemoryInfo", handle, nvml.nvmlMemory_v2
    ):
        fields |= {"memory_total_bytes": memory.total, "memory_used_bytes": memory.used}
    if ecc := reader.query("ecc_mode", "nvmlDeviceGetEccMode", handle):
        fields["ecc_mode"] = ecc[0]  # NVML returns (current, pending)
    for suffix, counter_type in (("", nvml.NVML_VOLATILE_ECC), ("_aggregate", nvml.NVML_AGGREGATE_ECC)):
        for kind in ("corrected", "uncorrected"):
            field = f"ecc_{kind}{suffix}"
            error_type = getattr(nvml, f"NVML_MEMORY_ERROR_TYPE_{kind.upper()}")
            fields[field] = reader.query(field, "nvmlDeviceGetTotalEccErrors", handle, error_type, counter_type)
    names = ("rows_remapped_correctable", "rows_remapped_uncorrectable", "remap_pending", "remap_failed")
    if rows := reader.query(names, "nvmlDeviceGetRemappedRows", handle):
        fields |= dict(zip(names, rows, strict=True))
    causes = (
        nvml.NVML_PAGE_RETIREMENT_CAUSE_MULTIPLE_SINGLE_BIT_ECC_ERRORS,
        nvml.NVML_PAGE_RETIREMENT_CAUSE_DOUBLE_BIT_ECC_ERROR,
    )
    pages = [reader.query("pages_retired", "nvmlDeviceGetRetiredPages", handle, cause) for cause in causes]
    if None not in pages:
        fields["pages_retired"] = sum(map(len, pages))
    return fields


def _locality(reader: NvmlReader, handle: Any) -> dict[str, Any]:
    """The NUMA node and the CPUs nearest to the GPU."""
    scope = reader.nvml.NVML_AFFINITY_SCOPE_NODE
    # The size of the masks in 64-bit numbers. CPU numbers can have gaps, so the masks are for at least 1024 CPUs.
    mask_size = math.ceil(max(os.cpu_count() or 1, 1024) / 64)
    fields: dict[str, Any] = {}
    cpu_mask = reader.query("cpu_affinity", "nvmlDeviceGetCpuAffinityWithinScope", handle, mask_size, scope)
    if cpu_mask is not None:
        fields["cpu_affinity"] = id_list(_bits(cpu_mask))
    node_mask = reader.query("numa_node", "nvmlDeviceGetMemoryAffinity", handle, mask_size, scope)
    if node_mask is not None:
        nearest = _bits(node_mask)
        if len(nearest) == 1:
            fields["numa_node"] = nearest[0]
        else:
            text = f"NVML lists {len(nearest)} nearest NUMA nodes ({id_list(nearest) or 'none'}), expected 1"
            reader.unreadable["numa_node"] = text
    return fields


def _bits(mask: Any) -> list[int]:
    """The positions of the bits that are set in a mask, which is a list of 64-bit numbers."""
    return [position for position in range(64 * len(mask)) if mask[position // 64] >> position % 64 & 1]


def _nvlinks(reader: NvmlReader, handle: Any) -> tuple[NvLink, ...]:
    """All NVLink ports of the GPU."""
    links = []
    for number, state in nvlink_states(reader.nvml, handle):
        if isinstance(state, Exception):
            reader.record_error(f"nvlinks[{number}]", "nvmlDeviceGetNvLinkState", state)
            links.append(NvLink(link=number, active=None))
        else:
            links.append(_active_link(reader, handle, number) if state else NvLink(link=number, active=False))
    if not links:
        reader.unreadable["nvlinks"] = "this GPU has no NVLink"
        reader.unsupported.add("nvlinks")
    return tuple(links)


def nvlink_states(nvml: Any, handle: Any) -> Iterator[tuple[int, bool | Exception]]:
    """Yield (number, whether it is active) of each NVLink port, or the error instead if the state cannot be read.

    NVML_NVLINK_MAX_LINKS exceeds the number of ports, so that the queries of the others fail.
    """
    for number in range(nvml.NVML_NVLINK_MAX_LINKS):
        try:
            yield number, bool(nvml.nvmlDeviceGetNvLinkState(handle, number))
        except nvml.NVMLError as error:
            if error_kind(error) not in NO_SUCH_LINK:
                yield number, error


def _active_link(reader: NvmlReader, handle: Any, number: int) -> NvLink:
    field = f"nvlinks[{number}]"
    version = reader.query(f"{field}.version", "nvmlDeviceGetNvLinkVersion", handle, number)
    remote = reader.query(f"{field}.remote", "nvmlDeviceGetNvLinkRemoteDeviceType", handle, number)
    pci = reader.query(f"{field}.remote_pci", "nvmlDeviceGetNvLinkRemotePciInfo", handle, number)
    speed_field = [(reader.nvml.NVML_FI_DEV_NVLINK_GET_SPEED, number)]
    speeds = reader.query(f"{field}.speed", "nvmlDeviceGetFieldValues", handle, speed_field)
    if speeds is not None and speeds[0].nvmlReturn:
        error = reader.nvml.NVMLError(speeds[0].nvmlReturn)
        reader.record_error(f"{field}.speed", "nvmlDeviceGetFieldValues", error)
        speeds = None
    return NvLink(
        link=number,
        active=True,
        version=None if version is None else _NVLINK_VERSIONS.get(version, f"unknown ({version})"),
        remote=None if remote is None else _REMOTE_TYPES.get(remote),
        remote_pci=pci_address(pci.busId) if pci and not pci.busId.startswith(_NO_PCI_ADDRESS) else None,
        speed_gb_s=speeds[0].value.uiVal / 1e3 if speeds else None,  # NVML returns MB/s
    )


def read_fabric(index: int) -> Fabric | None:
    """The fabric registration of one GPU; None if NVML cannot read it.

    Raises NvmlUnavailableError, and NVMLError if the GPU cannot be opened.
    """
    with nvml_session() as nvml:
        return _fabric(NvmlReader(nvml), nvml.nvmlDeviceGetHandleByIndex(index))


def _fabric(reader: NvmlReader, handle: Any) -> Fabric | None:
    info = reader.nvml.c_nvmlGpuFabricInfoV_t()
    reader.query("fabric", "nvmlDeviceGetGpuFabricInfoV", handle, ctypes.byref(info))
    if "fabric" in reader.unreadable:
        return None
    if info.state >= len(_FABRIC_STATES):
        reader.unreadable["fabric"] = f"unknown fabric state {info.state} from NVML"
        return None
    problems = [name for shift, name in _FABRIC_HEALTH.items() if (info.healthMask >> shift) & 3 == 1]
    uuid = bytes(info.clusterUuid)
    if any(uuid):
        problems += filter(None, [_FABRIC_MISCONFIGURATION.get((info.healthMask >> 8) & 0xF)])
    return Fabric(
        state=_FABRIC_STATES[info.state],
        status=info.status,
        problems=tuple(problems),
        cluster_uuid=str(UUID(bytes=uuid)) if any(uuid) else "",
        clique=info.cliqueId,
    )


def _processes(reader: NvmlReader, handle: Any) -> tuple[GpuProcess, ...] | None:
    """Processes with a context on the GPU; a process with compute and graphics contexts counts as graphics."""
    compute = reader.query("processes", "nvmlDeviceGetComputeRunningProcesses_v3", handle)
    graphics = reader.query("graphics_processes", "nvmlDeviceGetGraphicsRunningProcesses_v3", handle)
    if compute is None:
        return None
    graphics_pids = {process.pid for process in graphics or ()}
    process_by_pid = {process.pid: process for process in [*compute, *(graphics or ())]}
    return tuple(
        GpuProcess(pid=pid, kind="graphics" if pid in graphics_pids else "compute", memory=process.usedGpuMemory)
        for pid, process in sorted(process_by_pid.items())
    )
