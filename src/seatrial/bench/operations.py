"""The collective operations, with the sizes, bandwidth factors and definitions of nccl-tests (doc/PERFORMANCE.md).

Results are therefore comparable with published results of nccl-tests. Every operation runs in an open process group and
is called by all ranks together. With the NCCL backend, NCCL is called directly where possible; otherwise the operation
goes through torch's process group.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

import torch
import torch.distributed as dist

from seatrial.bench.data_check import ExpectedPart
from seatrial.bench.nccl_api import NcclApi, NcclApiUnavailable
from seatrial.bench.torch_api import TorchApi
from seatrial.hardware.network_time import busbw_factor

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
    """A collective operation; ``prepare_with(sent, received)`` prepares the operation on these buffers.

    ``busbw_formula``: bus bandwidth ÷ algorithm bandwidth for n ranks, as text; ``busbw_factor``: as a number.
    ``one_block_per_rank``: the larger buffer has one block per rank; sizes are rounded down to whole blocks.
    ``larger``: the buffer with all blocks; the other one has one block. ``in_place``: the buffers overlap: repeated
    sums grow until they are infinite, as with nccl-tests; this does not change the time. ``has_variant``: whether
    nccl-tests has an ``opposite_variant``.
    """

    name: str
    prepare_with: Callable[[torch.Tensor, torch.Tensor], PreparedOperation]
    busbw_formula: str = "1"
    larger: Literal["sent", "received"] | None = None
    in_place: bool = False
    has_variant: bool = False
    one_block_per_rank: bool = False

    def busbw_factor(self, ranks: int) -> float:
        return busbw_factor(self.name, ranks)

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


def _prepare(name: str, sent: torch.Tensor, received: torch.Tensor) -> PreparedOperation:
    rank, ranks = dist.get_rank(), dist.get_world_size()
    run = collective_api(sent.device).prepare(name, sent, received)
    expected = _EXPECTED[name](sent.numel(), received.numel(), rank, ranks)
    return PreparedOperation(run, sent, received, expected, ranks if name in _SUMS else 1)


_SUMS = ("all_reduce", "reduce_scatter", "reduce")
# Operation → the expected parts of ``received``, from the elements of ``sent`` and of ``received``, rank and ranks
_EXPECTED: dict[str, Callable[[int, int, int, int], list[ExpectedPart]]] = {
    "all_reduce": lambda sent, *_: [ExpectedPart(sent, 0)],
    "all_gather": lambda sent, _received, _rank, ranks: [ExpectedPart(sent, 0, source) for source in range(ranks)],
    "reduce_scatter": lambda _sent, received, rank, _ranks: [ExpectedPart(received, received * rank)],
    "all_to_all": lambda sent, _received, rank, ranks: [
        ExpectedPart(sent // ranks, sent // ranks * rank, source) for source in range(ranks)
    ],
    "broadcast": lambda sent, *_: [ExpectedPart(sent, 0, rank=0)],
    "reduce": lambda sent, _received, rank, _ranks: [] if rank else [ExpectedPart(sent, 0)],  # on the root only
    "send_receive": lambda _sent, received, rank, ranks: [ExpectedPart(received, 0, (rank - 1) % ranks)],
}
OPERATIONS = {
    operation.name: operation
    for operation in (
        Operation("all_reduce", partial(_prepare, "all_reduce"), "2(n−1)/n", in_place=True, has_variant=True),
        Operation(
            "all_gather",
            partial(_prepare, "all_gather"),
            "(n−1)/n",
            larger="received",
            has_variant=True,
            one_block_per_rank=True,
        ),
        Operation(
            "reduce_scatter",
            partial(_prepare, "reduce_scatter"),
            "(n−1)/n",
            larger="sent",
            has_variant=True,
            one_block_per_rank=True,
        ),
        Operation("all_to_all", partial(_prepare, "all_to_all"), "(n−1)/n", one_block_per_rank=True),
        Operation("broadcast", partial(_prepare, "broadcast"), in_place=True, has_variant=True),
        Operation("reduce", partial(_prepare, "reduce"), in_place=True, has_variant=True),
        Operation("send_receive", partial(_prepare, "send_receive")),
    )
}
