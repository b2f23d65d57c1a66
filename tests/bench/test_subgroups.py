"""Process subgroups, in a group of this process only or with fakes."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore

from seatrial.bench import subgroups
from seatrial.bench.collectives import CollectiveResult, Timings


@pytest.fixture
def group() -> Iterator[None]:
    """A process group of this process only."""
    dist.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_ranks_by_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(subgroups, "gather", lambda _node: ["b", "a", "b", "a"])
    assert subgroups.ranks_by_node("b") == {"b": (0, 2), "a": (1, 3)}


@pytest.mark.parametrize(("ranks", "expected"), [((0, 1), "H100"), ((0, 2), "H100 + H200"), ((3,), None)])
def test_gpu_models(monkeypatch: pytest.MonkeyPatch, ranks: tuple[int, ...], expected: str | None) -> None:
    monkeypatch.setattr(subgroups, "describe_device", lambda _device: {"gpu": "H100"})
    monkeypatch.setattr(subgroups, "gather", lambda _model: ["H100", "H100", "H200", None])
    assert subgroups.gpu_models(ranks, "cuda:0") == expected


def test_timings_of_some_ranks_and_bus_bandwidth() -> None:
    timings = Timings(((1.0, 2.0, 3.0, 4.0), (5.0, 6.0, 7.0, 8.0)), 10, 3).of_ranks((1, 3))
    assert timings == Timings(((2.0, 4.0), (6.0, 8.0)), 10, 3)
    result = CollectiveResult(8 * 10**9, Timings(((2.0,) * 4, (4.0,) * 4), 1, 0), {})
    assert result.busbw == pytest.approx((4 * 1.5, 2 * 1.5))  # S / t · 2·3/4


def test_all_reduce_is_timed_and_checked(group: None) -> None:
    (result,) = subgroups.measure_all_reduce([[0]], 2**12, "cpu", 0.01)
    assert result.mismatches == {}
    assert all(seconds > 0 for seconds in result.timings.window_means)


def test_wrong_sum_is_reported_by_rank(group: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dist, "all_reduce", lambda buffer, group=None: buffer[7:9].fill_(0.5))
    (result,) = subgroups.measure_all_reduce([[0]], 2**12, "cpu", 0.01)
    assert (result.mismatches[0].wrong, result.mismatches[0].offset) == (2, 7)


@pytest.mark.parametrize(
    ("rank", "groups", "expected", "created"),
    [
        (0, [[0, 1, 2, 3]], (None, (0, 1, 2, 3)), []),
        (3, [[0, 1], [2, 3]], ("[2, 3]", (2, 3)), [[0, 1], [2, 3]]),
        (2, [[0, 1]], (None, ()), [[0, 1]]),  # this rank is in no group, but takes part in creating it
    ],
)
def test_every_rank_creates_all_groups_and_destroys_its_own(
    monkeypatch: pytest.MonkeyPatch, rank: int, groups: list[list[int]], expected: Any, created: list[list[int]]
) -> None:
    new: list[list[int]] = []
    destroyed: list[Any] = []

    def new_group(ranks: list[int]) -> str:
        new.append(ranks)
        return str(ranks)

    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    monkeypatch.setattr(dist, "get_rank", lambda: rank)
    monkeypatch.setattr(dist, "new_group", new_group)
    monkeypatch.setattr(dist, "destroy_process_group", destroyed.append)
    with subgroups.open_subgroups(groups, "cpu") as opened:
        assert opened == expected
        assert destroyed == []
    assert new == created
    assert destroyed == ([expected[0]] if expected[0] else [])
