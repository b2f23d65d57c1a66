"""The operations by torch's process group.

They are called on torch's backend itself, with all arguments made beforehand: below some MiB, what Python and the
dispatcher take for a call (about 6 of 17 us) would be measured in place of the fabric.
"""

from __future__ import annotations

from collections.abc import Callable
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


def process_group_backend(device: torch.device) -> Any:
    """What moves the data of this process's group for such tensors: torch's ProcessGroupNCCL or ProcessGroupGloo."""
    return c10d._get_default_group()._get_backend(device)


class TorchApi:
    """Makes ready what runs one operation on buffers of ``device``; ``why``: why it is not called in another way.

    All-reduce, broadcast and reduce are in place: ValueError where ``received`` is another tensor than ``sent``.
    """

    supports_out_of_place = False

    def __init__(self, device: torch.device, why: str = "") -> None:
        self._device, self._backend = device, process_group_backend(device)
        self.description = f"torch's process group{f' ({why})' if why else ''}"

    def all_reduce(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        call, tensors, options = self._backend.allreduce, _same(sent, received), _on_this_stream(AllreduceOptions())
        return lambda: _finish(call(tensors, options))

    def all_gather(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        call, options = self._backend._allgather_base, _on_this_stream(AllgatherOptions())
        return lambda: _finish(call(received, sent, options))

    def reduce_scatter(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        call, options = self._backend._reduce_scatter_base, _on_this_stream(ReduceScatterOptions())
        return lambda: _finish(call(received, sent, options))

    def all_to_all(self, sent: torch.Tensor, received: torch.Tensor) -> Callable[[], None]:
        call, options = self._backend.alltoall_base, _on_this_stream(AllToAllOptions())
        equal: list[int] = []  # blocks of one size
        return lambda: _finish(call(received, sent, equal, equal, options))

    def broadcast(self, sent: torch.Tensor, received: torch.Tensor, root: int) -> Callable[[], None]:
        call, tensors, options = self._backend.broadcast, _same(sent, received), _on_this_stream(BroadcastOptions())
        options.rootRank, options.rootTensor = root, 0
        return lambda: _finish(call(tensors, options))

    def reduce(self, sent: torch.Tensor, received: torch.Tensor, root: int) -> Callable[[], None]:
        call, tensors, options = self._backend.reduce, _same(sent, received), _on_this_stream(ReduceOptions())
        options.rootRank = root
        return lambda: _finish(call(tensors, options))

    def send_receive(self, sent: torch.Tensor, to: int, received: torch.Tensor, source: int) -> Callable[[], None]:
        """Send to one rank and receive from another, both at once."""
        both = [dist.P2POp(dist.isend, sent, to), dist.P2POp(dist.irecv, received, source)]

        def run() -> None:
            for work in dist.batch_isend_irecv(both):
                work.wait()

        return run

    def wait(self) -> None:
        """To the end of all work; gloo's is done by then."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)


def _same(sent: torch.Tensor, received: torch.Tensor) -> list[torch.Tensor]:
    if sent is not received:
        raise ValueError("torch's process group has this operation in place only")
    return [sent]


def _finish(work: Any) -> None:
    """As torch's own wrappers do. NCCL's work is on the current stream already, and there is nothing to wait for."""
    if work is not None:
        work.wait()


def _on_this_stream(options: Any) -> Any:
    """As ``async_op=False`` does: NCCL's kernel goes to the current stream, without one of its own to wait for."""
    options.asyncOp = False
    return options
