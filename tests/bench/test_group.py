from __future__ import annotations

import os
from collections.abc import Iterator

import pytest
import torch
import torch.distributed as dist

from seatrial.bench.group import close_group, nccl_version, open_group


@pytest.fixture
def torchrun_environment(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The environment of torchrun for one process; restores the number of threads."""
    values = {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "LOCAL_WORLD_SIZE": "1"}
    for key, value in values.items():
        monkeypatch.setenv(key, value)
    threads = torch.get_num_threads()
    yield
    close_group()
    torch.set_num_threads(threads)


@pytest.mark.usefixtures("torchrun_environment")
def test_open_gloo_group_with_all_cores_and_close_it_twice() -> None:
    torch.set_num_threads(1)
    open_group("cpu", timeout_s=30)
    assert (dist.get_backend(), dist.get_world_size()) == ("gloo", 1)
    assert torch.get_num_threads() == len(os.sched_getaffinity(0))
    close_group()
    assert not dist.is_initialized()
    close_group()


@pytest.mark.usefixtures("torchrun_environment")
def test_no_nccl_version_without_nccl() -> None:
    open_group("cpu", timeout_s=30)
    assert nccl_version() is None


@pytest.mark.usefixtures("torchrun_environment")
def test_threads_are_divided_among_the_processes_of_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(7 if pid == 0 else 1)))
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "3")
    open_group("cpu", timeout_s=30)
    assert torch.get_num_threads() == 2


@pytest.mark.usefixtures("torchrun_environment")
@pytest.mark.parametrize("device", ["cuda", "meta"])
def test_device_without_backend_or_index_is_refused(device: str) -> None:
    with pytest.raises(ValueError, match=f"'{device}'.*cuda:N"):
        open_group(device, timeout_s=30)
    assert not dist.is_initialized()


def test_missing_variable_of_torchrun_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RANK", raising=False)
    with pytest.raises(ValueError, match="RANK"):
        open_group("cpu", timeout_s=30)
