from __future__ import annotations

import errno
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from seatrial.model import SeatrialError, UsageError
from seatrial.train import ranks
from seatrial.train.disk import DiskFullError


@pytest.fixture
def group() -> Iterator[None]:
    """A process group with one process."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_without_group_this_process_is_rank_0_of_1() -> None:
    assert (ranks.rank(), ranks.world_size(), ranks.gather("x")) == (0, 1, ["x"])


def test_with_group_values_are_gathered(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.bench.rank.gather", lambda value: [value, "other"])
    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    assert (ranks.rank(), ranks.world_size(), ranks.gather("x")) == (1, 2, ["x", "other"])


@pytest.mark.parametrize("grouped", [False, True])
def test_work_runs_once_on_rank_0(grouped: bool, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    if grouped:
        request.getfixturevalue("group")
    done: list[int] = []
    ranks.run_on_rank0(lambda: done.append(1), tmp_path)
    assert done == [1]


def test_other_rank_raises_the_error_of_rank_0(group: None, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def work() -> int:
        pytest.fail("work ran")

    monkeypatch.setattr(dist, "get_rank", lambda: 1)
    monkeypatch.setattr("seatrial.bench.rank.gather", lambda value: [7, value])
    assert ranks.run_on_rank0(work, tmp_path) == 7
    monkeypatch.setattr("seatrial.bench.rank.gather", lambda value: [UsageError("no such weights"), value])
    with pytest.raises(UsageError, match="no such weights"):
        ranks.run_on_rank0(lambda: pytest.fail("work ran"), tmp_path)


@pytest.mark.parametrize(
    ("error", "kind", "message"),
    [
        (UsageError("no such weights"), UsageError, "^no such weights$"),
        (ValueError("bad value"), SeatrialError, "^rank 0 failed .*: ValueError: bad value$"),
        (
            PermissionError(errno.EACCES, "denied", "/f"),
            SeatrialError,
            r"^rank 0 failed .*: \[Errno 13\] denied: '/f'",
        ),
        (OSError(errno.ENOSPC, "No space left on device"), DiskFullError, "^rank 0 failed "),
    ],
)
def test_failure_of_rank_0_is_reported(
    error: Exception, kind: type[SeatrialError], message: str, group: None, tmp_path: Path
) -> None:
    def fail() -> None:
        raise error

    with pytest.raises(kind, match=message) as caught:
        ranks.run_on_rank0(fail, tmp_path)
    assert type(caught.value) is kind
    assert caught.value.__cause__ is (None if isinstance(error, SeatrialError) else error)
