"""What of a model fits on the devices that are to train it: by arithmetic, before anything is built."""

from __future__ import annotations

import torch

from seatrial.train.train_config import TrainConfig

STATE = 16  # bytes of a parameter that trains in fp32: itself, its gradient, Adam's two moments
ROOM = 0.45  # of a device's memory for these: the rest is activations, gathered weights and NCCL's buffers


def max_layers(settings: TrainConfig, ranks: int, device: str) -> int | None:
    """How many blocks of the model ``ranks`` can hold among them, sharded; None where all of them fit, or on a CPU."""
    shape = settings.architecture()
    if not device.startswith("cuda") or settings.parallel.cpu_offload or settings.model.weights != "random":
        return None
    room = ROOM * torch.cuda.get_device_properties(device).total_memory * ranks / STATE
    return layers_within(
        shape.num_hidden_layers,
        shape.parameters,
        settings.model_copy(update={"model": settings.model.model_copy(update={"layers": 1})})
        .architecture()
        .parameters,
        room,
    )


def layers_within(layers: int, parameters: int, with_one: int, room: float) -> int | None:
    """The most of ``layers`` whose parameters are no more than ``room``, at least 1; None where all are."""
    if parameters <= room or layers == 1:
        return None
    block = (parameters - with_one) / (layers - 1)
    return max(1, min(layers, int(1 + (room - with_one) / block)))
