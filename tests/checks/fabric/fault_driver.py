"""Faults injected into a group of four processes; see tests.bench.cluster."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from seatrial.bench import buffers
from tests.bench import cluster

RANKS = 4
LATE_S = 0.05  # much longer than a 64 KiB transfer on a busy machine
WRONG_OFFSET = 7
LINK_S = 0.1  # transfer time of one pair on the shared link; much longer than the skew between processes
SHARED_LINK_PAIRS = ({0, 3}, {1, 2})  # pairs of ranks that run concurrently in the first round and share a link

_real_batch = dist.batch_isend_irecv


def _late(operations: list[Any]) -> Any:
    time.sleep(LATE_S)
    return _real_batch(operations)


def _late_with_rank_2(operations: list[Any]) -> Any:
    return _late(operations) if operations[0].peer == 2 else _real_batch(operations)


def _corrupt(operations: list[Any]) -> Any:
    operations[0].tensor.view(torch.int32)[WRONG_OFFSET] += 1
    return _real_batch(operations)


def _over_shared_link(operations: list[Any]) -> Any:
    """Delay a transfer by LINK_S, or by twice as much while the other pair of the shared link is active."""
    me, peer = dist.get_rank(), operations[0].peer
    concurrent = {me, peer} in SHARED_LINK_PAIRS and _is_link_busy(
        me, [rank for rank in range(RANKS) if rank not in (me, peer)]
    )
    time.sleep(2 * LINK_S if concurrent else LINK_S)
    return _real_batch(operations)


def _is_link_busy(me: int, others: list[int]) -> bool:
    """Whether another rank used the link recently; record that ``me`` uses it."""
    folder = Path(os.environ[cluster.FOLDER])
    (folder / f"link{me}").touch()
    marks = [folder / f"link{rank}" for rank in others]
    return any(mark.exists() and time.time() - mark.stat().st_mtime < 2.5 * LINK_S for mark in marks)


def _out_of_memory(*_: Any) -> Any:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 1.00 GiB")


FREE_BYTES = 2**14
_real_empty = buffers.Allocator.empty


def _little_memory(allocator: buffers.Allocator, count: int, dtype: torch.dtype) -> Any:
    return _real_empty(allocator, count, dtype) if count * dtype.itemsize <= FREE_BYTES else _out_of_memory()


_real_all_reduce = dist.all_reduce


def _wrong_sum(tensor: torch.Tensor, **more: Any) -> Any:
    done = _real_all_reduce(tensor, **more)
    if tensor.numel() > WRONG_OFFSET:
        tensor.view(torch.int32)[WRONG_OFFSET] += 1
    return done


FAULTS = {
    "wrong_sums": cluster.on(2, dist, "all_reduce", _wrong_sum),
    "no_memory": cluster.on(1, buffers.Allocator, "empty", _out_of_memory),
    "little_memory": cluster.on(2, buffers.Allocator, "empty", _little_memory),
    "late": cluster.on(2, dist, "batch_isend_irecv", _late),
    "late_between_one_and_two": cluster.on(1, dist, "batch_isend_irecv", _late_with_rank_2),
    "shared_link": cluster.everywhere(dist, "batch_isend_irecv", _over_shared_link),
    "corrupt": cluster.on(3, dist, "batch_isend_irecv", _corrupt),
}
