"""Rank, world size, and work that rank 0 does for all ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from seatrial.bench import rank as bench_rank
from seatrial.model import SeatrialError
from seatrial.train import disk

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def run_on_rank0(work: Callable[[], object], folder: Path) -> None:
    """Run ``work`` on rank 0 while the other ranks wait; if it fails, all ranks raise the same SeatrialError.

    A SeatrialError of ``work`` is raised unchanged. Other exceptions become DiskFullError if the filesystem of
    ``folder`` is full, otherwise SeatrialError.
    """
    errors: list[SeatrialError | None] = [None]
    cause: Exception | None = None
    if rank() == 0:
        try:
            work()
        except SeatrialError as error:
            errors = [error]
        except Exception as error:
            message = "rank 0 failed while all other ranks waited for it"
            disk_full = disk.disk_full_error(error, folder, message)
            text = str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"
            errors, cause = [disk_full or SeatrialError(f"{message}: {text}")], error
    if dist.is_initialized():
        dist.broadcast_object_list(errors)
    if errors[0] is not None:
        raise errors[0] from cause


def gather(value: T) -> list[T]:
    """The values of all ranks, by rank, on every rank."""
    return bench_rank.gather(value) if dist.is_initialized() else [value]
