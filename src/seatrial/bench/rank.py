"""What torch knows of this one process."""

from __future__ import annotations

import itertools
import math
import os
import platform
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import record

from seatrial.model import SeatrialError

T = TypeVar("T")


def nvml_index(device: str) -> int | None:
    """NVML's index of a CUDA device, found by its UUID: CUDA_VISIBLE_DEVICES renumbers, a UUID stays. None on a CPU."""
    if not device.startswith("cuda"):
        return None
    with _nvml(device) as (nvml, handle):
        return int(nvml.nvmlDeviceGetIndex(handle))


def numa_cpus(device: str) -> set[int]:
    """The CPUs of a CUDA device's own NUMA node, as NVML has them. Raises SeatrialError where it does not tell."""
    words = -(-(os.cpu_count() or 1) // 64)
    with _nvml(device) as (nvml, handle):
        try:
            masks = nvml.nvmlDeviceGetCpuAffinity(handle, words)
        except nvml.NVMLError as error:
            raise SeatrialError(f"NVML does not tell which CPUs are beside {device}: {error}") from error
    return {64 * word + bit for word, mask in enumerate(masks) for bit in range(64) if mask >> bit & 1}


@contextmanager
def _nvml(device: str) -> Iterator[tuple[Any, Any]]:
    """NVML and its handle of a CUDA device. Raises SeatrialError where NVML has no such GPU: a MIG slice is none."""
    import pynvml

    found = torch.cuda.get_device_properties(device)
    pynvml.nvmlInit()
    try:
        try:
            handle = pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{found.uuid}".encode())
        except pynvml.NVMLError as error:
            said = f"NVML has no GPU-{found.uuid}, which is CUDA's {device} ({found.name}): {error}"
            raise SeatrialError(f"{said}. Is it a MIG slice? Those are not measured: nvidia-smi -L") from error
        yield pynvml, handle
    finally:
        pynvml.nvmlShutdown()


def with_torchrun_error_file(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with torchrun's error file: an exception that ends it is written there, with its traceback."""
    wrapped: Callable[..., Any] = record(function)
    return wrapped


def gather(value: T) -> list[T]:
    """``value`` of every rank, by rank, on every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


_waits = itertools.count()  # all ranks wait equally often, so that their numbers agree
_PATIENCE = timedelta(hours=6)  # who does not come is the watcher's to tell, long before


def store_barrier() -> None:
    """Returns when every rank has come here.

    They meet in the store of the rendezvous: in a collective, the kernel of those who wait would run on their GPUs and
    disturb what others measure there (on H200, copies from GPU to GPU at 112 instead of 387 GB/s).
    """
    store = torch.distributed.distributed_c10d._get_default_store()
    name = f"seatrial/wait/{next(_waits)}"
    if store.add(name, 1) == torch.distributed.get_world_size():
        store.set(f"{name}/all", "here")
    store.wait([f"{name}/all"], _PATIENCE)


def describe_device(device: str) -> dict[str, Any]:
    """What computes here: ``backend`` is cuda or cpu, ``gpu`` the name that NVML knows too, ``cpu`` the processor's.

    ``world_size`` and ``nodes`` are 1: the figures are those of one device, and SKU data is kept by such counts.
    """
    if device.startswith("cuda"):
        name = torch.cuda.get_device_name(device)
        return {"backend": "cuda", "gpu": name, "cpu": None, "world_size": 1, "nodes": 1}
    return {"backend": "cpu", "gpu": None, "cpu": _processor(), "world_size": 1, "nodes": 1}


def describe_devices(device: str) -> dict[str, Any]:
    """As describe_device, for a check of all ranks together: unlike models are joined by " + ", which no SKU is."""
    own = describe_device(device)
    every = gather(own)
    models = {name: sorted({one[name] for one in every if one[name]}) for name in ("gpu", "cpu")}
    return own | {name: " + ".join(found) or None for name, found in models.items()}


def _processor() -> str:
    """proc(5), cpuinfo: kernels differ by it, and so may the last bits of a sum."""
    lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    named = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return named[0] if named else f"{platform.machine()}, unnamed"


def min_free_memory(device: str) -> float:
    """Free bytes of the GPU that has the least; infinite on CPUs. Called by all ranks together."""
    return min(gather(float(torch.cuda.mem_get_info(device)[0]) if device.startswith("cuda") else math.inf))


def release_memory(device: str) -> None:
    """Give back what torch's allocator keeps of memory that is not used any more."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
