from __future__ import annotations

import os
from dataclasses import replace
from itertools import islice

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from seatrial.train import data, invariants
from seatrial.train.invariants import Coverage, RankInfo, coverage


def process(rank: int, **changes: object) -> RankInfo:
    environment: dict[str, str | None] = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2)}
    own = RankInfo(rank, 4, rank % 2, environment, f"node{rank // 2}", "NVIDIA H200", f"GPU-{rank}", "0-3")
    return replace(own, **changes)  # type: ignore[arg-type]


def test_four_processes_in_their_places_have_no_fault() -> None:
    assert invariants.rank_errors([process(rank) for rank in range(4)]) == {}


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"environment": {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}}, "RANK is 3, torch has 2"),
        ({"environment": {"RANK": "2", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}}, "WORLD_SIZE is 8, torch has 4"),
        ({"environment": {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": None}}, "LOCAL_RANK is None, torch has 0"),
        ({"world_size": 3}, "torch counts 3 ranks, 4 answered"),
    ],
)
def test_a_process_that_contradicts_itself_is_named(changed: dict[str, object], fault: str) -> None:
    ranks = [process(0), process(1), process(2, **changed), process(3)]
    assert invariants.rank_errors(ranks) == {2: fault}


def test_a_rank_taken_twice_leaves_another_missing() -> None:
    faults = invariants.rank_errors([process(0), process(1), process(1), process(3)])
    assert set(faults) == {1, 2}
    assert "2 processes are rank 1" in faults[1]
    assert faults[2] == "missing"


def test_a_seat_taken_twice_is_named_on_both() -> None:
    moved = process(3, node="node0", local_rank=1, environment={"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert set(invariants.rank_errors([process(0), process(1), process(2), moved])) == {1, 3}


def test_processes_on_one_gpu_are_named() -> None:
    assert invariants.shared_gpus([process(0), process(1), process(2)]) == {}
    assert invariants.shared_gpus([process(0), process(1, gpu_uuid="GPU-0"), process(2)]) == {"GPU-0": [0, 1]}
    assert invariants.shared_gpus([process(rank, gpu_uuid=None) for rank in range(3)]) == {}


def test_this_process_is_described() -> None:
    own = invariants.read_rank_info(0, 1, 0, "node0", "cpu")
    assert own.gpu_uuid is None
    assert own.cpus == invariants.core_list(os.sched_getaffinity(0))
    assert own.environment["RANK"] == os.environ.get("RANK")


@pytest.mark.parametrize(
    ("cores", "text"), [({0}, "0"), ({3, 1, 2, 0, 8}, "0-3,8"), ({1, 3, 5, 6}, "1,3,5-6"), (set(), "")]
)
def test_cores_are_written_as_the_kernel_does(cores: set[int], text: str) -> None:
    assert invariants.core_list(cores) == text


@given(size=st.integers(min_value=16, max_value=200), ranks=st.integers(min_value=1, max_value=16))
def test_the_native_order_covers_any_data_set_as_promised(size: int, ranks: int) -> None:
    shares = [list(islice(data.block_order(size, rank, ranks, 0), size // ranks)) for rank in range(ranks)]
    assert coverage(shares, size) == Coverage(0, 0, size % ranks)


@pytest.mark.parametrize(
    ("shares", "found"),
    [
        ([[0, 2], [1, 3]], Coverage(0, 0, 1)),
        ([[0, 2], [1, 1]], Coverage(1, 1, 1)),  # 3 is replaced by 1
        ([[0, 2], [1]], Coverage(1, 0, 1)),  # 3 is dropped
        ([[0, 2, 4], [1, 3]], Coverage(0, 0, 1)),  # 4 is not left out
        ([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], Coverage(0, 5, 1)),  # every rank was given everything
    ],
)
def test_a_wrong_share_is_counted(shares: list[list[int]], found: Coverage) -> None:
    assert coverage(shares, 5) == found


def test_one_bit_changes_the_digest() -> None:
    models = [nn.Linear(3, 2), nn.BatchNorm1d(2)]
    seen = {invariants.parameter_digest(models)}
    assert invariants.parameter_digest(models) in seen
    for name, tensor in nn.ModuleList(models).state_dict().items():
        tensor.reshape(-1).view(torch.uint8)[-1] ^= 1
        digest = invariants.parameter_digest(models)
        assert digest not in seen, name
        seen.add(digest)


@pytest.mark.parametrize(
    ("digests", "odd"),
    [("a", []), ("aaaa", []), ("aaba", [2]), ("abbb", [0]), ("abacaa", [1, 3]), ("ab", [0, 1]), ("aabb", [0, 1, 2, 3])],
)
def test_the_majority_is_right_where_there_is_one(digests: str, odd: list[int]) -> None:
    assert invariants.mismatched_ranks(digests) == odd
