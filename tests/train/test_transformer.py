from __future__ import annotations

import math

import pytest
import torch

from seatrial.train.markov import STATES, sequences
from seatrial.train.throughput import CPU_LOAD, GPU_LOAD
from seatrial.train.transformer import Shape, build, count_parameters

SMALL = Shape(seq_len=16, dim=64, layers=2)


def test_it_begins_by_knowing_nothing() -> None:
    loss = build(SMALL, 0, "cpu")(sequences(8, 17, 0))
    assert loss.item() == pytest.approx(math.log(STATES), abs=0.05)


def test_no_position_sees_what_comes_after_it() -> None:
    model = build(SMALL, 0, "cpu")
    seen: list[torch.Tensor] = []
    model.head.register_forward_hook(lambda module, inputs, output: seen.append(output))
    walks = sequences(3, 17, 0)
    changed = walks.clone()
    changed[:, 10] = (changed[:, 10] + 1) % STATES
    model(walks)
    model(changed)
    assert torch.equal(seen[0][:, :10], seen[1][:, :10])
    assert not torch.isclose(seen[0][:, 10:], seen[1][:, 10:]).all(-1).any()


def test_weights_come_from_the_seed_and_leave_the_generator_alone() -> None:
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again, other = build(SMALL, 1, "cpu"), build(SMALL, 1, "cpu"), build(SMALL, 2, "cpu")
    assert torch.equal(torch.rand(1), expected)
    assert torch.equal(first.head.weight, again.head.weight)
    assert not torch.equal(first.head.weight, other.head.weight)


@pytest.mark.parametrize(("load", "millions"), [(CPU_LOAD, 1.2), (GPU_LOAD, 85.4)])
def test_sizes_are_those_that_the_comments_state(load: object, millions: float) -> None:
    with torch.device("meta"):
        model = build(load.shape, 0, "meta")  # type: ignore[attr-defined]
    assert count_parameters(model) == pytest.approx(millions * 1e6, rel=0.02)
