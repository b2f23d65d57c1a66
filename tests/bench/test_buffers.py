"""NCCL's own allocator, as far as it goes without a GPU: what is asked of torch, and in which order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from seatrial.bench import buffers
from seatrial.bench.buffers import NcclAllocator, TorchAllocator, buffer_allocator
from seatrial.model import SeatrialError

CPU = torch.device("cpu")


class Backend:
    """torch's ProcessGroupNCCL, with what there is of it here. ``allocator`` None: this NCCL has none."""

    def __init__(self, told: list[str], allocator: str | None = "ncclMemAlloc") -> None:
        self._told, self._allocator = told, allocator

    @property
    def mem_allocator(self) -> str:
        if self._allocator is None:
            raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")
        return self._allocator

    def register_mem_pool(self, pool: str) -> None:
        self._told.append(f"register {pool}")

    def deregister_mem_pool(self, pool: str) -> None:
        self._told.append(f"deregister {pool}")


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What was asked for, in its order, of a torch whose group is NCCL's."""
    told: list[str] = []

    @contextmanager
    def use(pool: str, device: torch.device) -> Iterator[None]:
        assert device == CPU
        told.append(f"allocate from {pool}")
        yield

    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(buffers, "process_group_backend", lambda device: Backend(told))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: told.append("synchronize"))
    return told


def test_buffers_come_from_nccls_pool_and_are_registered_only_if_asked(told: list[str]) -> None:
    source = buffer_allocator("nccl", CPU)
    assert source.empty(3, torch.float16, CPU).shape == (3,)
    with source.registration():
        told.append("work")
    assert told == ["allocate from pool of ncclMemAlloc", "work"]


def test_a_registration_ends_when_the_device_is_done_even_after_an_error(told: list[str]) -> None:
    source = buffer_allocator("nccl_registered", CPU)
    source.empty(3, torch.float32, CPU)
    with pytest.raises(ValueError, match="late"), source.registration():
        raise ValueError("late")
    pool = "pool of ncclMemAlloc"
    assert told == [f"allocate from {pool}", f"register {pool}", "synchronize", f"deregister {pool}"]


def test_an_nccl_without_an_allocator_is_an_error(told: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "process_group_backend", lambda device: Backend(told, allocator=None))
    with pytest.raises(SeatrialError, match="NCCL's allocator, and it has none: NCCL mem allocator is not supported"):
        buffer_allocator("nccl", CPU)


def test_no_allocator_of_nccl_without_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    with pytest.raises(SeatrialError, match="gloo moves the data"):
        NcclAllocator(CPU, register=False)
    assert isinstance(buffer_allocator("torch", CPU), TorchAllocator)
