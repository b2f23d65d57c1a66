from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from seatrial.bench import nccl_settings, subgroups
from seatrial.bench.collectives import CollectiveResult, Timings
from seatrial.bench.data_check import Mismatch

TASK: dict[str, Any] = {
    "groups": {"all_ranks": [[0, 1]]},
    "size": 4000,
    "seconds": 0.1,
    "untimed_sizes": [400, 4000, 40000],
}


@pytest.fixture
def untimed_sizes(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[list[int]]:
    """Sizes of the untimed all-reduces, in a process group of this process only; timed results are faked."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    sizes: list[int] = []
    bad = Mismatch(3, 0, "1", "2", "3")
    result = CollectiveResult(4000, Timings(((1e-6, 1e-6), (2e-6, 2e-6)), 1, 0), {1: bad})
    monkeypatch.setattr(dist, "all_reduce", lambda buffer: sizes.append(buffer.nbytes))
    monkeypatch.setattr(subgroups, "measure_all_reduce", lambda groups, size, device, seconds: [result] * len(groups))
    monkeypatch.setenv("NCCL_DEBUG_FILE", str(tmp_path / "nccl.log"))
    yield sizes
    dist.destroy_process_group()


def test_each_size_runs_once_and_groups_are_measured(untimed_sizes: list[int], tmp_path: Path) -> None:
    answer = nccl_settings.run(TASK, "cpu")
    assert untimed_sizes == [4000, 400, 40000]
    assert answer["busbw"]["all_ranks"] == [pytest.approx((4.0, 2.0))]  # 4000 B in 1 and 2 us, by two ranks
    assert (answer["wrong_elements"], answer["not_allocated"], answer["log_bytes"]) == (3, [], 0)
    assert answer["log"] == str(tmp_path / "nccl.log")


def test_sizes_above_half_of_the_free_memory_are_not_allocated(
    untimed_sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl_settings, "min_free_memory", lambda _device: 8000.0)
    assert nccl_settings.run(TASK, "cpu")["not_allocated"] == [40000]
    assert untimed_sizes == [4000, 400]
