"""Rank, world size, and work that rank 0 does for all ranks."""

from __future__ import annotations

import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar, cast

import torch.distributed as dist

from seatrial.bench import rank as bench_rank
from seatrial.model import SeatrialError, UsageError
from seatrial.train import data_cache, disk
from seatrial.train.train_config import TrainConfig

T = TypeVar("T")


def rank() -> int:
    return dist.get_rank() if dist.is_initialized() else 0


def world_size() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def gather(value: T) -> list[T]:
    """The values of all ranks, by rank, on every rank."""
    return bench_rank.gather(value) if dist.is_initialized() else [value]


def run_on_rank0(
    work: Callable[[], T], folder: Path, action: str = "rank 0 failed while all other ranks waited for it"
) -> T:
    """The result of ``work`` on rank 0, on all ranks; if it fails, all ranks raise the same SeatrialError.

    A SeatrialError of ``work`` is raised unchanged. Other exceptions become DiskFullError if the filesystem of
    ``folder`` is full, otherwise SeatrialError; its message begins with ``action``.
    """
    result: T | SeatrialError | None = None
    cause: Exception | None = None
    if rank() == 0:
        try:
            result = work()
        except SeatrialError as error:
            result = error
        except Exception as error:
            result, cause = disk.write_error(error, folder, action), error
    rank0_result = gather(result)[0]
    if isinstance(rank0_result, SeatrialError):
        raise rank0_result from cause
    return cast("T", rank0_result)


def prepared_folder(
    config: TrainConfig, cache: Path, prepare: Callable[[TrainConfig, Path], data_cache.Prepared]
) -> Path:
    """The folder with the prepared data of ``config``; if it is missing, rank 0 writes it with ``prepare``.

    All ranks call this. A node that does not see the folder of rank 0 writes Markov sequences itself; for other data,
    its ranks raise UsageError.
    """
    action = f"cannot write the prepared data to {cache}"
    prepared = run_on_rank0(lambda: prepare(config, cache), cache, action)
    if rank() == 0 and prepared.message:
        print(prepared.message, file=sys.stderr)
    if prepared.folder.is_dir():
        return prepared.folder
    if config.trains_on_markov_chain:
        return prepare(config, cache).folder
    raise UsageError(
        f"{socket.gethostname()} cannot read {prepared.folder}: set data.cache to a directory shared by all nodes"
    )
