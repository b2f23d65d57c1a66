"""Where the buffers of an operation come from: torch's allocator, or NCCL's own, which nccl-tests uses.

Which one it is decides what NCCL may do with them: memory of cudaMalloc, as torch's allocator takes it, cannot be
registered with every transport (NCCL User Guide, User Buffer Registration).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist

from seatrial.bench.torch_api import process_group_backend
from seatrial.model import SeatrialError

ALLOCATORS = {
    "torch": "torch's allocator",
    "nccl": "NCCL's allocator (ncclMemAlloc)",
    "nccl_registered": "NCCL's allocator (ncclMemAlloc), registered with the communicator",
}


class TorchAllocator:
    """Buffers as a training has them."""

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    @contextmanager
    def registration(self) -> Iterator[None]:
        yield


class NcclAllocator:
    """Buffers of a pool that NCCL allocates. The pool must outlive them: drop them first.

    Raises SeatrialError where NCCL does not move the data, or has no allocator.
    """

    def __init__(self, device: torch.device, *, register: bool) -> None:
        if dist.get_backend() != dist.Backend.NCCL:
            raise SeatrialError(
                f"the option buffers asks for NCCL's allocator, and here {dist.get_backend()} moves the data: "
                "it has none; leave buffers at torch"
            )
        self._backend, self._register = process_group_backend(device), register
        try:
            self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        except RuntimeError as error:
            raise SeatrialError(f"the option buffers asks for NCCL's allocator, and it has none: {error}") from error

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool, device):
            return torch.empty(count, dtype=dtype, device=device)

    @contextmanager
    def registration(self) -> Iterator[None]:
        """Registers, where that is wanted, what was allocated by now."""
        if not self._register:
            yield
            return
        self._backend.register_mem_pool(self._pool)
        try:
            yield
        finally:
            torch.cuda.synchronize()
            self._backend.deregister_mem_pool(self._pool)


def buffer_allocator(source: str, device: torch.device) -> TorchAllocator | NcclAllocator:
    """``source`` is a key of SOURCES."""
    return TorchAllocator() if source == "torch" else NcclAllocator(device, register=source == "nccl_registered")
