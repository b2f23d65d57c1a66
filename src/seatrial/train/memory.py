"""The memory of one rank's weights, gradients and optimizer state: counted from its tensors, and estimated beforehand.

The counts are the same on CPUs and GPUs. They include neither activations nor weights gathered from other ranks; the
peak of the CUDA allocator (memory_peak_gib in metrics.json) includes both. ``group_bytes`` returns the size of the
gathered weights, which depends on how FSDP2 wraps the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

from seatrial.train.train_config import TrainConfig

GIB = 2**30
BYTES_PER_PARAMETER = 16  # fp32 parameter, gradient and Adam's two moments
STATE_SHARE = 0.45  # share of device memory for these four; activations, gathered weights and NCCL use the rest


def local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's parts of ``tensors``; other values count 0."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local if isinstance(tensor, Tensor))


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that this rank holds now; 0 after ``zero_grad``."""
    return local_bytes(parameter.grad for parameter in model.parameters())


def state_metrics(model: nn.Module, optimizer: Any, gradients: int | None) -> dict[str, Any]:
    """Fields of an entry of ``ranks`` in metrics.json: GiB on this rank by kind of state, and the weights' device.

    ``gradients``: bytes; None with ZeRO-3, whose parameters do not hold the weights: then all fields are None.
    """
    if gradients is None:
        return dict.fromkeys(("parameters_gib", "gradients_gib", "optimizer_gib", "state_device"))
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    return {
        "parameters_gib": local_bytes(model.parameters()) / GIB,
        "gradients_gib": gradients / GIB,
        "optimizer_gib": local_bytes(chain.from_iterable(state.values() for state in states)) / GIB,
        "state_device": next(model.parameters()).device.type,
    }


def group_bytes(model: nn.Module, element_bytes: int) -> list[int]:
    """Bytes of each FSDP2 group when it is gathered in a dtype of ``element_bytes``; empty without FSDP2.

    FSDP2 gathers the weights of a group together. A weight belongs to the group of its innermost FSDP2 module.
    """
    group_by_parameter: dict[nn.Parameter, nn.Module] = {}
    for module in model.modules():  # outer modules first: an inner group replaces the outer one
        if isinstance(module, FSDPModule):
            group_by_parameter |= dict.fromkeys(module.parameters(), module)
    bytes_by_group: dict[nn.Module, int] = {}
    for parameter, group in group_by_parameter.items():
        bytes_by_group[group] = bytes_by_group.get(group, 0) + parameter.numel() * element_bytes
    return list(bytes_by_group.values())


def max_layers(settings: TrainConfig, ranks: int, device: str) -> int | None:
    """The number of layers that fit into the memory of ``device`` if sharded over ``ranks`` ranks; None: no limit.

    There is no limit if all layers fit, on a CPU, with CPU offloading, and for pretrained weights, whose number of
    layers is fixed.
    """
    model = settings.architecture()
    if not device.startswith("cuda") or settings.parallel.cpu_offload or settings.model.weights != "random":
        return None
    max_parameters = STATE_SHARE * torch.cuda.get_device_properties(device).total_memory * ranks / BYTES_PER_PARAMETER
    return model.layers_within(max_parameters)
