"""Operations of torch's process group on one rank; test_operations.py has three ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from seatrial.bench.torch_api import TorchApi, process_group_backend

CPU = torch.device("cpu")


@pytest.fixture(scope="module", autouse=True)
def group() -> Iterator[None]:
    if dist.is_initialized():  # a failed training of another test has left it open
        dist.destroy_process_group()
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.fixture
def api() -> TorchApi:
    return TorchApi(CPU, "no GPU")


def test_backend_is_that_of_the_device(api: TorchApi) -> None:
    assert type(process_group_backend(CPU)).__name__ == "ProcessGroupGloo"
    assert api.description == "torch's process group (no GPU)"
    assert TorchApi(CPU).description == "torch's process group"


@pytest.mark.parametrize("name", ["all_gather", "reduce_scatter", "all_to_all"])
def test_operation_writes_the_received_buffer(api: TorchApi, name: str) -> None:
    sent, received = torch.arange(4.0), torch.zeros(4)
    call = api.prepare(name, sent, received)
    assert received.tolist() == [0] * 4, "prepared, not started"
    call()
    assert received.tolist() == sent.tolist() == [0, 1, 2, 3]
    sent += 1
    call()
    assert received.tolist() == [1, 2, 3, 4], "a prepared call can be repeated"


@pytest.mark.parametrize("name", ["all_reduce", "broadcast", "reduce"])
def test_operation_is_in_place_only(api: TorchApi, name: str) -> None:
    buffer = torch.arange(4.0)
    api.prepare(name, buffer, buffer)()
    api.wait()
    assert buffer.tolist() == [0, 1, 2, 3]
    with pytest.raises(ValueError, match="in place only"):
        api.prepare(name, buffer, torch.zeros(4))


def test_send_and_receive_are_one_concurrent_operation(monkeypatch: pytest.MonkeyPatch, api: TorchApi) -> None:
    """gloo cannot send to its own rank: the operations are those that torch would start."""
    started: list[list[object]] = []

    def start(operations: list[object]) -> list[dist.Work]:
        started.append(operations)
        return []

    monkeypatch.setattr(dist, "batch_isend_irecv", start)
    monkeypatch.setattr(dist, "P2POp", lambda *arguments: arguments)
    monkeypatch.setattr(dist, "get_rank", lambda: 2)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    sent, received = torch.ones(2), torch.zeros(2)
    api.prepare("send_receive", sent, received)()
    assert started == [[(dist.isend, sent, 3), (dist.irecv, received, 1)]]
