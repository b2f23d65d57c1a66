from __future__ import annotations

import os
import sys
from types import SimpleNamespace

import pytest
import torch

from seatrial.bench import rank
from seatrial.model import SeatrialError


class Nvml:
    """NVML of a machine with one GPU, with what is asked of it here. ``masks`` None: it does not tell."""

    class NVMLError(Exception):
        """NVML's own."""

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

    def nvmlDeviceGetCpuAffinity(self, handle: str, words: int) -> list[int]:
        assert (handle, words) == ("GPU-abc", 2)
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
    found = SimpleNamespace(uuid=uuid, name="NVIDIA H200 MIG 1g.18gb")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: found)


def test_a_gpu_is_found_by_its_uuid_and_nvml_is_closed_again(nvml: Nvml) -> None:
    assert rank.nvml_index("cuda:0") == 3
    assert nvml.open == 0
    assert rank.nvml_index("cpu") is None


def test_a_slice_that_nvml_has_not_as_a_gpu_is_named(nvml: Nvml, monkeypatch: pytest.MonkeyPatch) -> None:
    load_gpu("slice", monkeypatch)
    with pytest.raises(SeatrialError, match=r"no GPU-slice, .* 1g.18gb\): Not Found. Is it a MIG slice"):
        rank.nvml_index("cuda:0")
    assert nvml.open == 0


def test_the_cpus_beside_a_gpu_are_those_of_nvmls_masks(nvml: Nvml) -> None:
    assert rank.numa_cpus("cuda:0") == {0, 2, 127}


def test_an_nvml_that_does_not_tell_is_an_error_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    nvml = load(Nvml(None), monkeypatch)
    with pytest.raises(SeatrialError, match="which CPUs are beside cuda:0: Not Supported"):
        rank.numa_cpus("cuda:0")
    assert nvml.open == 0
