"""Computes how many layers of a model fit into device memory, before the model is built."""

from __future__ import annotations

import torch

from seatrial.train.train_config import TrainConfig

BYTES_PER_PARAMETER = 16  # fp32 parameter, gradient and Adam's two moments
STATE_SHARE = 0.45  # share of device memory for these four; activations, gathered weights and NCCL use the rest


def max_layers(settings: TrainConfig, ranks: int, device: str) -> int | None:
    """The number of layers that fit into the memory of ``device`` if sharded over ``ranks`` ranks; None: no limit.

    There is no limit if all layers fit, on a CPU, with CPU offloading, and for pretrained weights, whose number of
    layers is fixed.
    """
    model = settings.architecture()
    if not device.startswith("cuda") or settings.parallel.cpu_offload or settings.model.weights != "random":
        return None
    max_parameters = STATE_SHARE * torch.cuda.get_device_properties(device).total_memory * ranks / BYTES_PER_PARAMETER
    return layers_within(
        model.num_hidden_layers,
        model.parameters,
        model.resize(layers=1, width=None).parameters,
        max_parameters,
    )


def layers_within(layers: int, parameters: int, one_layer_parameters: int, max_parameters: float) -> int | None:
    """The largest number of layers with at most ``max_parameters`` parameters, at least 1; None if all ``layers`` fit.

    ``parameters``, ``one_layer_parameters``: number of parameters of the model with all layers, and with one layer.
    """
    if parameters <= max_parameters or layers == 1:
        return None
    layer_parameters = (parameters - one_layer_parameters) / (layers - 1)
    return max(1, min(layers, int(1 + (max_parameters - one_layer_parameters) / layer_parameters)))
