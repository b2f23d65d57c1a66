"""The collective operations, each with what nccl-tests calls its size, its bandwidths and its result.

Sizes, factors and what counts as one operation are those of nccl-tests (doc/PERFORMANCE.md), so that its published
figures compare directly. Every operation runs in an open process group and is called by all ranks together.

Where NCCL moves the data its own functions are called, as nccl-tests does; else torch's process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist

from seatrial.bench.data_check import ExpectedPart
from seatrial.bench.nccl_api import NcclApi, NcclApiUnavailable
from seatrial.bench.torch_api import TorchApi

Allocate = Callable[[int], torch.Tensor]  # of so many elements on this rank
Buffers = tuple[torch.Tensor, torch.Tensor]  # what is sent and what is received


@dataclass(frozen=True)
class PreparedOperation:
    """An operation with its buffers. ``parts`` say what ``received`` must hold after ``sent`` was filled and it ran.

    ``added``: the number of ranks whose data it adds up; 1 where it only moves data.
    """

    run: Callable[[], object]
    sent: torch.Tensor
    received: torch.Tensor
    expected: Sequence[ExpectedPart]
    summed_ranks: int = 1


@dataclass(frozen=True)
class Operation:
    """``factor``: what turns algorithm bandwidth into bus bandwidth among n ranks; ``formula``: the same for people.

    ``buffers`` and ``prepare_on``: what it needs, and how it is prepared on these. ``divides``: its buffer is cut into
    one block a rank, so that a size is rounded down to whole blocks.
    ``other_buffers``: those of the other placement, where nccl-tests has that. torch's process group has all-reduce,
    broadcast and reduce in place only: see ``two_buffers`` of its calls.
    """

    name: str
    busbw_formula: str
    busbw_factor: Callable[[int], float]
    prepare_with: Callable[[torch.Tensor, torch.Tensor], PreparedOperation]
    allocate_buffers: Callable[[int, Allocate], Buffers]
    allocate_variant_buffers: Callable[[int, Allocate], Buffers] | None = None
    in_place: bool = False
    one_block_per_rank: bool = False

    def prepare(self, count: int, allocate: Allocate) -> PreparedOperation:
        """The operation on new buffers; ``count``: elements of the larger one."""
        return self.prepare_with(*self.allocate_buffers(count, allocate))

    def element_count(self, size: int, itemsize: int, ranks: int) -> int:
        """How many elements a size in bytes is: a block is whole lines of 16 B (nccl-tests, src/all_gather.cu).

        At least one element for each block, where nccl-tests would measure nothing.
        """
        if not self.one_block_per_rank:
            return max(1, size // itemsize)
        line = 16 // itemsize
        block = size // itemsize // ranks
        return max(1, block // line * line or block) * ranks

    def nominal_size(self, size: int, itemsize: int, ranks: int) -> int:
        """The bytes that figures are named after: those asked for, unless whole blocks are over 1 % away from them."""
        real = self.element_count(size, itemsize, ranks) * itemsize
        return size if abs(real - size) <= size / 100 else real

    def in_place_variant(self) -> Operation | None:
        """The same operation in place instead of out of place, or the other way round; None where there is none."""
        if not self.allocate_variant_buffers:
            return None
        return replace(
            self,
            allocate_buffers=self.allocate_variant_buffers,
            allocate_variant_buffers=None,
            in_place=not self.in_place,
        )


def collective_api(device: torch.device) -> NcclApi | TorchApi:
    """NCCL's own functions on such a device, or torch's process group; ``described`` says which, and why torch's."""
    if dist.get_backend() != dist.Backend.NCCL:
        return TorchApi(device)
    try:
        return NcclApi(device)
    except NcclApiUnavailable as reason:
        return TorchApi(device, str(reason))


def _one_buffer(count: int, allocate: Allocate) -> Buffers:
    """What is received replaces what was sent.

    Sums grow with every run, at last to inf: as with nccl-tests in place, this does not change the time.
    """
    buffer = allocate(count)
    return buffer, buffer


def separate_buffers(count: int, allocate: Allocate) -> Buffers:
    return allocate(count), allocate(count)


def _block_to_all(count: int, allocate: Allocate) -> Buffers:
    return allocate(count // dist.get_world_size()), allocate(count)


def _block_of_all(count: int, allocate: Allocate) -> Buffers:
    received = allocate(count)
    return _own_block(received), received


def _all_to_block(count: int, allocate: Allocate) -> Buffers:
    return allocate(count), allocate(count // dist.get_world_size())


def _all_with_block(count: int, allocate: Allocate) -> Buffers:
    sent = allocate(count)
    return sent, _own_block(sent)


def _own_block(buffer: torch.Tensor) -> torch.Tensor:
    return buffer.chunk(dist.get_world_size())[dist.get_rank()]


def _all_reduce(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    run = collective_api(sent.device).all_reduce(sent, received)
    return PreparedOperation(run, sent, received, [ExpectedPart(sent.numel(), 0)], dist.get_world_size())


def _all_gather(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    parts = [ExpectedPart(sent.numel(), 0, rank) for rank in range(dist.get_world_size())]
    return PreparedOperation(collective_api(sent.device).all_gather(sent, received), sent, received, parts)


def _reduce_scatter(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    parts = [ExpectedPart(received.numel(), received.numel() * dist.get_rank())]
    run = collective_api(sent.device).reduce_scatter(sent, received)
    return PreparedOperation(run, sent, received, parts, dist.get_world_size())


def _all_to_all(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    ranks = dist.get_world_size()
    block = sent.numel() // ranks
    parts = [ExpectedPart(block, block * dist.get_rank(), rank) for rank in range(ranks)]
    return PreparedOperation(collective_api(sent.device).all_to_all(sent, received), sent, received, parts)


def _broadcast(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    run = collective_api(sent.device).broadcast(sent, received, root=0)
    return PreparedOperation(run, sent, received, [ExpectedPart(sent.numel(), 0, rank=0)])


def _reduce(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    # only the root's buffer is defined afterwards
    parts = [ExpectedPart(sent.numel(), 0)] if dist.get_rank() == 0 else []
    run = collective_api(sent.device).reduce(sent, received, root=0)
    return PreparedOperation(run, sent, received, parts, dist.get_world_size())


def _send_receive(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    """Each rank sends to the next and receives from the one before it, at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    run = collective_api(sent.device).send_receive(sent, following, received, before)
    return PreparedOperation(run, sent, received, [ExpectedPart(received.numel(), 0, before)])


def _shared(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice_shared(ranks: int) -> float:
    return 2 * _shared(ranks)


def unit_factor(_ranks: int) -> float:
    return 1.0


OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", "2(n−1)/n", _twice_shared, _all_reduce, _one_buffer, separate_buffers, in_place=True),
        Operation("all_gather", "(n−1)/n", _shared, _all_gather, _block_to_all, _block_of_all, one_block_per_rank=True),
        Operation(
            "reduce_scatter",
            "(n−1)/n",
            _shared,
            _reduce_scatter,
            _all_to_block,
            _all_with_block,
            one_block_per_rank=True,
        ),
        Operation("all_to_all", "(n−1)/n", _shared, _all_to_all, separate_buffers, one_block_per_rank=True),
        Operation("broadcast", "1", unit_factor, _broadcast, _one_buffer, separate_buffers, in_place=True),
        Operation("reduce", "1", unit_factor, _reduce, _one_buffer, separate_buffers, in_place=True),
        Operation("send_receive", "1", unit_factor, _send_receive, separate_buffers),
    )
}
