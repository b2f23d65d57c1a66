from __future__ import annotations

from itertools import chain, combinations

import pytest

from seatrial.bench.data_check import Mismatch
from seatrial.bench.pairs import PairResults, PairTiming, round_robin
from seatrial.checks.fabric import pairs
from seatrial.model import CLUSTER, Fact, Metric


@pytest.mark.parametrize("nodes", range(2, 18))
def test_all_rounds_together_hold_every_pair_once(nodes: int) -> None:
    rounds = round_robin(nodes, nodes)
    assert len(rounds) == nodes - 1 + nodes % 2
    assert sorted(chain.from_iterable(rounds)) == sorted(combinations(range(nodes), 2))


@pytest.mark.parametrize(("nodes", "most"), [(2, 1), (9, 4), (64, 4), (1023, 3)])
def test_in_a_round_each_node_meets_at_most_one_other(nodes: int, most: int) -> None:
    rounds = round_robin(nodes, most)
    assert len(rounds) == most
    for paired in rounds:
        seated = list(chain.from_iterable(paired))
        assert len(seated) == len(set(seated)) == nodes - nodes % 2


def test_data_that_arrives_wrong_when_a_path_is_tried_alone_counts_as_any_other() -> None:
    """It was seen, and such a path shares no uplink: it carries nothing."""
    seconds, size = (0.01,) * 12, 2**20
    ends = [(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)]
    lines = tuple(
        PairTiming(a, b, tuple(3 * one for one in seconds) if {a, b} == {0, 1} else seconds, None) for a, b in ends
    )
    alone = (PairTiming(0, 1, seconds, None), PairTiming(1, 0, seconds, Mismatch(7, 5, "1.0", "2.0", "0x1")))
    nodes = {f"node{rank}": (rank,) for rank in range(4)}
    figures = PairResults(lines, size, nodes, list(nodes), alone)
    seen = list(pairs._observations(figures, 3, "nccl"))
    metrics = {(one.name, one.subject): one.value for one in seen if isinstance(one, Metric)}
    facts = {one.name: one.value for one in seen if isinstance(one, Fact)}
    assert metrics["wrong_elements", CLUSTER] == 7
    assert metrics["pair_share", "node0->node1"] == 0
    assert metrics["shared_paths", CLUSTER] == 0
    assert facts["wrong_data"] == [
        {"from": "node0", "to": "node1", "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    ]
