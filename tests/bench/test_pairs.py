from __future__ import annotations

from collections import Counter
from itertools import chain, combinations

import pytest

from seatrial.bench.data_check import Mismatch
from seatrial.bench.pairs import PairResults, PairTiming, partner_map, rounds_by_group
from seatrial.checks.fabric import pairs
from seatrial.hardware.pair_search import round_robin
from seatrial.model import CLUSTER
from tests.checks.fabric.verdicts import measurement


@pytest.mark.parametrize("nodes", range(2, 18))
def test_all_rounds_together_contain_every_pair_once(nodes: int) -> None:
    rounds = round_robin(nodes, nodes)
    assert len(rounds) == nodes - 1 + nodes % 2
    assert sorted(chain.from_iterable(rounds)) == sorted(combinations(range(nodes), 2))


@pytest.mark.parametrize(("nodes", "max_rounds"), [(2, 1), (9, 4), (64, 4), (1023, 3)])
def test_pairs_of_a_round_are_disjoint(nodes: int, max_rounds: int) -> None:
    rounds = round_robin(nodes, max_rounds)
    assert len(rounds) == max_rounds
    for paired in rounds:
        members = list(chain.from_iterable(paired))
        assert len(members) == len(set(members)) == nodes - nodes % 2


def test_ranks_with_the_same_index_are_partners() -> None:
    ranks = {"n0": (0, 1), "n1": (2, 3), "n2": (4, 5)}
    assert partner_map([("n2", "n0")], ranks) == {4: 0, 0: 4, 5: 1, 1: 5}
    assert partner_map([(0, 1)], list(ranks.values())) == {0: 2, 2: 0, 1: 3, 3: 1}
    with pytest.raises(ValueError, match="argument 2 is longer"):
        partner_map([(0, 1)], [(0,), (1, 2)])


@pytest.mark.parametrize("sizes", [(8, 8), (3, 3, 3), (16,) * 4, (18, 14), (5, 5, 1), (32,) * 32, (10, 1, 1)])
def test_rounds_inside_and_across_groups_alternate(sizes: tuple[int, ...]) -> None:
    groups = [group for group, size in enumerate(sizes) for _ in range(size)]
    rounds = rounds_by_group(groups, 4)
    for paired in rounds:
        members = list(chain.from_iterable(paired))
        assert len(members) == len(set(members)) >= len(groups) - 2
    pairs = list(chain.from_iterable(rounds))
    assert len(set(pairs)) == len(pairs)
    assert min(Counter(chain.from_iterable(pairs))[node] for node in range(len(groups))) >= 3
    if len(set(sizes)) == 1 and sizes[0] % 2 == 0:
        inside = [sum(groups[a] == groups[b] for a, b in paired) for paired in rounds]
        assert inside == [len(groups) // 2, 0, len(groups) // 2, 0]


def test_wrong_data_in_a_retry_counts() -> None:
    """The pair then has rate 0, and does not count as a shared path."""
    seconds, size = (0.01,) * 12, 2**20
    ends = [(0, 1), (1, 0), (2, 3), (3, 2), (0, 2), (2, 0), (1, 3), (3, 1)]
    slow = tuple(3 * window for window in seconds)
    timings = tuple(PairTiming(a, b, slow if {a, b} == {0, 1} else seconds, None) for a, b in ends)
    retries = (PairTiming(0, 1, seconds, None), PairTiming(1, 0, seconds, Mismatch(7, 5, "1.0", "2.0", "0x1")))
    nodes = {f"node{rank}": (rank,) for rank in range(4)}
    results = PairResults(timings, size, nodes, list(nodes), retries)
    measured = measurement(pairs.CHECK, pairs._answers(results, 3, "nccl", {}), "node0").metrics
    metrics = {(metric.name, metric.subject): metric for metric in measured}
    assert metrics["wrong_elements", CLUSTER].value == 7
    assert metrics["path_share", "node0->node1"].value == 0
    assert metrics["shared_paths", CLUSTER].value == 0
    wrong = {"from": "node0", "to": "node1", "wrong": 7, "offset": 5, "expected": "1.0", "got": "2.0", "xor": "0x1"}
    assert metrics["wrong_elements", CLUSTER].evidence == {"wrong_data": [wrong]}
