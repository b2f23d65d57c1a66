"""The memory that one rank holds of weights, gradients and optimizer state, counted from its tensors.

The counts are the same on CPUs and GPUs. They include neither activations nor weights gathered from other ranks; the
peak of the CUDA allocator (memory_peak_gib in metrics.json) includes both. ``group_bytes`` returns the size of the
gathered weights, which depends on how FSDP2 wraps the model.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor

GIB = 2**30


def local_bytes(tensors: Iterable[Any]) -> int:
    """Bytes of this rank's parts of ``tensors``; other values count 0."""
    local = (tensor.to_local() if isinstance(tensor, DTensor) else tensor for tensor in tensors)
    return sum(tensor.numel() * tensor.element_size() for tensor in local if isinstance(tensor, Tensor))


def gradient_bytes(model: nn.Module) -> int:
    """Bytes of the gradients that this rank holds now; 0 after ``zero_grad``."""
    return local_bytes(parameter.grad for parameter in model.parameters())


def state_metrics(model: nn.Module, optimizer: Any, gradients: int | None) -> dict[str, Any]:
    """Fields of an entry of ``ranks`` in metrics.json: GiB on this rank by kind of state, and the weights' device.

    ``gradients``: bytes. All fields are None if it is None, as with ZeRO-3, whose parameters do not hold the weights.
    """
    names = ("parameters_gib", "gradients_gib", "optimizer_gib")
    if gradients is None:
        return dict.fromkeys((*names, "state_device"))
    states: Iterable[Mapping[str, Any]] = optimizer.state.values()
    sizes = (
        local_bytes(model.parameters()),
        gradients,
        local_bytes(value for state in states for value in state.values()),
    )
    device = next(model.parameters()).device.type
    return {**{name: size / GIB for name, size in zip(names, sizes, strict=True)}, "state_device": device}


def group_bytes(model: nn.Module, element_bytes: int) -> list[int]:
    """Bytes of each FSDP2 group when it is gathered in a dtype of ``element_bytes``; empty without FSDP2.

    FSDP2 gathers the weights of a group together. A weight belongs to the group of its innermost FSDP2 module.
    """
    owners = {
        parameter: module
        for module in model.modules()  # outer modules first: the innermost group remains
        if isinstance(module, FSDPModule)
        for parameter in module.parameters()
    }
    sizes: dict[nn.Module, int] = {}
    for parameter, module in owners.items():
        sizes[module] = sizes.get(module, 0) + parameter.numel() * element_bytes
    return list(sizes.values())
