"""Tiny decoders with random weights."""

from __future__ import annotations

import torch

from seatrial.train import architecture, weights
from seatrial.train.decoder import Decoder

CPU = torch.device("cpu")


def random_decoder(name: str, seed: int = 0, dtype: torch.dtype = torch.float) -> Decoder:
    shape = architecture.load(name)
    model = weights.build_on_meta(shape, dtype, torch.float)
    model.to_empty(device="cpu")
    weights.fill(model, weights.random_weights(seed, shape.initializer_range), CPU)
    return model
