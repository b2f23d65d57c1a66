"""Some of the ranks at a time: groups that work side by side, so that a figure belongs to a part of the cluster.

Everything here needs an open process group and is called by all ranks together, those that only look on among them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch
import torch.distributed as dist

from seatrial.bench.buffers import TorchAllocator
from seatrial.bench.collectives import Timings, algorithm_bandwidth, allocate_on_all_ranks, time_operation
from seatrial.bench.data_check import CHUNK_ELEMENTS, Mismatch, fill_input, verify
from seatrial.bench.operations import OPERATIONS
from seatrial.bench.rank import describe_device, gather


@dataclass(frozen=True)
class GroupResult:
    """What one group measured: the times of its own ranks, and the data that was wrong, by rank."""

    ranks: tuple[int, ...]
    timings: Timings
    mismatches: dict[int, Mismatch]

    def busbw(self, size: int) -> tuple[float, ...]:
        """GB/s of every window, as nccl-tests has it for an all-reduce of ``size`` bytes: S / t · 2(n−1)/n."""
        factor = OPERATIONS["all_reduce"].busbw_factor(len(self.ranks))
        return tuple(algorithm_bandwidth(size, seconds) * factor for seconds in self.timings.window_means)


def ranks_by_node(node: str) -> dict[str, tuple[int, ...]]:
    """The ranks of every node, by its name, in the order of ranks. ``node`` is where this rank is."""
    found: dict[str, list[int]] = {}
    for rank, name in enumerate(gather(node)):
        found.setdefault(name, []).append(rank)
    return {name: tuple(ranks) for name, ranks in found.items()}


def gpu_models(ranks: Sequence[int], device: str) -> str | None:
    """The GPUs of these ranks, joined as ``describe_devices`` joins them; None on CPUs. Each rank may ask of others."""
    of_rank = gather(describe_device(device)["gpu"])
    return " + ".join(sorted({model for one in ranks if (model := of_rank[one])})) or None


def measure_all_reduce(groups: Sequence[Sequence[int]], size: int, device: str, seconds: float) -> list[GroupResult]:
    """Sum ``size`` bytes of float32 in each of the disjoint ``groups`` (two ranks or more), all at the same time.

    Windows begin together on all ranks; see ``time_operation``. One more sum is checked bit by bit. Raises NoMemory on
    all ranks where the buffer does not fit on one of them.
    """
    count = size // 4 if any(dist.get_rank() in ranks for ranks in groups) else 0
    buffer = allocate_on_all_ranks(lambda: _buffer(count, device), torch.device(device))
    with open_subgroups(groups, device) as (group, own):
        run: Callable[[], object] = partial(dist.all_reduce, buffer, group=group) if own else lambda: None
        if own:
            fill_input(buffer, own.index(dist.get_rank()), len(own))
        timings = time_operation(run, torch.device(device), seconds)
        mismatch = None
        if own:
            fill_input(buffer, own.index(dist.get_rank()), len(own))
            run()
            mismatch = verify(buffer, len(own))
        mismatches = gather(mismatch)
    return [
        GroupResult(
            tuple(ranks), select_ranks(timings, ranks), {rank: found for rank in ranks if (found := mismatches[rank])}
        )
        for ranks in groups
    ]


def _buffer(count: int, device: str) -> torch.Tensor:
    """Filled and compared once: what the data check needs for itself must fit as well."""
    buffer = TorchAllocator().empty(count, torch.float32, torch.device(device))
    fill_input(buffer, 0, 2)
    verify(buffer[:CHUNK_ELEMENTS], 2)
    return buffer


def select_ranks(timings: Timings, ranks: Sequence[int]) -> Timings:
    """The times of these ranks alone."""
    windows = tuple(tuple(window[rank] for rank in ranks) for window in timings.windows)
    return Timings(windows, timings.per_window, timings.warmup)


@contextmanager
def open_subgroups(
    groups: Sequence[Sequence[int]], device: str
) -> Iterator[tuple[dist.ProcessGroup | None, tuple[int, ...]]]:
    """Our group (None: all ranks) and its ranks; no ranks where we are in none. Every rank makes all groups, in order.

    NCCL splits the communicator of all ranks for each, and those outside have a part in that. After a success it ends
    with nothing in flight: a group that is left over would be ended in whatever order Python chooses.
    """
    everybody, me = range(dist.get_world_size()), dist.get_rank()
    group: dist.ProcessGroup | None = None
    own = tuple(everybody)
    if [list(ranks) for ranks in groups] != [list(everybody)]:
        made = [dist.new_group(list(ranks)) for ranks in groups]
        mine = [(new, tuple(ranks)) for new, ranks in zip(made, groups, strict=True) if me in ranks]
        group, own = mine[0] if mine else (None, ())
    yield group, own
    if group is not None:
        if device.startswith("cuda"):
            torch.cuda.synchronize(device)
        dist.destroy_process_group(group)
