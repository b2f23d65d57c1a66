"""Facts about this rank's device, and gather and barrier over all ranks."""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from seatrial.model import SeatrialError

T = TypeVar("T")


def nvml_index(device: str) -> int | None:
    """NVML's index of a CUDA device, found by UUID: CUDA_VISIBLE_DEVICES renumbers devices. None on a CPU."""
    if not device.startswith("cuda"):
        return None
    with _nvml(device) as (nvml, handle):
        return int(nvml.nvmlDeviceGetIndex(handle))


def gpu_uuid(device: str) -> str:
    """The UUID of a CUDA device, as nvidia-smi shows it; empty on a CPU."""
    return f"GPU-{torch.cuda.get_device_properties(device).uuid}" if device.startswith("cuda") else ""


def gpu_pci_address(device: str) -> str | None:
    """The PCI address of a CUDA device as in /sys, ``0000:18:00.0``; None on a CPU."""
    if not device.startswith("cuda"):
        return None
    with _nvml(device) as (nvml, handle):
        bus_id = nvml.nvmlDeviceGetPciInfo(handle).busId  # 00000000:18:00.0: NVML's domain has eight digits
    text = bus_id.decode() if isinstance(bus_id, bytes) else str(bus_id)
    domain, _, bus_and_device = text.lower().partition(":")
    return f"{int(domain, 16):04x}:{bus_and_device}"


def numa_cpus(device: str) -> set[int]:
    """CPU numbers of the NUMA node of a CUDA device, from NVML. Raises SeatrialError if NVML cannot read them."""
    mask_count = math.ceil((os.cpu_count() or 1) / 64)  # a mask has one bit for each of 64 CPUs
    with _nvml(device) as (nvml, handle):
        try:
            masks = nvml.nvmlDeviceGetCpuAffinity(handle, mask_count)
        except nvml.NVMLError as error:
            raise SeatrialError(f"NVML cannot read the CPU affinity of {device}: {error}") from error
    return {64 * index + bit for index, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}


@contextmanager
def _nvml(device: str) -> Iterator[tuple[Any, Any]]:
    """NVML and its handle of a CUDA device. Raises SeatrialError if NVML has no such GPU, as for MIG instances."""
    import pynvml

    properties = torch.cuda.get_device_properties(device)
    pynvml.nvmlInit()
    try:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{properties.uuid}".encode())
        except pynvml.NVMLError as error:
            raise SeatrialError(
                f"NVML has no GPU-{properties.uuid} ({device} in CUDA, {properties.name}): {error}; "
                "MIG instances are not supported, list them with: nvidia-smi -L"
            ) from error
        yield pynvml, handle
    finally:
        pynvml.nvmlShutdown()


def with_torchrun_error_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, wrapped so that an exception is also written to torchrun's error file, with its traceback."""
    wrapped: Callable[..., Any] = record(function)
    return wrapped


def gather(value: T, group: torch.distributed.ProcessGroup | None = None) -> list[T]:
    """``value`` of all ranks of ``group`` (None: of all ranks), by rank. Called by all these ranks together."""
    values: list[Any] = [None] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group)
    return values


_barrier_numbers = itertools.count()  # the same on all ranks: all call store_barrier equally often
_BARRIER_TIMEOUT = timedelta(hours=6)  # the launcher reports a missing rank long before


def store_barrier() -> None:
    """Wait until all ranks have called this, by keys in the rendezvous store.

    A collective would run kernels on the waiting GPUs and disturb measurements on other GPUs (H200: GPU-to-GPU copies
    at 112 instead of 387 GB/s).
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    name = f"seatrial/barrier/{next(_barrier_numbers)}"
    if store.add(name, 1) == torch.distributed.get_world_size():
        store.set(f"{name}/complete", "")
    store.wait([f"{name}/complete"], _BARRIER_TIMEOUT)


def describe_device(device: str) -> dict[str, Any]:
    """Facts about the device: ``backend`` (cuda or cpu), ``gpu`` (model name as in NVML), ``cpu`` (model name).

    ``world_size`` and ``nodes`` are 1, since metrics of one device are compared with reference values of one device.
    """
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        return {"backend": "cuda", "gpu": name, "cpu": None, "world_size": 1, "nodes": 1}
    return {"backend": "cpu", "gpu": None, "cpu": _cpu_model(), "world_size": 1, "nodes": 1}


def describe_devices(device: str) -> dict[str, Any]:
    """As describe_device, with the models of all ranks. Called by all ranks together."""
    facts_by_rank = gather(describe_device(device))
    models = {key: joined_names(facts[key] for facts in facts_by_rank) for key in ("gpu", "cpu")}
    return describe_device(device) | models


def joined_names(names: Iterable[str | None]) -> str | None:
    """The different names, joined by " + " (hardware/references.py); None if there is none."""
    return " + ".join(sorted(set(filter(None, names)))) or None


def _cpu_model() -> str:
    """The CPU's model name (proc(5), cpuinfo). Models may compute sums with different last bits."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, f"{platform.machine()}, unknown model")


def min_free_memory(device: str) -> float:
    """Minimum over ranks of the free GPU memory in bytes; infinite on CPUs. Called by all ranks together."""
    free_bytes = float(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else math.inf
    return min(gather(free_bytes))


def release_memory(device: str) -> None:
    """Release the unused memory that torch's allocator caches."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
