"""Sequences that can be learned, and whose best possible loss is known exactly: a Markov chain.

From each of STATES states the chain goes to one of five others, with chances of 8, 4, 2, 1 and 1 sixteenths. All of it
is drawn as integers, so that every machine makes the same data, bit by bit.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

STATES = 64
SIXTEENTHS = (8, 4, 2, 1, 1)
# nats a token: no predictor can stay under it on average, and every state has the same
ENTROPY = -sum(share / 16 * math.log(share / 16) for share in SIXTEENTHS)
CHAIN_SEED = 0


def generate_sequences(count: int, length: int, seed: int) -> Tensor:
    """``count`` walks of ``length`` states through the chain: int64 [count, length], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    next_state = _transitions()
    states = torch.randint(0, STATES, (count,), generator=generator)
    draws = torch.randint(0, 16, (length - 1, count), generator=generator)
    walk = [states]
    for draw in draws:
        states = next_state[states, draw]
        walk.append(states)
    return torch.stack(walk, dim=1)


def _transitions() -> Tensor:
    """Where each of 16 equally likely draws leads from each state: int64 [STATES, 16]."""
    generator = torch.Generator().manual_seed(CHAIN_SEED)
    successor_of_draw = torch.repeat_interleave(torch.arange(len(SIXTEENTHS)), torch.tensor(SIXTEENTHS))
    rows = [torch.randperm(STATES, generator=generator)[successor_of_draw] for _ in range(STATES)]
    return torch.stack(rows)
