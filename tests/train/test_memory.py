from __future__ import annotations

from seatrial.train import memory, train_config

SHAPE = train_config.load("fsdp-mistral-7b").architecture()
ONE = train_config.load("fsdp-mistral-7b", ["model.layers=1"]).architecture().parameters


def cut(ranks: int, gib: float) -> int | None:
    room = memory.ROOM * gib * 2**30 * ranks / memory.STATE
    return memory.layers_within(SHAPE.num_hidden_layers, SHAPE.parameters, ONE, room)


def test_a_7b_is_cut_where_it_does_not_fit() -> None:
    assert cut(4, 139) is None
    assert cut(8, 79) is None
    alone = cut(1, 139)
    assert alone is not None
    fits, too_many = (
        train_config.load("fsdp-mistral-7b", [f"model.layers={layers}"]).architecture().parameters * memory.STATE
        for layers in (alone, alone + 1)
    )
    assert fits <= memory.ROOM * 139 * 2**30 < too_many


def test_at_least_a_layer_is_left() -> None:
    assert cut(1, 1) == 1
