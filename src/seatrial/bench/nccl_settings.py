"""Measures all-reduce with the NCCL variables of this process's environment, and prints the result as JSON.

``python -m seatrial.bench.nccl_settings TASK`` is started beside each rank by ``child_ranks.run_child_ranks``.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import chain
from typing import Any

import torch
import torch.distributed as dist

from seatrial.bench import child_ranks, group, subgroups
from seatrial.bench.rank import min_free_memory

MEMORY_SHARE = 0.5  # share of the free memory for one buffer; NCCL and the parent process need the rest


def run(task: Mapping[str, Any], device: str) -> dict[str, Any]:
    """Run all-reduces and return a dict with their bus bandwidths and NCCL's log.

    ``task`` has ``size`` (bytes) and ``seconds`` of the timed all-reduces, ``groups`` (name → groups of ranks that run
    concurrently), and ``untimed_sizes``: sizes of further all-reduces. Each of these runs once without timing, so that
    NCCL logs the path of its data.

    The result has ``busbw[name][group][window]`` in GB/s, ``wrong_elements`` (their number), ``log`` (the path of
    NCCL's log), ``log_bytes`` (how many of the log's first bytes are about the group of all ranks), and
    ``not_allocated`` (the ``untimed_sizes`` that were left out, since a buffer would exceed MEMORY_SHARE).
    """
    max_bytes = MEMORY_SHARE * min_free_memory(device)
    sizes = [size for size in task["untimed_sizes"] if size <= max_bytes]  # the same on all ranks, as is max_bytes
    for size in dict.fromkeys([task["size"], *sizes]):
        dist.all_reduce(torch.zeros(size // 4, dtype=torch.float32, device=device))
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
    log_bytes = group.nccl_log_size()  # before other groups exist: the log so far is about the group of all ranks
    results_by_name = {
        name: subgroups.measure_all_reduce(groups, task["size"], device, task["seconds"])
        for name, groups in task["groups"].items()
    }
    busbw = {name: [result.busbw for result in results] for name, results in results_by_name.items()}
    mismatches = (result.mismatches.values() for result in chain.from_iterable(results_by_name.values()))
    return {
        "busbw": busbw,
        "wrong_elements": sum(mismatch.wrong for mismatch in chain.from_iterable(mismatches)),
        "log": str(group.nccl_log_path()),
        "log_bytes": log_bytes,
        "not_allocated": sorted(set(task["untimed_sizes"]) - set(sizes)),
    }


if __name__ == "__main__":
    child_ranks.child_rank_main(run)
