"""One all-reduce under the environment of this process: how fast, and by which way of NCCL's.

``python -m seatrial.bench.nccl_settings TASK``, started beside each rank by ``anew.ask_anew``; prints a JSON document.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist

from seatrial.bench import child_ranks, group, subgroups
from seatrial.bench.rank import min_free_memory

ROOM = 0.5  # of the free memory may be one buffer: NCCL needs some too, and the parent holds its own


def run(task: Mapping[str, Any], device: str) -> dict[str, Any]:
    """``task``: ``size`` in bytes, ``seconds`` for each of ``groups`` (name → groups of ranks that work at once), and
    ``path_sizes``, of which one sum each is made, untimed, so that NCCL writes down what it chooses.

    GB/s of each window by name and group, elements that were wrong, where NCCL's log is and how much of it tells of all
    ranks, and what did not fit.
    """
    room = ROOM * min_free_memory(device)
    sizes = [size for size in task["path_sizes"] if size <= room]  # on every rank: all must make the same calls
    for size in dict.fromkeys([task["size"], *sizes]):
        dist.all_reduce(torch.zeros(size // 4, dtype=torch.float32, device=device))
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    log = group.nccl_log_path()
    # Before there are other groups: what the log tells so far is of all ranks
    written = log.stat().st_size if device.startswith("cuda") else 0
    found = {
        name: subgroups.measure_all_reduce(groups, task["size"], device, task["seconds"])
        for name, groups in task["groups"].items()
    }
    wrong = sum(bad.wrong for results in found.values() for one in results for bad in one.mismatches.values())
    return {
        "busbw": {name: [one.busbw(task["size"]) for one in results] for name, results in found.items()},
        "wrong": wrong,
        "log": str(log),
        "log_bytes": written,
        "not_allocated": sorted(set(task["path_sizes"]) - set(sizes)),
    }


if __name__ == "__main__":
    child_ranks.child_rank_main(run)
