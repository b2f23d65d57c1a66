"""What one rank does for all of them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from seatrial.bench import rank as bench
from seatrial.model import SeatrialError
from seatrial.train import disk

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def run_on_rank_0(work: Callable[[], object], place: Path) -> None:
    """Let rank 0 do ``work`` while the others wait. Where it fails, every rank raises, so that none waits forever.

    All raise the SeatrialError that it was, or one that names what it was: NoRoom where ``place`` has none left.
    """
    told: list[SeatrialError | None] = [None]
    cause: Exception | None = None
    if rank() == 0:
        try:
            work()
        except SeatrialError as error:
            told = [error]
        except Exception as error:
            what = "rank 0 failed in what it does for all"
            told, cause = [disk.disk_full_error(error, place, what) or SeatrialError(f"{what}: {_named(error)}")], error
    if dist.is_initialized():
        dist.broadcast_object_list(told)
    if told[0] is not None:
        raise told[0] from cause


def _named(error: Exception) -> str:
    return str(error) if isinstance(error, OSError) else f"{type(error).__name__}: {error}"


def gather(value: T) -> list[T]:
    """Everybody's value, by rank, on every rank."""
    return bench.gather(value) if dist.is_initialized() else [value]
