"""What torch knows of this one process."""

from __future__ import annotations

import platform
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed.elastic.multiprocessing.errors import record

T = TypeVar("T")


def physical_index(device: str) -> int | None:
    """NVML's index of a CUDA device, found by its UUID: CUDA_VISIBLE_DEVICES renumbers, a UUID stays. None on a CPU."""
    if not device.startswith("cuda"):
        return None
    import pynvml

    uuid = torch.cuda.get_device_properties(device).uuid
    pynvml.nvmlInit()
    try:
        return int(pynvml.nvmlDeviceGetIndex(pynvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode())))
    finally:
        pynvml.nvmlShutdown()


def recorded(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function`` with torchrun's error file: an exception that ends it is written there, with its traceback."""
    wrapped: Callable[..., Any] = record(function)
    return wrapped


def gather(value: T) -> list[T]:
    """``value`` of every rank, by rank, on every rank."""
    values: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(values, value)
    return values


def wait_for_all() -> None:
    """Returns when every rank has come here."""
    gather(None)


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


def release_memory(device: str) -> None:
    """Give back what torch's allocator keeps of memory that is not used any more."""
    if device.startswith("cuda"):
        torch.cuda.empty_cache()
