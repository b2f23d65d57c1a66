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

# Allocates ``count`` elements on this rank
Allocate = Callable[[int], torch.Tensor]


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

    ``divides``: its buffer is cut into one block a rank, so that a size is rounded down to whole blocks.
    ``prepare_elsewhere``: the same in the other placement, where nccl-tests has that. torch's process group has
    all-reduce, broadcast and reduce in place only: see ``two_buffers`` of its calls.
    """

    name: str
    formula: str
    factor: Callable[[int], float]
    prepare: Callable[[int, Allocate], Prepared]
    in_place: bool = False
    divides: bool = False
    prepare_elsewhere: Callable[[int, Allocate], Prepared] | None = None

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
        if not self.prepare_elsewhere:
            return None
        return replace(self, prepare=self.prepare_elsewhere, in_place=not self.in_place, prepare_elsewhere=None)


def calls_on(device: torch.device) -> NcclCalls | TorchCalls:
    """NCCL's own functions on such a device, or torch's process group; ``described`` says which, and why torch's."""
    if dist.get_backend() != dist.Backend.NCCL:
        return TorchCalls(device)
    try:
        return NcclCalls(device)
    except NotReachable as reason:
        return TorchCalls(device, str(reason))


def _all_reduce(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    # The values grow with every sum, at last to inf: as with nccl-tests in place, this does not change the time.
    return _summing(buffer, buffer)


def _all_reduce_elsewhere(count: int, allocate: Allocate) -> Prepared:
    return _summing(allocate(count), allocate(count))


def _summing(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    run = calls_on(sent.device).all_reduce(sent, received)
    return Prepared(run, sent, received, [Part(sent.numel(), 0)], dist.get_world_size())


def _all_gather(count: int, allocate: Allocate) -> Prepared:
    return _gathering(allocate(count // dist.get_world_size()), allocate(count))


def _all_gather_in_place(count: int, allocate: Allocate) -> Prepared:
    received = allocate(count)
    return _gathering(received.chunk(dist.get_world_size())[dist.get_rank()], received)


def _gathering(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    parts = [Part(sent.numel(), 0, rank) for rank in range(dist.get_world_size())]
    return Prepared(calls_on(sent.device).all_gather(sent, received), sent, received, parts)


def _reduce_scatter(count: int, allocate: Allocate) -> Prepared:
    return _scattering(allocate(count), allocate(count // dist.get_world_size()))


def _reduce_scatter_in_place(count: int, allocate: Allocate) -> Prepared:
    sent = allocate(count)
    return _scattering(sent, sent.chunk(dist.get_world_size())[dist.get_rank()])


def _scattering(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    parts = [Part(received.numel(), received.numel() * dist.get_rank())]
    run = calls_on(sent.device).reduce_scatter(sent, received)
    return Prepared(run, sent, received, parts, dist.get_world_size())


def _all_to_all(count: int, allocate: Allocate) -> Prepared:
    ranks = dist.get_world_size()
    block, sent, received = count // ranks, allocate(count), allocate(count)
    parts = [Part(block, block * dist.get_rank(), rank) for rank in range(ranks)]
    return Prepared(calls_on(sent.device).all_to_all(sent, received), sent, received, parts)


def _broadcast(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    return _broadcasting(buffer, buffer)


def _broadcast_elsewhere(count: int, allocate: Allocate) -> Prepared:
    return _broadcasting(allocate(count), allocate(count))


def _broadcasting(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    run = calls_on(sent.device).broadcast(sent, received, root=0)
    return Prepared(run, sent, received, [Part(sent.numel(), 0, rank=0)])


def _reduce(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    return _reducing(buffer, buffer)


def _reduce_elsewhere(count: int, allocate: Allocate) -> Prepared:
    return _reducing(allocate(count), allocate(count))


def _reducing(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    # only the root's buffer is defined afterwards
    parts = [Part(sent.numel(), 0)] if dist.get_rank() == 0 else []
    run = calls_on(sent.device).reduce(sent, received, root=0)
    return Prepared(run, sent, received, parts, dist.get_world_size())


def _send_receive(count: int, allocate: Allocate) -> Prepared:
    """Each rank sends to the next and receives from the one before it, at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    sent, received = allocate(count), allocate(count)
    run = calls_on(sent.device).exchange(sent, following, received, before)
    return Prepared(run, sent, received, [Part(count, 0, before)])


def _shared(ranks: int) -> float:
    return (ranks - 1) / ranks


OPERATIONS = {
    one.name: one
    for one in (
        Operation(
            "all_reduce",
            "2(n−1)/n",
            lambda ranks: 2 * _shared(ranks),
            _all_reduce,
            in_place=True,
            prepare_elsewhere=_all_reduce_elsewhere,
        ),
        Operation("all_gather", "(n−1)/n", _shared, _all_gather, divides=True, prepare_elsewhere=_all_gather_in_place),
        Operation(
            "reduce_scatter",
            "(n−1)/n",
            _shared,
            _reduce_scatter,
            divides=True,
            prepare_elsewhere=_reduce_scatter_in_place,
        ),
        Operation("all_to_all", "(n−1)/n", _shared, _all_to_all, divides=True),
        Operation("broadcast", "1", lambda _: 1.0, _broadcast, True, prepare_elsewhere=_broadcast_elsewhere),
        Operation("reduce", "1", lambda _: 1.0, _reduce, True, prepare_elsewhere=_reduce_elsewhere),
        Operation("send_receive", "1", lambda _: 1.0, _send_receive),
    )
}
