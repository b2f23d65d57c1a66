from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from seatrial.train.markov import ENTROPY, STATES, generate_sequences


def test_the_same_seed_gives_the_same_walks_and_another_seed_others() -> None:
    assert torch.equal(generate_sequences(5, 40, 1), generate_sequences(5, 40, 1))
    assert not torch.equal(generate_sequences(5, 40, 1), generate_sequences(5, 40, 2))


def test_the_data_is_the_same_everywhere() -> None:
    expected = [[44, 6, 18, 3, 27, 60, 1, 50, 31], [47, 11, 37, 35, 42, 23, 12, 45, 59]]  # as torch 2.13 draws it
    assert generate_sequences(2, 9, 0).tolist() == expected


def test_every_state_has_five_successors_and_the_stated_entropy() -> None:
    walks = generate_sequences(2000, 101, 0)
    pairs = Counter(zip(walks[:, :-1].flatten().tolist(), walks[:, 1:].flatten().tolist(), strict=True))
    totals = Counter(walks[:, :-1].flatten().tolist())
    assert len(totals) == STATES
    assert Counter(state for state, _ in pairs) == dict.fromkeys(range(STATES), 5)
    loss = -sum(count * math.log(count / totals[state]) for (state, _), count in pairs.items()) / totals.total()
    assert loss == pytest.approx(ENTROPY, abs=0.005)
