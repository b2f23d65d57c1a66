from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from seatrial.bench import rank
from seatrial.model import SeatrialError


class Nvml:
    """Fake NVML of a machine with one GPU; ``masks`` None: the CPU affinity is not supported."""

    class NVMLError(Exception):
        """As pynvml.NVMLError."""

    def __init__(self, masks: list[int] | None = None) -> None:
        self._masks, self.open = masks, 0

    def nvmlInit(self) -> None:
        self.open += 1

    def nvmlShutdown(self) -> None:
        self.open -= 1

    def nvmlDeviceGetHandleByUUID(self, uuid: bytes) -> str:
        if uuid != b"GPU-abc":
            raise self.NVMLError("Not Found")
        return uuid.decode()

    def nvmlDeviceGetIndex(self, handle: str) -> int:
        return {"GPU-abc": 3}[handle]

    def nvmlDeviceGetPciInfo(self, handle: str) -> SimpleNamespace:
        assert handle == "GPU-abc"
        return SimpleNamespace(busId="00000000:9B:00.0")

    def nvmlDeviceGetCpuAffinity(self, handle: str, mask_count: int) -> list[int]:
        assert (handle, mask_count) == ("GPU-abc", 2)
        if self._masks is None:
            raise self.NVMLError("Not Supported")
        return self._masks


@pytest.fixture
def nvml(monkeypatch: pytest.MonkeyPatch) -> Nvml:
    return load(Nvml([0b101, 1 << 63]), monkeypatch)


def load(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> Nvml:
    monkeypatch.setitem(sys.modules, "pynvml", nvml)
    monkeypatch.setattr(os, "cpu_count", lambda: 65)
    load_gpu("abc", monkeypatch)
    return nvml


def load_gpu(uuid: str, monkeypatch: pytest.MonkeyPatch) -> None:
    properties = SimpleNamespace(uuid=uuid, name="NVIDIA H200 MIG 1g.18gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: properties)


def test_nvml_index_is_found_by_uuid(nvml: Nvml) -> None:
    assert rank.nvml_index("cuda:0") == 3
    assert nvml.open == 0
    assert rank.nvml_index("cpu") is None
    assert (rank.gpu_uuid("cuda:0"), rank.gpu_uuid("cpu")) == ("GPU-abc", "")


def test_pci_address_is_that_of_sys(nvml: Nvml) -> None:
    assert rank.gpu_pci_address("cuda:0") == "0000:9b:00.0"
    assert nvml.open == 0
    assert rank.gpu_pci_address("cpu") is None


def test_mig_instance_is_refused(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    load_gpu("instance", monkeypatch)
    with pytest.raises(SeatrialError, match=r"GPU-instance .*1g\.18gb.*Not Found.*MIG"):
        rank.nvml_index("cuda:0")
    assert nvml.open == 0


def test_numa_cpus_come_from_nvmls_masks(nvml: Nvml) -> None:
    assert rank.numa_cpus("cuda:0") == {0, 2, 127}


def test_unsupported_cpu_affinity_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = load(Nvml(None), monkeypatch)
    with pytest.raises(SeatrialError, match="cuda:0: Not Supported"):
        rank.numa_cpus("cuda:0")
    assert nvml.open == 0
