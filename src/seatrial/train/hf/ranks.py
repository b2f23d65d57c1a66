"""What one rank does for all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeVar, cast

import torch.distributed as dist

from seatrial.model import SeatrialError

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def once(work: Callable[[], object]) -> None:
    """Let rank 0 do ``work`` while the others wait. Where it fails, every rank raises, so that none waits forever."""
    failure: list[str | None] = [None]
    if rank() == 0:
        try:
            work()
        except Exception as error:
            failure = [str(error) if isinstance(error, SeatrialError) else f"{type(error).__name__}: {error}"]
            if not dist.is_initialized():
                raise
            dist.broadcast_object_list(failure)
            raise
    if dist.is_initialized():
        dist.broadcast_object_list(failure)
    if failure[0] is not None:
        raise SeatrialError(f"rank 0 failed in what it does for all: {failure[0]}")


def gather(value: T) -> list[T]:
    """Everybody's value, by rank, on every rank."""
    if not dist.is_initialized():
        return [value]
    values: list[T | None] = [None] * world_size()
    dist.all_gather_object(values, value)
    return cast("list[T]", values)
