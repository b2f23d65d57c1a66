"""Each operation once at each size, so that NCCL writes down which way it takes: algorithm, protocol, channels.

``python -m seatrial.bench.algorithms TASK``, started beside each rank by ``anew.ask_anew``; prints a JSON document.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from seatrial.bench import child_ranks, group
from seatrial.bench.buffers import buffer_allocator
from seatrial.bench.collectives import DTYPES
from seatrial.bench.operations import OPERATIONS, collective_api
from seatrial.bench.rank import min_free_memory

ROOM = 0.7  # of the free memory may be the buffers: NCCL needs some too


def run(task: Mapping[str, Any], device: str) -> dict[str, Any]:
    """``task``: ``asks``, each with ``operation``, ``size`` in bytes, ``dtype`` and ``buffers``.

    Where NCCL's log is and, for each of these, ``told``: its exact bytes, and from which byte to which the log is about
    it; without the latter two where it does not fit into memory.
    """
    log, target = group.nccl_log_path(), torch.device(device)
    room = ROOM * min_free_memory(device)  # of all: all make the same calls
    return {"log": str(log), "told": [_once(ask, target, log, room) for ask in task["asks"]]}


def _once(ask: Mapping[str, Any], device: torch.device, log: Path, room: float) -> list[int]:
    operation, dtype = OPERATIONS[ask["operation"]], DTYPES[ask["dtype"]]
    count = operation.element_count(ask["size"], dtype.itemsize, dist.get_world_size())
    size = count * dtype.itemsize
    if size * (1 if operation.in_place else 2) > room:
        return [size]
    source = buffer_allocator(ask["buffers"], device)
    prepared = operation.prepare(count, lambda own: source.empty(own, dtype, device))
    with source.registration():
        start = _written(log)
        prepared.run()
        collective_api(device).wait()
        end = _written(log)
    del prepared  # its buffers, before the pool that they are of
    return [size, start, end]


def _written(log: Path) -> int:
    """NCCL writes line by line; gloo writes none."""
    return log.stat().st_size if log.is_file() else 0


if __name__ == "__main__":
    child_ranks.child_rank_main(run)
