"""The collective operations, each with what nccl-tests calls its size, its bandwidths and its result.

Sizes, factors and what counts as one operation are those of nccl-tests (doc/PERFORMANCE.md), so that its published
figures compare directly. Every operation runs in an open process group and is called by all ranks together.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist

from seatrial.bench.exact import Part

# Allocates ``count`` elements on this rank
Allocate = Callable[[int], torch.Tensor]


@dataclass(frozen=True)
class Prepared:
    """An operation with its buffers. ``parts`` say what ``received`` must hold after ``sent`` was filled and it ran."""

    run: Callable[[], object]
    sent: torch.Tensor
    received: torch.Tensor
    parts: Sequence[Part]


@dataclass(frozen=True)
class Operation:
    """``factor``: what turns algorithm bandwidth into bus bandwidth among n ranks; ``formula``: the same for people.

    ``divides``: its buffer is cut into one block a rank, so that a size is rounded down to whole blocks.
    """

    name: str
    formula: str
    factor: Callable[[int], float]
    prepare: Callable[[int, Allocate], Prepared]
    in_place: bool = False
    divides: bool = False

    def elements(self, size: int, itemsize: int, ranks: int) -> int:
        """How many elements a size in bytes is, at least one for each block."""
        blocks = ranks if self.divides else 1
        return max(1, size // itemsize // blocks) * blocks


def _all_reduce(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    # The values grow with every sum, at last to inf: as with nccl-tests in place, this does not change the time.
    return Prepared(lambda: dist.all_reduce(buffer), buffer, buffer, [Part(count, 0, _everybody())])


def _all_gather(count: int, allocate: Allocate) -> Prepared:
    block = count // dist.get_world_size()
    sent, received = allocate(block), allocate(count)
    parts = [Part(block, 0, (rank,)) for rank in _everybody()]
    return Prepared(lambda: dist.all_gather_into_tensor(received, sent), sent, received, parts)


def _reduce_scatter(count: int, allocate: Allocate) -> Prepared:
    block = count // dist.get_world_size()
    sent, received = allocate(count), allocate(block)
    parts = [Part(block, block * dist.get_rank(), _everybody())]
    return Prepared(lambda: dist.reduce_scatter_tensor(received, sent), sent, received, parts)


def _all_to_all(count: int, allocate: Allocate) -> Prepared:
    block = count // dist.get_world_size()
    sent, received = allocate(count), allocate(count)
    parts = [Part(block, block * dist.get_rank(), (rank,)) for rank in _everybody()]
    return Prepared(lambda: dist.all_to_all_single(received, sent), sent, received, parts)


def _broadcast(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    return Prepared(lambda: dist.broadcast(buffer, src=0), buffer, buffer, [Part(count, 0, (0,))])


def _reduce(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    # only the root's buffer is defined afterwards
    parts = [Part(count, 0, _everybody())] if dist.get_rank() == 0 else []
    return Prepared(lambda: dist.reduce(buffer, dst=0), buffer, buffer, parts)


def _send_receive(count: int, allocate: Allocate) -> Prepared:
    """Each rank sends to the next and receives from the one before it, at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    sent, received = allocate(count), allocate(count)

    def run() -> None:
        both = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, before)]
        for work in dist.batch_isend_irecv(both):
            work.wait()

    return Prepared(run, sent, received, [Part(count, 0, (before,))])


def _everybody() -> tuple[int, ...]:
    return tuple(range(dist.get_world_size()))


def _shared(ranks: int) -> float:
    return (ranks - 1) / ranks


OPERATIONS = {
    one.name: one
    for one in (
        Operation("all_reduce", "2(n−1)/n", lambda ranks: 2 * _shared(ranks), _all_reduce, in_place=True),
        Operation("all_gather", "(n−1)/n", _shared, _all_gather, divides=True),
        Operation("reduce_scatter", "(n−1)/n", _shared, _reduce_scatter, divides=True),
        Operation("all_to_all", "(n−1)/n", _shared, _all_to_all, divides=True),
        Operation("broadcast", "1", lambda _: 1.0, _broadcast, in_place=True),
        Operation("reduce", "1", lambda _: 1.0, _reduce, in_place=True),
        Operation("send_receive", "1", lambda _: 1.0, _send_receive),
    )
}
