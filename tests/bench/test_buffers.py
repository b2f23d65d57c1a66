"""NCCL's allocator with a fake of torch's CUDA functions: the calls and their order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
import torch.distributed as dist

from seatrial.bench import buffers
from seatrial.bench.buffers import Allocator
from seatrial.model import SeatrialError

CPU = torch.device("cpu")


class Backend:
    """Fake of torch's ProcessGroupNCCL; ``allocator`` None: this NCCL has no allocator."""

    def __init__(self, calls: list[str], allocator: str | None = "ncclMemAlloc") -> None:
        self._calls, self._allocator = calls, allocator

    @property
    def mem_allocator(self) -> str:
        if self._allocator is None:
            raise RuntimeError("NCCL mem allocator is not supported in this NCCL version")
        return self._allocator

    def register_mem_pool(self, pool: str) -> None:
        self._calls.append(f"register {pool}")

    def deregister_mem_pool(self, pool: str) -> None:
        self._calls.append(f"deregister {pool}")


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Calls of torch in order, with an NCCL process group."""
    calls: list[str] = []

    @contextmanager
    def use(pool: str, device: torch.device) -> Iterator[None]:
        assert device == CPU
        calls.append(f"allocate from {pool}")
        yield

    monkeypatch.setattr(dist, "get_backend", lambda: "nccl")
    monkeypatch.setattr(buffers, "process_group_backend", lambda device: Backend(calls))
    monkeypatch.setattr(torch.cuda, "MemPool", lambda allocator: f"pool of {allocator}")
    monkeypatch.setattr(torch.cuda, "use_mem_pool", use)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: calls.append("synchronize"))
    return calls


def test_buffers_come_from_nccls_pool_without_registration(calls: list[str]) -> None:
    allocator = Allocator("nccl", CPU)
    assert allocator.empty(3, torch.float16).shape == (3,)
    with allocator.registration():
        calls.append("work")
    assert calls == ["allocate from pool of ncclMemAlloc", "work"]


def test_registration_ends_when_the_device_is_idle_also_after_an_error(calls: list[str]) -> None:
    allocator = Allocator("registered", CPU)
    allocator.empty(3, torch.float32)
    with pytest.raises(ValueError, match="late"), allocator.registration():
        raise ValueError("late")
    pool = "pool of ncclMemAlloc"
    assert calls == [f"allocate from {pool}", f"register {pool}", "synchronize", f"deregister {pool}"]


def test_nccl_without_an_allocator_is_an_error(calls: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "process_group_backend", lambda device: Backend(calls, allocator=None))
    with pytest.raises(SeatrialError, match=r"option buffers .*NCCL mem allocator is not supported"):
        Allocator("nccl", CPU)


def test_nccl_allocator_requires_the_nccl_backend(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "get_backend", lambda: "gloo")
    with pytest.raises(SeatrialError, match=r"option buffers .*gloo"):
        Allocator("registered", CPU)
    assert Allocator("torch", CPU).empty(3, torch.float16).shape == (3,)
