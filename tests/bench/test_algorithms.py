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
    """NCCL's log path, with a process group of this process only."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.log"))
    yield tmp_path / "nccl.log"
    dist.destroy_process_group()


def request(operation: str, size: int = 1000) -> dict[str, Any]:
    return {"operation": operation, "size": size, "dtype": "bfloat16", "buffers": "torch"}


def test_sizes_are_whole_elements_and_ranges_of_a_missing_log_are_empty(log: Path) -> None:
    answer = algorithms.run({"requests": [request("all_reduce"), request("broadcast", 501)]}, "cpu")
    assert answer == {"log": str(log), "log_ranges": [[1000, 0, 0], [500, 0, 0]]}


def test_log_range_of_each_operation(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    log.write_text("before\n")

    class Calls:
        def wait(self) -> None:
            log.write_text(log.read_text() + "AllReduce\n")

    monkeypatch.setattr(algorithms, "collective_api", lambda _device: Calls())
    assert algorithms.run({"requests": [request("all_reduce")] * 2}, "cpu")["log_ranges"] == [
        [1000, 7, 17],
        [1000, 17, 27],
    ]


def test_operation_that_does_not_fit_into_memory_is_not_run(log: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(algorithms, "min_free_memory", lambda _device: 2000.0)  # 1400 of them for buffers
    requests = [request("all_reduce"), request("all_reduce", 1500), request("all_gather")]  # the last needs two buffers
    log_ranges = algorithms.run({"requests": requests}, "cpu")["log_ranges"]
    assert [len(log_range) for log_range in log_ranges] == [3, 1, 1]
    assert log_ranges[1] == [1500]
