from __future__ import annotations

import math
from collections import Counter

import pytest
import torch

from seatrial.train.markov import ENTROPY, STATES, generate_sequences


def test_sequences_depend_on_the_seed() -> None:
    assert torch.equal(generate_sequences(5, 40, 1), generate_sequences(5, 40, 1))
    assert not torch.equal(generate_sequences(5, 40, 1), generate_sequences(5, 40, 2))


def test_the_data_is_the_same_on_all_machines() -> None:
    expected = [[44, 6, 18, 3, 27, 60, 1, 50, 31], [47, 11, 37, 35, 42, 23, 12, 45, 59]]  # from torch 2.13
    assert generate_sequences(2, 9, 0).tolist() == expected


def test_every_state_has_five_successors_and_the_stated_entropy() -> None:
    sequences = generate_sequences(2000, 101, 0)
    pairs = Counter(zip(sequences[:, :-1].flatten().tolist(), sequences[:, 1:].flatten().tolist(), strict=True))
    totals = Counter(sequences[:, :-1].flatten().tolist())
    assert len(totals) == STATES
    assert Counter(state for state, _ in pairs) == dict.fromkeys(range(STATES), 5)
    loss = -sum(count * math.log(count / totals[state]) for (state, _), count in pairs.items()) / totals.total()
    assert loss == pytest.approx(ENTROPY, abs=0.005)
