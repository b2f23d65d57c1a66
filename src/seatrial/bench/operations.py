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

from seatrial.bench.data_check import Part
from seatrial.bench.libnccl import NcclCalls, NotReachable
from seatrial.bench.torchcalls import TorchCalls

Allocate = Callable[[int], torch.Tensor]  # of so many elements on this rank
Buffers = tuple[torch.Tensor, torch.Tensor]  # what is sent and what is received


@dataclass(frozen=True)
class Prepared:
    """An operation with its buffers. ``parts`` say what ``received`` must hold after ``sent`` was filled and it ran.

    ``added``: the number of ranks whose data it adds up; 1 where it only moves data.
    """

    run: Callable[[], object]
    sent: torch.Tensor
    received: torch.Tensor
    parts: Sequence[Part]
    added: int = 1


@dataclass(frozen=True)
class Operation:
    """``factor``: what turns algorithm bandwidth into bus bandwidth among n ranks; ``formula``: the same for people.

    ``buffers`` and ``prepare_on``: what it needs, and how it is prepared on these. ``divides``: its buffer is cut into
    one block a rank, so that a size is rounded down to whole blocks.
    ``other_buffers``: those of the other placement, where nccl-tests has that. torch's process group has all-reduce,
    broadcast and reduce in place only: see ``two_buffers`` of its calls.
    """

    name: str
    formula: str
    factor: Callable[[int], float]
    prepare_on: Callable[[torch.Tensor, torch.Tensor], Prepared]
    buffers: Callable[[int, Allocate], Buffers]
    other_buffers: Callable[[int, Allocate], Buffers] | None = None
    in_place: bool = False
    divides: bool = False

    def prepare(self, count: int, allocate: Allocate) -> Prepared:
        """The operation on new buffers; ``count``: elements of the larger one."""
        return self.prepare_on(*self.buffers(count, allocate))

    def elements(self, size: int, itemsize: int, ranks: int) -> int:
        """How many elements a size in bytes is: a block is whole lines of 16 B (nccl-tests, src/all_gather.cu).

        At least one element for each block, where nccl-tests would measure nothing.
        """
        if not self.divides:
            return max(1, size // itemsize)
        line = 16 // itemsize
        block = size // itemsize // ranks
        return max(1, block // line * line or block) * ranks

    def named(self, size: int, itemsize: int, ranks: int) -> int:
        """The bytes that figures are named after: those asked for, unless whole blocks are over 1 % away from them."""
        real = self.elements(size, itemsize, ranks) * itemsize
        return size if abs(real - size) <= size / 100 else real

    def elsewhere(self) -> Operation | None:
        """The same operation in place instead of out of place, or the other way round; None where there is none."""
        if not self.other_buffers:
            return None
        return replace(self, buffers=self.other_buffers, other_buffers=None, in_place=not self.in_place)


def calls_on(device: torch.device) -> NcclCalls | TorchCalls:
    """NCCL's own functions on such a device, or torch's process group; ``described`` says which, and why torch's."""
    if dist.get_backend() != dist.Backend.NCCL:
        return TorchCalls(device)
    try:
        return NcclCalls(device)
    except NotReachable as reason:
        return TorchCalls(device, str(reason))


def _one_buffer(count: int, allocate: Allocate) -> Buffers:
    """What is received replaces what was sent.

    Sums grow with every run, at last to inf: as with nccl-tests in place, this does not change the time.
    """
    buffer = allocate(count)
    return buffer, buffer


def two_buffers(count: int, allocate: Allocate) -> Buffers:
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


def _all_reduce(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    run = calls_on(sent.device).all_reduce(sent, received)
    return Prepared(run, sent, received, [Part(sent.numel(), 0)], dist.get_world_size())


def _all_gather(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    parts = [Part(sent.numel(), 0, rank) for rank in range(dist.get_world_size())]
    return Prepared(calls_on(sent.device).all_gather(sent, received), sent, received, parts)


def _reduce_scatter(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    parts = [Part(received.numel(), received.numel() * dist.get_rank())]
    run = calls_on(sent.device).reduce_scatter(sent, received)
    return Prepared(run, sent, received, parts, dist.get_world_size())


def _all_to_all(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    ranks = dist.get_world_size()
    block = sent.numel() // ranks
    parts = [Part(block, block * dist.get_rank(), rank) for rank in range(ranks)]
    return Prepared(calls_on(sent.device).all_to_all(sent, received), sent, received, parts)


def _broadcast(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    run = calls_on(sent.device).broadcast(sent, received, root=0)
    return Prepared(run, sent, received, [Part(sent.numel(), 0, rank=0)])


def _reduce(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    # only the root's buffer is defined afterwards
    parts = [Part(sent.numel(), 0)] if dist.get_rank() == 0 else []
    run = calls_on(sent.device).reduce(sent, received, root=0)
    return Prepared(run, sent, received, parts, dist.get_world_size())


def _send_receive(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    """Each rank sends to the next and receives from the one before it, at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    run = calls_on(sent.device).exchange(sent, following, received, before)
    return Prepared(run, sent, received, [Part(received.numel(), 0, before)])


def _shared(ranks: int) -> float:
    return (ranks - 1) / ranks


def _twice_shared(ranks: int) -> float:
    return 2 * _shared(ranks)


def whole(_ranks: int) -> float:
    return 1.0


OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", "2(n−1)/n", _twice_shared, _all_reduce, _one_buffer, two_buffers, in_place=True),
        Operation("all_gather", "(n−1)/n", _shared, _all_gather, _block_to_all, _block_of_all, divides=True),
        Operation("reduce_scatter", "(n−1)/n", _shared, _reduce_scatter, _all_to_block, _all_with_block, divides=True),
        Operation("all_to_all", "(n−1)/n", _shared, _all_to_all, two_buffers, divides=True),
        Operation("broadcast", "1", whole, _broadcast, _one_buffer, two_buffers, in_place=True),
        Operation("reduce", "1", whole, _reduce, _one_buffer, two_buffers, in_place=True),
        Operation("send_receive", "1", whole, _send_receive, two_buffers),
    )
}
