"""Measures all-reduce in several process groups concurrently, e.g. one group per node.

All ranks call each function together, in an open process group, even ranks that are in none of the groups.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist

from seatrial.bench.buffers import Allocator
from seatrial.bench.collectives import CollectiveResult, allocate_on_all_ranks, time_operation
from seatrial.bench.data_check import CHUNK_ELEMENTS, fill_input, verify
from seatrial.bench.rank import describe_device, gather, joined_names
from seatrial.util.grouping import grouped


def ranks_by_node(node: str) -> dict[str, tuple[int, ...]]:
    """The ranks of every node in ascending order, by node name. ``node``: the name of this rank's node."""
    by_node = grouped((name, rank) for rank, name in enumerate(gather(node)))
    return {name: tuple(ranks) for name, ranks in by_node.items()}


def gpu_models(ranks: Sequence[int], device: str) -> str | None:
    """GPU models of ``ranks``, joined by " + "; None on CPUs. ``ranks`` may differ between the calling ranks."""
    models = gather(describe_device(device)["gpu"])
    return joined_names(models[rank] for rank in ranks)


def measure_all_reduce(
    groups: Sequence[Sequence[int]], size: int, device: str, seconds: float
) -> list[CollectiveResult]:
    """Time an all-reduce of ``size`` bytes (float32) in all disjoint ``groups`` concurrently.

    Windows begin together on all ranks; see ``time_operation``. After the timing, one result is checked bit by bit.
    Raises AllocationError on all ranks if the buffer does not fit into the memory of one rank.
    """
    is_member = any(dist.get_rank() in ranks for ranks in groups)
    count = size // torch.float32.itemsize if is_member else 0
    buffer = allocate_on_all_ranks(lambda: _allocate_buffer(count, device), torch.device(device))
    with open_subgroups(groups, device) as (group, members):
        run: Callable[[], object] = partial(dist.all_reduce, buffer, group=group) if members else lambda: None
        fill = partial(fill_input, buffer, members.index(dist.get_rank()) if members else 0, len(members))
        fill()  # of a rank without a group, the buffer is empty
        timings = time_operation(run, torch.device(device), seconds)
        fill()
        run()
        mismatch_by_rank = dict(enumerate(gather(verify(buffer, len(members)))))
    return [
        CollectiveResult(
            size,
            timings.of_ranks(ranks),
            {rank: mismatch for rank in ranks if (mismatch := mismatch_by_rank[rank])},
        )
        for ranks in groups
    ]


def _allocate_buffer(count: int, device: str) -> torch.Tensor:
    """A buffer, filled and verified once: this ensures that the scratch memory of the data check fits as well."""
    buffer = Allocator("torch", torch.device(device)).empty(count, torch.float32)
    fill_input(buffer, 0, 2)
    verify(buffer[:CHUNK_ELEMENTS], 2)
    return buffer


@contextmanager
def open_subgroups(
    groups: Sequence[Sequence[int]], device: str
) -> Iterator[tuple[dist.ProcessGroup | None, tuple[int, ...]]]:
    """Context manager: creates all ``groups`` and yields (this rank's group, the ranks of this group).

    None stands for the group of all ranks. A rank that is in no group gets (None, ()). All ranks create all groups in
    the same order, since NCCL splits the common communicator. If the block ends without an exception, the group's work
    is awaited and the group is destroyed: Python's garbage collector would destroy it in another order on each rank.
    """
    all_ranks, rank = range(dist.get_world_size()), dist.get_rank()
    group: dist.ProcessGroup | None = None
    members = tuple(all_ranks)
    if [list(ranks) for ranks in groups] != [list(all_ranks)]:
        created = [dist.new_group(list(ranks)) for ranks in groups]
        joined = [(new, tuple(ranks)) for new, ranks in zip(created, groups, strict=True) if rank in ranks]
        group, members = joined[0] if joined else (None, ())
    yield group, members
    if group is not None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        dist.destroy_process_group(group)
