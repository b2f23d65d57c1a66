from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from seatrial.bench import algorithms


@pytest.fixture
def log(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """The log of a process group of this process alone."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.log"))
    yield tmp_path / "nccl.log"
    dist.destroy_process_group()


def ask(operation: str, size: int = 1000) -> dict[str, Any]:
    return {"operation": operation, "size": size, "dtype": "bfloat16", "buffers": "torch"}


def test_sizes_are_those_of_whole_elements_and_no_log_is_empty(log: Path) -> None:
    answer = algorithms.run({"asks": [ask("all_reduce"), ask("broadcast", 501)]}, "cpu")
    assert answer == {"log": str(log), "told": [[1000, 0, 0], [500, 0, 0]]}


def test_the_part_of_the_log_that_an_operation_wrote_is_given(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("before\n")

    class Calls:
        def wait(self) -> None:
            log.write_text(log.read_text() + "AllReduce\n")

    monkeypatch.setattr(algorithms, "collective_api", lambda _device: Calls())
    assert algorithms.run({"asks": [ask("all_reduce")] * 2}, "cpu")["told"] == [[1000, 7, 17], [1000, 17, 27]]


def test_an_operation_that_does_not_fit_is_not_run(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "min_free_memory", lambda _device: 2000.0)  # 1400 of it are for buffers
    asks = [ask("all_reduce"), ask("all_reduce", 1500), ask("all_gather")]  # the last one has two buffers
    told = algorithms.run({"asks": asks}, "cpu")["told"]
    assert [len(answer) for answer in told] == [3, 1, 1]
    assert told[1] == [1500]
