"""Allocators for the buffers of an operation: torch's allocator, or NCCL's, which nccl-tests uses.

torch allocates by cudaMalloc; NCCL cannot register that memory with every transport (NCCL User Guide, User Buffer
Registration).
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist

from seatrial.bench.torch_api import process_group_backend
from seatrial.model import SeatrialError

ALLOCATORS = {
    "torch": "torch's allocator",
    "nccl": "NCCL's allocator (ncclMemAlloc)",
    "registered": "NCCL's allocator (ncclMemAlloc), registered with the communicator",
}


class Allocator:
    """Allocates buffers on ``device`` with the allocator ``name``, a key of ALLOCATORS.

    NCCL's allocator has a memory pool: the buffers must be deleted before this object. Raises SeatrialError if the
    backend is not NCCL, or NCCL has no allocator.
    """

    def __init__(self, name: str, device: torch.device) -> None:
        self._device, self._register = device, name == "registered"
        self._pool: Any = None
        if name == "torch":
            return
        if dist.get_backend() != dist.Backend.NCCL:
            raise SeatrialError(
                f"option buffers requests NCCL's allocator, but the backend is {dist.get_backend()}; use buffers=torch"
            )
        self._backend = process_group_backend(device)
        try:
            self._pool = torch.cuda.MemPool(self._backend.mem_allocator)
        except RuntimeError as error:
            raise SeatrialError(
                f"option buffers requests NCCL's allocator, which this NCCL does not have: {error}; use buffers=torch"
            ) from error

    def empty(self, count: int, dtype: torch.dtype) -> torch.Tensor:
        with torch.cuda.use_mem_pool(self._pool, self._device) if self._pool is not None else nullcontext():
            return torch.empty(count, dtype=dtype, device=self._device)

    @contextmanager
    def registration(self) -> Iterator[None]:
        """Register the buffers allocated so far while the block runs, with the allocator "registered"."""
        if not self._register:
            yield
            return
        self._backend.register_mem_pool(self._pool)
        try:
            yield
        finally:
            torch.cuda.synchronize()
            self._backend.deregister_mem_pool(self._pool)
