"""Memory of a rank, counted from the tensors of a sharded model; tests/checks/training/test_parity.py has two ranks."""

from __future__ import annotations

import pytest
import torch

from seatrial.train import memory, parallel
from seatrial.train.parallel import World
from tests.train.ranks import config


def test_state_and_groups_are_counted_from_the_tensors() -> None:
    with parallel.process_group(60) as world:
        check_state(world)


def check_state(world: World) -> None:
    settings = config(parallel={"strategy": "fsdp2"})
    built = parallel.build(settings, world)
    tokens = torch.zeros(1, 4, dtype=torch.long)
    built.train_module(tokens, tokens).backward()
    optimizer = parallel.optimizer(settings, built.trained_parameters)
    optimizer.step()
    gradients = memory.gradient_bytes(built.model)
    state = memory.state_metrics(built.model, optimizer, gradients)
    gib = 4 * 119_104 / 2**30  # one rank has all parameters, in fp32
    assert (state["parameters_gib"], state["gradients_gib"], state["state_device"]) == (gib, gib, "cpu")
    assert state["optimizer_gib"] == pytest.approx(2 * gib, rel=1e-3)  # and the number of steps of each tensor
    # the root with the embedding, two blocks, the head
    assert sorted(memory.group_bytes(built.model, 2)) == [2 * 16_384, 2 * 16_448, 2 * 43_136, 2 * 43_136]
    assert set(memory.state_metrics(built.model, optimizer, None).values()) == {None}  # ZeRO-3
