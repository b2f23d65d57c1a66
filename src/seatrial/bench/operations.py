"""The collective operations, with the sizes, bandwidth factors and definitions of nccl-tests (doc/PERFORMANCE.md).

Results are therefore comparable with published results of nccl-tests. Every operation runs in an open process group and
is called by all ranks together. With the NCCL backend, NCCL is called directly where possible; otherwise the operation
goes through torch's process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.distributed as dist

from seatrial.bench.data_check import ExpectedPart
from seatrial.bench.nccl_api import NcclApi, NcclApiUnavailable
from seatrial.bench.torch_api import TorchApi

Allocate = Callable[[int], torch.Tensor]  # the argument is the number of elements


@dataclass(frozen=True)
class PreparedOperation:
    """An operation with its buffers.

    ``expected``: the content of ``received`` after all ranks have called ``fill_input(sent)`` and then ``run``.
    ``summed_ranks``: the number of ranks whose data the operation sums; 1 if it only moves data.
    """

    run: Callable[[], object]
    sent: torch.Tensor
    received: torch.Tensor
    expected: Sequence[ExpectedPart]
    summed_ranks: int = 1


@dataclass(frozen=True)
class Operation:
    """A collective operation; ``busbw_factor(n)`` converts algorithm bandwidth to bus bandwidth for n ranks.

    ``busbw_formula``: the factor as text. ``prepare_with(sent, received)`` prepares the operation on these buffers.
    ``one_block_per_rank``: the larger buffer has one block per rank; sizes are rounded down to whole blocks.
    ``larger``: the buffer with all blocks; the other one has one block. ``in_place``: the buffers overlap: repeated
    sums grow until they are infinite, as with nccl-tests; this does not change the time. ``has_variant``: whether
    nccl-tests has an ``opposite_variant``.
    """

    name: str
    busbw_formula: str
    busbw_factor: Callable[[int], float]
    prepare_with: Callable[[torch.Tensor, torch.Tensor], PreparedOperation]
    larger: Literal["sent", "received"] | None = None
    in_place: bool = False
    has_variant: bool = False
    one_block_per_rank: bool = False

    def prepare(self, count: int, allocate: Allocate) -> PreparedOperation:
        """Prepare the operation on new buffers; ``count``: elements of the larger buffer."""
        buffer = allocate(count)
        if self.larger is None:
            return self.prepare_with(buffer, buffer if self.in_place else allocate(count))
        ranks = dist.get_world_size()
        block = buffer.chunk(ranks)[dist.get_rank()] if self.in_place else allocate(count // ranks)
        return self.prepare_with(buffer, block) if self.larger == "sent" else self.prepare_with(block, buffer)

    def element_count(self, size: int, itemsize: int, ranks: int) -> int:
        """Number of elements of the larger buffer, of at most about ``size`` bytes.

        Blocks of 16 B or more are multiples of 16 B (nccl-tests, src/all_gather.cu). A block has at least one element;
        nccl-tests skips sizes with empty blocks.
        """
        if not self.one_block_per_rank:
            return max(1, size // itemsize)
        alignment = 16 // itemsize
        block = size // itemsize // ranks
        aligned_block = block // alignment * alignment
        return max(1, aligned_block or block) * ranks

    def nominal_size(self, size: int, itemsize: int, ranks: int) -> int:
        """Size in bytes for metric names: the requested size, or the exact one if they differ by more than 1 %."""
        exact = self.element_count(size, itemsize, ranks) * itemsize
        return size if abs(exact - size) <= size / 100 else exact

    def opposite_variant(self) -> Operation | None:
        """The out-of-place variant of an in-place operation, and the reverse; None if nccl-tests has none."""
        return replace(self, in_place=not self.in_place, has_variant=False) if self.has_variant else None


def collective_api(device: torch.device) -> NcclApi | TorchApi:
    """NcclApi if NCCL can be called directly on ``device``, otherwise TorchApi.

    With the NCCL backend, the TorchApi contains the reason why NCCL cannot be called.
    """
    if dist.get_backend() != dist.Backend.NCCL:
        return TorchApi(device)
    try:
        return NcclApi(device)
    except NcclApiUnavailable as reason:
        return TorchApi(device, str(reason))


def _all_reduce(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    run = collective_api(sent.device).all_reduce(sent, received)
    return PreparedOperation(run, sent, received, [ExpectedPart(sent.numel(), 0)], dist.get_world_size())


def _all_gather(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    expected = [ExpectedPart(sent.numel(), 0, rank) for rank in range(dist.get_world_size())]
    return PreparedOperation(collective_api(sent.device).all_gather(sent, received), sent, received, expected)


def _reduce_scatter(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    expected = [ExpectedPart(received.numel(), received.numel() * dist.get_rank())]
    run = collective_api(sent.device).reduce_scatter(sent, received)
    return PreparedOperation(run, sent, received, expected, dist.get_world_size())


def _all_to_all(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    ranks = dist.get_world_size()
    block = sent.numel() // ranks
    expected = [ExpectedPart(block, block * dist.get_rank(), rank) for rank in range(ranks)]
    return PreparedOperation(collective_api(sent.device).all_to_all(sent, received), sent, received, expected)


def _broadcast(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    run = collective_api(sent.device).broadcast(sent, received)
    return PreparedOperation(run, sent, received, [ExpectedPart(sent.numel(), 0, rank=0)])


def _reduce(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    # The result is defined on the root only
    expected = [ExpectedPart(sent.numel(), 0)] if dist.get_rank() == 0 else []
    run = collective_api(sent.device).reduce(sent, received)
    return PreparedOperation(run, sent, received, expected, dist.get_world_size())


def _send_receive(sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    """Each rank sends to the next rank and receives from the previous rank concurrently."""
    rank, ranks = dist.get_rank(), dist.get_world_size()
    next_rank, previous = (rank + 1) % ranks, (rank - 1) % ranks
    run = collective_api(sent.device).send_receive(sent, next_rank, received, previous)
    return PreparedOperation(run, sent, received, [ExpectedPart(received.numel(), 0, previous)])


def _ring_share(ranks: int) -> float:
    return (ranks - 1) / ranks


def unit_factor(_ranks: int) -> float:
    return 1.0


_ALL_REDUCE = Operation(
    "all_reduce", "2(n−1)/n", lambda ranks: 2 * _ring_share(ranks), _all_reduce, in_place=True, has_variant=True
)
_ALL_GATHER = Operation(
    "all_gather",
    "(n−1)/n",
    _ring_share,
    _all_gather,
    larger="received",
    has_variant=True,
    one_block_per_rank=True,
)
_REDUCE_SCATTER = Operation(
    "reduce_scatter",
    "(n−1)/n",
    _ring_share,
    _reduce_scatter,
    larger="sent",
    has_variant=True,
    one_block_per_rank=True,
)
_ALL_TO_ALL = Operation("all_to_all", "(n−1)/n", _ring_share, _all_to_all, one_block_per_rank=True)
_BROADCAST = Operation("broadcast", "1", unit_factor, _broadcast, in_place=True, has_variant=True)
_REDUCE = Operation("reduce", "1", unit_factor, _reduce, in_place=True, has_variant=True)
_SEND_RECEIVE = Operation("send_receive", "1", unit_factor, _send_receive)

OPERATIONS = {
    operation.name: operation
    for operation in (_ALL_REDUCE, _ALL_GATHER, _REDUCE_SCATTER, _ALL_TO_ALL, _BROADCAST, _REDUCE, _SEND_RECEIVE)
}
