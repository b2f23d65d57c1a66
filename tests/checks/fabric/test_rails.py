"""Which ranks are a rail, and what a slow one means; real rails are in test_scenes.py."""

from __future__ import annotations

import pytest

from seatrial.checks.fabric.rails import CHECK, group_by_rail
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

SLOW = {"rail_share rail0": 1.0, "rail_share rail1": 0.89, "rail_share rail2": 1.0, "wrong_elements": 0}


def test_a_rail_has_one_rank_of_every_node() -> None:
    assert group_by_rail({"a": (0, 1), "b": (2, 3), "c": (4, 5)}) == [[0, 2, 4], [1, 3, 5]]


def test_nodes_of_unlike_numbers_of_ranks_have_no_rails() -> None:
    with pytest.raises(ValueError, match="shorter"):
        group_by_rail({"a": (0, 1), "b": (2,)})


@pytest.mark.parametrize(
    ("backend", "comparable", "outcome"),
    [("nccl", "yes", Outcome.FAIL), ("nccl", "no", Outcome.SKIP), ("gloo", "yes", Outcome.SKIP)],
)
def test_a_rail_is_slow_among_three_on_a_fabric(backend: str, comparable: str, outcome: Outcome) -> None:
    judged = outcomes(CHECK, SLOW, backend=backend, comparable=comparable)
    assert judged == {"rail_share": outcome, "wrong_elements": Outcome.PASS}
