from __future__ import annotations

from itertools import chain, combinations

import pytest

from seatrial.bench.pairs import circle


@pytest.mark.parametrize("nodes", range(2, 18))
def test_all_rounds_together_hold_every_pair_once(nodes: int) -> None:
    rounds = circle(nodes, nodes)
    assert len(rounds) == nodes - 1 + nodes % 2
    assert sorted(chain.from_iterable(rounds)) == sorted(combinations(range(nodes), 2))


@pytest.mark.parametrize(("nodes", "most"), [(2, 1), (9, 4), (64, 4), (1023, 3)])
def test_in_a_round_each_node_meets_at_most_one_other(nodes: int, most: int) -> None:
    rounds = circle(nodes, most)
    assert len(rounds) == most
    for paired in rounds:
        seated = list(chain.from_iterable(paired))
        assert len(seated) == len(set(seated)) == nodes - nodes % 2
