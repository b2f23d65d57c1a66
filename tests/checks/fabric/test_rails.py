"""Ranks of a rail and verdicts on rails; real groups: test_real_groups.py."""

from __future__ import annotations

import pytest

from seatrial.checks.fabric.rails import CHECK, group_by_rail
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

H200 = {"gpu": "NVIDIA H200", "world_size": 6, "nodes": 2}
SLOW = {
    "rail_busbw rail0": 48.0,
    "rail_share rail0": 1.0,
    "rail_share rail1": 0.89,
    "rail_share rail2": 1.0,
    "wrong_elements": 0,
}


def test_rail_has_one_rank_per_node() -> None:
    assert group_by_rail({"a": (0, 1), "b": (2, 3), "c": (4, 5)}) == [[0, 2, 4], [1, 3, 5]]


def test_different_numbers_of_ranks_are_rejected() -> None:
    with pytest.raises(ValueError, match="shorter"):
        group_by_rail({"a": (0, 1), "b": (2,)})


@pytest.mark.parametrize(
    ("backend", "outcome"),
    [("nccl", Outcome.FAIL), ("gloo", Outcome.SKIP)],
)
def test_slow_rail_fails_with_nccl(backend: str, outcome: Outcome) -> None:
    judged = outcomes(CHECK, SLOW, backend=backend, **H200)
    judged.pop("rail_busbw")  # its reference is the rate of the ports: tests/judge/test_groups.py
    assert judged == {"rail_share": outcome, "wrong_elements": Outcome.PASS}
