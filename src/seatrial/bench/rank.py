"""What torch knows of this one process."""

from __future__ import annotations

from collections.abc import Callable
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
