"""Allocators for the buffers of an operation: torch's allocator, or NCCL's, which nccl-tests uses.

torch allocates by cudaMalloc; NCCL cannot register that memory with every transport (NCCL User Guide, User Buffer
Registration).
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
    "registered": "NCCL's allocator (ncclMemAlloc), registered with the communicator",
}


class TorchAllocator:
    """Allocates with torch's allocator, as training does."""

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.empty(count, dtype=dtype, device=device)

    @contextmanager
    def registration(self) -> Iterator[None]:
        yield


class NcclAllocator:
    """Allocates from a memory pool of NCCL's allocator; the buffers must be deleted before this object.

    Raises SeatrialError if the backend is not NCCL, or NCCL has no allocator.
    """

    def __init__(self, device: torch.device, *, register: bool) -> None:
        if dist.get_backend() != dist.Backend.NCCL:
            raise SeatrialError(
                f"option buffers requests NCCL's allocator, but the backend is {dist.get_backend()}; use buffers=torch"
            )
        self._backend, self._register = process_group_backend(device), register
        try:
            self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        except RuntimeError as error:
            raise SeatrialError(
                f"option buffers requests NCCL's allocator, which this NCCL does not have: {error}; use buffers=torch"
            ) from error

    def empty(self, count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool, device):
            return torch.empty(count, dtype=dtype, device=device)

    @contextmanager
    def registration(self) -> Iterator[None]:
        """Register the buffers allocated so far while the block runs, if ``register`` is set."""
        if not self._register:
            yield
            return
        self._backend.register_mem_pool(self._pool)
        try:
            yield
        finally:
            torch.cuda.synchronize()
            self._backend.deregister_mem_pool(self._pool)


def buffer_allocator(name: str, device: torch.device) -> TorchAllocator | NcclAllocator:
    """The allocator for ``name``, a key of ALLOCATORS."""
    return TorchAllocator() if name == "torch" else NcclAllocator(device, register=name == "registered")
