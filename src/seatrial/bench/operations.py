"""The collective operations, each with what nccl-tests calls its size, its bandwidths and its result.

Sizes, factors and what counts as one operation are those of nccl-tests (doc/PERFORMANCE.md), so that its published
figures compare directly. Every operation runs in an open process group and is called by all ranks together.

They are called on torch's backend itself, with all arguments made beforehand: below some MiB, what Python and the
dispatcher take for a call (about 6 of 17 us) would be measured in place of the fabric.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import (
    AllgatherOptions,
    AllreduceOptions,
    AllToAllOptions,
    BroadcastOptions,
    ReduceOptions,
    ReduceScatterOptions,
)
from torch.distributed import distributed_c10d as c10d

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
    ``prepare_elsewhere``: the same in the other placement, where nccl-tests and torch both have that.
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

    def elsewhere(self) -> Operation | None:
        """The same operation in place instead of out of place, or the other way round; None where there is none."""
        if not self.prepare_elsewhere:
            return None
        return replace(self, prepare=self.prepare_elsewhere, in_place=not self.in_place, prepare_elsewhere=None)


def backend_of(device: torch.device) -> Any:
    """What moves the data of this process's group for such tensors: torch's ProcessGroupNCCL or ProcessGroupGloo."""
    return c10d._get_default_group()._get_backend(device)


def _finish(work: Any) -> None:
    """As torch's own wrappers do. NCCL's work is on the current stream already, and there is nothing to wait for."""
    if work is not None:
        work.wait()


def _all_reduce(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    call, tensors, options = backend_of(buffer.device).allreduce, [buffer], _on_this_stream(AllreduceOptions())
    # The values grow with every sum, at last to inf: as with nccl-tests in place, this does not change the time.
    return Prepared(lambda: _finish(call(tensors, options)), buffer, buffer, [Part(count, 0, _everybody())])


def _all_gather(count: int, allocate: Allocate) -> Prepared:
    return _gathering(allocate(count // dist.get_world_size()), allocate(count))


def _all_gather_in_place(count: int, allocate: Allocate) -> Prepared:
    received = allocate(count)
    return _gathering(received.chunk(dist.get_world_size())[dist.get_rank()], received)


def _gathering(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    call, options = backend_of(sent.device)._allgather_base, _on_this_stream(AllgatherOptions())
    parts = [Part(sent.numel(), 0, (rank,)) for rank in _everybody()]
    return Prepared(lambda: _finish(call(received, sent, options)), sent, received, parts)


def _reduce_scatter(count: int, allocate: Allocate) -> Prepared:
    return _scattering(allocate(count), allocate(count // dist.get_world_size()))


def _reduce_scatter_in_place(count: int, allocate: Allocate) -> Prepared:
    sent = allocate(count)
    return _scattering(sent, sent.chunk(dist.get_world_size())[dist.get_rank()])


def _scattering(sent: torch.Tensor, received: torch.Tensor) -> Prepared:
    call, options = backend_of(sent.device)._reduce_scatter_base, _on_this_stream(ReduceScatterOptions())
    parts = [Part(received.numel(), received.numel() * dist.get_rank(), _everybody())]
    return Prepared(lambda: _finish(call(received, sent, options)), sent, received, parts)


def _all_to_all(count: int, allocate: Allocate) -> Prepared:
    block = count // dist.get_world_size()
    sent, received = allocate(count), allocate(count)
    call, options = backend_of(sent.device).alltoall_base, _on_this_stream(AllToAllOptions())
    equal: list[int] = []  # blocks of one size
    parts = [Part(block, block * dist.get_rank(), (rank,)) for rank in _everybody()]
    return Prepared(lambda: _finish(call(received, sent, equal, equal, options)), sent, received, parts)


def _broadcast(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    call, tensors, options = backend_of(buffer.device).broadcast, [buffer], _on_this_stream(BroadcastOptions())
    options.rootRank, options.rootTensor = 0, 0
    return Prepared(lambda: _finish(call(tensors, options)), buffer, buffer, [Part(count, 0, (0,))])


def _reduce(count: int, allocate: Allocate) -> Prepared:
    buffer = allocate(count)
    call, tensors, options = backend_of(buffer.device).reduce, [buffer], _on_this_stream(ReduceOptions())
    options.rootRank = 0
    # only the root's buffer is defined afterwards
    parts = [Part(count, 0, _everybody())] if dist.get_rank() == 0 else []
    return Prepared(lambda: _finish(call(tensors, options)), buffer, buffer, parts)


def _on_this_stream(options: Any) -> Any:
    """As ``async_op=False`` does: NCCL's kernel goes to the current stream, without one of its own to wait for."""
    options.asyncOp = False
    return options


def _send_receive(count: int, allocate: Allocate) -> Prepared:
    """Each rank sends to the next and receives from the one before it, at the same time."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    following, before = (rank + 1) % ranks, (rank - 1) % ranks
    sent, received = allocate(count), allocate(count)
    both = [dist.P2POp(dist.isend, sent, following), dist.P2POp(dist.irecv, received, before)]

    def run() -> None:
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
        Operation("broadcast", "1", lambda _: 1.0, _broadcast, in_place=True),
        Operation("reduce", "1", lambda _: 1.0, _reduce, in_place=True),
        Operation("send_receive", "1", lambda _: 1.0, _send_receive),
    )
}
