"""A strict fake of pynvml: it checks calls against the real signatures, and fails the test on an unexpected call.

Errors, constants and structures are those of the real module. The answers of the H200 were recorded with driver 580.
"""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pynvml as real
import pytest


def nvml_error(kind: str) -> Exception:
    """Returns the exception that pynvml raises: ``nvml_error("GpuIsLost")``."""
    error: Exception = getattr(real, f"NVMLError_{kind}")()
    return error


class FakeGpu:
    """A GPU with an answer per NVML call: a value, an exception or a function."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers

    def with_answers(self, **answers: Any) -> FakeGpu:
        """Returns a copy with some answers replaced."""
        return FakeGpu(**{**self.answers, **answers})

    def lost(self) -> FakeGpu:
        """Returns the GPU after it fell off the bus: it has a handle, and every call raises GpuIsLost."""
        return FakeGpu(**dict.fromkeys(self.answers, nvml_error("GpuIsLost")))


class FakeNvml:
    """``pynvml`` with these GPUs; an exception instead of a GPU is raised for its handle."""

    def __init__(
        self,
        *gpus: FakeGpu | Exception,
        init: Exception | None = None,
        ancestor: Any = real.NVML_TOPOLOGY_NODE,
        **machine: Any,
    ) -> None:
        self.gpus = gpus
        self.init = init
        self.open = 0
        self.machine = {
            "nvmlSystemGetDriverVersion": "580.159.04",
            "nvmlSystemGetCudaDriverVersion_v2": 13000,
            "nvmlDeviceGetCount": len(gpus),
            "nvmlDeviceGetHandleByIndex": lambda index: _give(gpus[index]),
            "nvmlDeviceGetTopologyCommonAncestor": lambda _gpu, _other: _give(ancestor),
            **machine,
        }

    def install(self, monkeypatch: pytest.MonkeyPatch) -> FakeNvml:
        monkeypatch.setitem(sys.modules, "pynvml", self)
        return self

    def __getattr__(self, name: str) -> Any:
        if not hasattr(real, name):
            raise AssertionError(f"pynvml has no {name}")
        value = getattr(real, name)
        return self._function(name, value) if inspect.isfunction(value) else value

    def _function(self, name: str, original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            inspect.signature(original).bind(*arguments)
            if name == "nvmlInit":
                return self._init()
            if not self.open:
                raise nvml_error("Uninitialized")
            if name == "nvmlShutdown":
                self.open -= 1
                return None
            if name in self.machine:
                return _give(self.machine[name], *arguments)
            gpu = arguments[0] if arguments else None
            if not isinstance(gpu, FakeGpu) or name not in gpu.answers:
                raise AssertionError(f"unexpected NVML call {name}{arguments}")
            return _give(gpu.answers[name], *arguments[1:])

        return call

    def _init(self) -> None:
        if self.init:
            raise self.init
        self.open += 1


def _give(answer: Any, *arguments: Any) -> Any:
    if isinstance(answer, Exception):
        raise answer
    return answer(*arguments) if callable(answer) else answer


def processes(*pids: tuple[int, int | None]) -> list[Any]:
    """Returns the answer to a process query from (pid, bytes) pairs."""
    return [real.nvmlFriendlyObject({"pid": pid, "usedGpuMemory": memory}) for pid, memory in pids]


def fabric(
    state: int, status: int = 0, health_mask: int = 0, *, uuid: bytes = bytes(16), clique: int = 0
) -> Callable[[Any], int]:
    """Returns a fake of nvmlDeviceGetGpuFabricInfoV, which fills the given structure."""

    def write(reference: Any) -> int:
        info = reference._obj
        assert info.version == real.nvmlGpuFabricInfo_v2
        info.state, info.status, info.healthMask = state, status, health_mask
        info.clusterUuid[:], info.cliqueId = list(uuid), clique
        return int(real.NVML_SUCCESS)

    return write


def links(count: int, *, down: Sequence[int] = (), remote: int = real.NVML_NVLINK_DEVICE_TYPE_SWITCH) -> dict[str, Any]:
    """Returns the NVLink answers of a GPU with ``count`` links, of which ``down`` are inactive."""

    def port(answer: Any) -> Callable[[int], Any]:
        return lambda link: _give(answer, link) if link < count else _give(nvml_error("InvalidArgument"))

    return {
        "nvmlDeviceGetNvLinkState": port(lambda link: int(link not in down)),
        "nvmlDeviceGetNvLinkVersion": port(real.NVML_NVLINK_VERSION_4_0),
        "nvmlDeviceGetNvLinkRemoteDeviceType": port(remote),
        "nvmlDeviceGetNvLinkRemotePciInfo": port(pci("FFFFFFFF:FF:FF.0")),
        "nvmlDeviceGetFieldValues": _speeds,
    }


def _speeds(queries: list[tuple[int, int]]) -> Any:
    values = (real.c_nvmlFieldValue_t * len(queries))()
    for value, (field, link) in zip(values, queries, strict=True):
        assert field == real.NVML_FI_DEV_NVLINK_GET_SPEED
        value.fieldId, value.scopeId, value.nvmlReturn, value.value.uiVal = field, link, real.NVML_SUCCESS, 26562
    return values


def pci(bus_id: str) -> Any:
    info = real.nvmlPciInfo_t()
    info.busId = bus_id.encode()
    return info


def make_pci_devices(
    root: Path,
    *addresses: str,
    driver: str | None = "nvidia",
    device_nodes: bool = True,
    vendor: str = "0x10de",
    kind: str = "0x030200",
) -> Path:
    """Writes PCI devices with driver below ``root``; those of the NVIDIA driver with their /proc and /dev entries."""
    for address in addresses:
        device = root / "sys/bus/pci/devices" / address
        device.mkdir(parents=True)
        (device / "vendor").write_text(f"{vendor}\n")
        (device / "class").write_text(f"{kind}\n")
        if driver:
            (device / "driver").symlink_to(f"../../../bus/pci/drivers/{driver}")
        if driver == "nvidia" and device_nodes:
            folder = root / "proc/driver/nvidia/gpus"
            minor = len(list(folder.iterdir())) if folder.exists() else 0
            (folder / address).mkdir(parents=True)
            (folder / address / "information").write_text(f"Bus Location: \t {address}\nDevice Minor: \t {minor}\n")
            (root / "dev").mkdir(exist_ok=True)
            (root / f"dev/nvidia{minor}").touch()
    return root


def h200(index: int = 0, **answers: Any) -> FakeGpu:
    """Returns an idle, healthy H200 of an HGX board with 18 links to NVSwitches."""
    return FakeGpu(
        **{
            "nvmlDeviceGetName": "NVIDIA H200",
            "nvmlDeviceGetUUID": f"GPU-{index}0000000-aaaa-bbbb-cccc-{index:012d}",
            "nvmlDeviceGetSerial": f"16500000000{index:02d}",
            "nvmlDeviceGetVbiosVersion": "96.00.A5.00.1A",
            "nvmlDeviceGetPciInfo_v3": pci(f"00000000:{0x1B + index:02X}:00.0"),
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMemoryInfo": memory(150754820096, used=0),
            "nvmlDeviceGetMigMode": [0, 0],
            "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetTotalEccErrors": 0,
            "nvmlDeviceGetRemappedRows": (0, 0, 0, 0),
            "nvmlDeviceGetRetiredPages": nvml_error("NotSupported"),
            "nvmlDeviceGetRetiredPagesPendingStatus": nvml_error("NotSupported"),
            "nvmlDeviceGetCurrPcieLinkGeneration": 5,
            "nvmlDeviceGetMaxPcieLinkGeneration": 5,
            "nvmlDeviceGetCurrPcieLinkWidth": 16,
            "nvmlDeviceGetMaxPcieLinkWidth": 16,
            **links(18),
            "nvmlDeviceGetGpuFabricInfoV": fabric(real.NVML_GPU_FABRIC_STATE_COMPLETED),
            "nvmlDeviceGetPowerUsage": 79798,
            "nvmlDeviceGetPowerManagementLimit": 700000,
            "nvmlDeviceGetPowerManagementDefaultLimit": 700000,
            "nvmlDeviceGetEnforcedPowerLimit": 700000,
            "nvmlDeviceGetPersistenceMode": 1,
            "nvmlDeviceGetCurrentClocksEventReasons": real.nvmlClocksEventReasonGpuIdle,
            "nvmlDeviceGetTemperature": 34,
            "nvmlDeviceGetClockInfo": lambda clock: {real.NVML_CLOCK_SM: 345, real.NVML_CLOCK_MEM: 3201}[clock],
            "nvmlDeviceGetMaxClockInfo": lambda clock: {real.NVML_CLOCK_SM: 1980, real.NVML_CLOCK_MEM: 3201}[clock],
            "nvmlDeviceGetMemoryBusWidth": 6016,
            "nvmlDeviceGetNumGpuCores": 16896,
            "nvmlDeviceGetC2cModeInfoV": real.c_nvmlC2cModeInfo_v1_t(0),
            "nvmlDeviceGetCpuAffinityWithinScope": lambda size, _scope: [0xFFFFFFFF, 0xF, *[0] * (size - 2)],
            "nvmlDeviceGetMemoryAffinity": lambda size, _scope: [1 << index // 2, *[0] * (size - 1)],
            "nvmlDeviceGetComputeRunningProcesses_v3": [],
            "nvmlDeviceGetGraphicsRunningProcesses_v3": [],
            **answers,
        }
    )


def geforce(index: int = 0, **answers: Any) -> FakeGpu:
    """Returns a desktop GPU without ECC, row remapping, NVLink, fabric and MIG."""
    missing = dict.fromkeys(
        (
            *("nvmlDeviceGetSerial", "nvmlDeviceGetMigMode", "nvmlDeviceGetEccMode", "nvmlDeviceGetTotalEccErrors"),
            *("nvmlDeviceGetRemappedRows", "nvmlDeviceGetNvLinkState", "nvmlDeviceGetGpuFabricInfoV"),
        ),
        nvml_error("NotSupported"),
    )
    power = dict.fromkeys(
        (
            "nvmlDeviceGetPowerManagementLimit",
            "nvmlDeviceGetPowerManagementDefaultLimit",
            "nvmlDeviceGetEnforcedPowerLimit",
        ),
        450000,
    )
    return h200(
        index,
        **{
            "nvmlDeviceGetName": "NVIDIA GeForce RTX 4090",
            "nvmlDeviceGetCudaComputeCapability": (8, 9),
            "nvmlDeviceGetMemoryInfo": memory(25757220864, used=396 * 2**20),
            "nvmlDeviceGetCurrPcieLinkGeneration": 1,
            "nvmlDeviceGetMaxPcieLinkGeneration": 4,
            **missing,
            **power,
            **answers,
        },
    )


def memory(total: int, used: int) -> Callable[[int], Any]:
    """Returns a fake of nvmlDeviceGetMemoryInfo version 2, which reports reserved memory separately."""

    def answer(version: int) -> Any:
        assert version == real.nvmlMemory_v2
        return real.c_nvmlMemory_v2_t(version, total, 0, total - used, used)

    return answer
