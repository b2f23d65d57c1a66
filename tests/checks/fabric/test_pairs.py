"""How many bad nodes pairs tell apart, and what their figures mean; real exchanges are in test_scenes.py."""

from __future__ import annotations

import pytest

from seatrial.checks.fabric.pairs import CHECK, PairOptions, _told_apart
from seatrial.model import Outcome
from tests.checks.fabric.verdicts import outcomes

GOOD = {"best_share node0/gpu0": 1.0, "pair_share node0->node1": 1.0, "shared_paths": 0, "wrong_elements": 0}
COMPARABLE = {"backend": "nccl", "comparable": "yes"}


@pytest.mark.parametrize(
    ("nodes", "rounds", "bad"),
    [
        (2, 1, 0),  # either of two may be at fault
        (3, 3, 1),  # each rests once: two partners
        (4, 3, 1),
        (8, 7, 3),  # most are good
        (9, 4, 2),  # each may rest once
        (1000, 4, 3),  # one of four partners is good
    ],
)
def test_as_many_bad_nodes_are_told_apart_as_good_partners_are_left(nodes: int, rounds: int, bad: int) -> None:
    assert _told_apart(nodes, rounds) == bad


@pytest.mark.parametrize(
    ("metric", "value", "outcome"),
    [
        ("best_share node0/gpu0", 0.89, Outcome.FAIL),
        ("pair_share node0->node1", 0.89, Outcome.FAIL),
        ("shared_paths", 1, Outcome.WARN),
        ("wrong_elements", 1, Outcome.FAIL),
    ],
)
def test_what_is_slow_fails_and_a_shared_uplink_is_a_warning(metric: str, value: float, outcome: Outcome) -> None:
    judged = outcomes(CHECK, GOOD, **COMPARABLE)
    assert set(judged.values()) == {Outcome.PASS}
    assert outcomes(CHECK, {**GOOD, metric: value}, **COMPARABLE) == {**judged, metric.partition(" ")[0]: outcome}


@pytest.mark.parametrize("facts", [{"backend": "gloo", "comparable": "yes"}, {"backend": "nccl", "comparable": "no"}])
def test_of_two_nodes_and_of_cpus_only_the_data_is_judged(facts: dict[str, str]) -> None:
    slow = {"best_share node0/gpu0": 0.1, "pair_share node0->node1": 0.1, "shared_paths": 3, "wrong_elements": 1}
    judged = outcomes(CHECK, slow, **facts)
    assert judged.pop("wrong_elements") is Outcome.FAIL
    assert set(judged.values()) == {Outcome.SKIP}


def test_sizes_are_read_as_people_write_them() -> None:
    assert PairOptions.model_validate({"size": "1MiB"}).size == 2**20
