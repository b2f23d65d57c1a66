"""Runs collective operations once each, and prints as JSON which bytes of NCCL's log describe each operation.

``python -m seatrial.bench.algorithms TASK`` is started beside each rank by ``child_ranks.run_child_ranks``. NCCL logs
the algorithm, the protocol and the number of channels of each operation.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from seatrial.bench import child_ranks, group
from seatrial.bench.buffers import Allocator
from seatrial.bench.collectives import DTYPES
from seatrial.bench.operations import OPERATIONS, collective_api
from seatrial.bench.rank import min_free_memory

MEMORY_SHARE = 0.7  # share of the free memory for the buffers of an operation; NCCL needs the rest


def run(task: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Return ``log``, the path of NCCL's log, and ``log_ranges``, one list per item of ``task["requests"]``.

    A request has ``operation``, ``size`` in bytes, ``dtype`` and ``buffers``. Its list is [exact size in bytes, offset
    of its first log line, end of its last log line], or [exact size] if the buffers would exceed MEMORY_SHARE.
    """
    target = torch.device(device)
    max_bytes = MEMORY_SHARE * min_free_memory(device)  # the same on all ranks: all must make the same calls
    log_ranges = [_run_once(request, target, max_bytes) for request in task["requests"]]
    return {"log": str(group.nccl_log_path()), "log_ranges": log_ranges}


def _run_once(request: Mapping[str, Any], device: torch.device, max_bytes: float) -> list[int]:
    operation, dtype = OPERATIONS[request["operation"]], DTYPES[request["dtype"]]
    count = operation.element_count(request["size"], dtype.itemsize, dist.get_world_size())
    size = count * dtype.itemsize
    if size * (1 if operation.in_place else 2) > max_bytes:
        return [size]
    allocator = Allocator(request["buffers"], device)
    prepared = operation.prepare(count, lambda elements: allocator.empty(elements, dtype))
    with allocator.registration():
        start = group.nccl_log_size()
        prepared.run()
        collective_api(device).wait()
        end = group.nccl_log_size()
    del prepared  # frees its buffers before the memory pool that holds them
    return [size, start, end]


if __name__ == "__main__":
    child_ranks.child_rank_main(run)
