"""LoRA adapters: attached to a frozen decoder, trained, and saved in peft's file format."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seatrial.model import SeatrialError
from seatrial.train.decoder import Adapter, Decoder, Linear
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import atomic_write, write_json

_PREFIX = "base_model.model.model."  # peft wraps the causal model, which wraps the decoder
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def attach(model: Decoder, targets: Collection[str], rank: int, alpha: float, dropout: float) -> None:
    """Adds an uninitialized fp32 adapter to every linear layer named in ``targets``; freezes all other parameters."""
    model.requires_grad_(False)
    for name, layer in model.layers.named_modules():
        if isinstance(layer, Linear) and name.rpartition(".")[2] in targets:
            with torch.device(layer.weight.device):
                layer.adapter = Adapter(layer.in_features, layer.out_features, rank, alpha, dropout)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters by peft name."""
    parameters = {name.replace(".adapter.", "."): p for name, p in model.named_parameters() if "lora_" in name}
    return {f"{_PREFIX}{name}.weight": parameter for name, parameter in parameters.items()}


def gather_adapters(model: nn.Module) -> dict[str, Tensor]:
    """The unsharded adapters on the CPU, by peft name. With sharded adapters all ranks must call this."""
    weights = {}
    for name, parameter in adapter_parameters(model).items():
        tensor = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        weights[name] = tensor.detach().cpu().contiguous()
    return weights


def export(weights: dict[str, Tensor], folder: Path, settings: TrainConfig) -> str:
    """Writes ``weights`` (from ``gather_adapters``) to ``folder`` in peft's format.

    Returns the result of comparing the file with ``weights``. Raises SeatrialError if they differ.
    """
    from safetensors.torch import load_file, save

    adapter = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": settings.model.name,
        "r": settings.lora_r,
        "lora_alpha": settings.lora_alpha,
        "lora_dropout": settings.lora_dropout,
        "target_modules": sorted(settings.lora_targets),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / WEIGHTS_FILE, save(weights))
    write_json(folder / CONFIG_FILE, adapter)
    saved = load_file(folder / WEIGHTS_FILE)
    different = [name for name, tensor in weights.items() if name not in saved or not torch.equal(saved[name], tensor)]
    if different or len(saved) != len(weights):
        raise SeatrialError(
            f"{folder / WEIGHTS_FILE} has {len(saved)} tensors, {len(different)} of {len(weights)} trained ones differ "
            "or are missing"
        )
    return "loaded; equal bit by bit"
