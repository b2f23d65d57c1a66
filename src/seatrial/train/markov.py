"""Markov chain data: learnable sequences with a known entropy bound of the loss.

From each of STATES states the chain moves to one of five states with probabilities 8/16, 4/16, 2/16, 1/16 and 1/16.
Sampling uses integers only, so that the data is bitwise equal on every machine.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from seatrial.model import UsageError
from seatrial.train.train_config import TrainConfig

STATES = 64  # the vocabulary
SIXTEENTHS = (8, 4, 2, 1, 1)  # probability of each successor × 16
# nats per token, the same in every state: the lowest possible mean loss
ENTROPY = -sum(weight / 16 * math.log(weight / 16) for weight in SIXTEENTHS)
CHAIN_SEED = 0  # determines the successors of each state


def require_vocabulary(config: TrainConfig) -> int:
    """The model's vocab_size. Raises UsageError if it is smaller than the number of states."""
    vocabulary = config.model.architecture().vocab_size
    if vocabulary < STATES:
        raise UsageError(f"vocab_size {vocabulary}: expected at least {STATES} for generated data")
    return vocabulary


def generate_sequences(count: int, length: int, seed: int) -> Tensor:
    """``count`` random sequences of ``length`` states: int64 [count, length], on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    next_state = _transitions()
    states = torch.randint(0, STATES, (count,), generator=generator)
    draws = torch.randint(0, 16, (length - 1, count), generator=generator)
    sequence = [states]
    for draw in draws:
        states = next_state[states, draw]
        sequence.append(states)
    return torch.stack(sequence, dim=1)


def _transitions() -> Tensor:
    """The next state for each state and each of 16 equally likely draws: int64 [STATES, 16]."""
    generator = torch.Generator().manual_seed(CHAIN_SEED)
    successor_of_draw = torch.repeat_interleave(torch.arange(len(SIXTEENTHS)), torch.tensor(SIXTEENTHS))
    rows = [torch.randperm(STATES, generator=generator)[successor_of_draw] for _ in range(STATES)]
    return torch.stack(rows)
