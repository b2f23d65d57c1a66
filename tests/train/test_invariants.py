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
from seatrial.train.invariants import RankInfo, SampleCounts, count_samples


def process(rank: int, **changes: object) -> RankInfo:
    environment: dict[str, str | None] = {"RANK": str(rank), "WORLD_SIZE": "4", "LOCAL_RANK": str(rank % 2)}
    info = RankInfo(rank, 4, rank % 2, environment, f"node{rank // 2}", "NVIDIA H200", f"GPU-{rank}")
    return replace(info, **changes)  # type: ignore[arg-type]


def test_consistent_processes_have_no_errors() -> None:
    assert invariants.rank_errors([process(rank) for rank in range(4)]) == {}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"environment": {"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "0"}}, "RANK is 3, expected 2"),
        ({"environment": {"RANK": "2", "WORLD_SIZE": "8", "LOCAL_RANK": "0"}}, "WORLD_SIZE is 8, expected 4"),
        (
            {"environment": {"RANK": "2", "WORLD_SIZE": "4", "LOCAL_RANK": None}},
            "LOCAL_RANK is not set, expected 0",
        ),
        ({"world_size": 3}, "world size 3"),
    ],
)
def test_a_process_with_a_wrong_environment_is_reported(changes: dict[str, object], message: str) -> None:
    ranks = [process(0), process(1), process(2, **changes), process(3)]
    errors = invariants.rank_errors(ranks)
    assert set(errors) == {2}
    assert message in errors[2]


def test_a_rank_used_twice_leaves_another_missing() -> None:
    errors = invariants.rank_errors([process(0), process(1), process(1), process(3)])
    assert set(errors) == {1, 2}
    assert "2 processes are rank 1" in errors[1]
    assert errors[2] == "missing"


def test_a_local_rank_used_twice_is_reported_for_both() -> None:
    moved = process(3, node="node0", local_rank=1, environment={"RANK": "3", "WORLD_SIZE": "4", "LOCAL_RANK": "1"})
    assert set(invariants.rank_errors([process(0), process(1), process(2), moved])) == {1, 3}


def test_a_local_rank_with_three_processes_has_their_number() -> None:
    environment = {"RANK": "2", "WORLD_SIZE": "3", "LOCAL_RANK": "0"}
    ranks = [
        process(rank, world_size=3, node="node0", local_rank=0, environment=environment | {"RANK": str(rank)})
        for rank in range(3)
    ]
    assert set(invariants.rank_errors(ranks).values()) == {"local rank 0 of node0: 3 processes"}


def test_a_rank_that_does_not_report_is_missing() -> None:
    errors = invariants.rank_errors([process(rank) for rank in range(3)])
    assert errors[3] == "missing"
    assert errors[0] == "WORLD_SIZE is 4, expected 3; world size 4 in torch, but 3 ranks reported"


def test_shared_gpus() -> None:
    assert invariants.shared_gpus([process(0), process(1), process(2)]) == {}
    assert invariants.shared_gpus([process(0), process(1, gpu_uuid="GPU-0"), process(2)]) == {"GPU-0": [0, 1]}
    assert invariants.shared_gpus([process(rank, gpu_uuid=None) for rank in range(3)]) == {}


def test_rank_info_of_this_process() -> None:
    info = invariants.read_rank_info(0, 1, 0, "node0", "cpu")
    assert info.gpu_uuid is None
    assert info.environment["RANK"] == os.environ.get("RANK")


@given(size=st.integers(min_value=16, max_value=200), ranks=st.integers(min_value=1, max_value=16))
def test_block_order_covers_every_dataset(size: int, ranks: int) -> None:
    rank_samples = [list(islice(data.block_order(size, rank, ranks, 0), size // ranks)) for rank in range(ranks)]
    assert count_samples(rank_samples, size) == SampleCounts(0, 0, size % ranks)


@pytest.mark.parametrize(
    ("rank_samples", "expected"),
    [
        ([[0, 2], [1, 3]], SampleCounts(0, 0, 1)),
        ([[0, 2], [1, 1]], SampleCounts(1, 1, 1)),  # 3 is replaced by 1
        ([[0, 2], [1]], SampleCounts(1, 0, 1)),  # 3 is not read
        ([[0, 2, 4], [1, 3]], SampleCounts(0, 0, 1)),  # 4 is not dropped
        ([[0, 1, 2, 3, 4], [0, 1, 2, 3, 4]], SampleCounts(0, 5, 1)),  # every rank reads everything
    ],
)
def test_counts_of_missing_and_repeated_samples(rank_samples: list[list[int]], expected: SampleCounts) -> None:
    assert count_samples(rank_samples, 5) == expected


def test_one_bit_changes_the_digest() -> None:
    models = [nn.Linear(3, 2), nn.BatchNorm1d(2)]
    digests_seen = {invariants.parameter_digest(models)}
    assert invariants.parameter_digest(models) in digests_seen
    for name, tensor in nn.ModuleList(models).state_dict().items():
        tensor.reshape(-1).view(torch.uint8)[-1] ^= 1
        digest = invariants.parameter_digest(models)
        assert digest not in digests_seen, name
        digests_seen.add(digest)


@pytest.mark.parametrize(
    ("digests", "mismatched"),
    [("a", []), ("aaaa", []), ("aaba", [2]), ("abbb", [0]), ("abacaa", [1, 3]), ("ab", [0, 1]), ("aabb", [0, 1, 2, 3])],
)
def test_mismatched_ranks_differ_from_the_majority(digests: str, mismatched: list[int]) -> None:
    assert invariants.mismatched_ranks(digests) == mismatched
