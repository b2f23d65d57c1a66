from __future__ import annotations

from seatrial.train import memory, train_config

ARCHITECTURE = train_config.load("fsdp-mistral-7b").architecture()


def max_layers(ranks: int, gib: float) -> int | None:
    return ARCHITECTURE.layers_within(memory.STATE_SHARE * gib * 2**30 * ranks / memory.BYTES_PER_PARAMETER)


def test_layers_of_a_7b_model_that_fit() -> None:
    assert max_layers(4, 139) is None
    assert max_layers(8, 79) is None
    one_gpu = max_layers(1, 139)
    assert one_gpu is not None
    fits, too_many = (
        train_config.load("fsdp-mistral-7b", [f"model.layers={layers}"]).architecture().parameters
        * memory.BYTES_PER_PARAMETER
        for layers in (one_gpu, one_gpu + 1)
    )
    assert fits <= memory.STATE_SHARE * 139 * 2**30 < too_many


def test_at_least_one_layer_is_kept() -> None:
    assert max_layers(1, 1) == 1
