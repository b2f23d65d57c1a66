"""Low-rank adapters: attached to a decoder, the only thing that trains, kept in a file of their own like peft's."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from seatrial.model import SeatrialError, UsageError
from seatrial.train.decoder import Adapter, Decoder, Linear
from seatrial.util.files import atomic_write, write_json

_PREFIX = "base_model.model.model."  # peft wraps the causal model, which wraps the decoder
WEIGHTS_FILE, CONFIG_FILE = "adapter_model.safetensors", "adapter_config.json"


def attach(model: Decoder, targets: Collection[str], rank: int, alpha: float, dropout: float) -> None:
    """Give every linear layer named in ``targets`` an adapter, in fp32, and freeze all else. Adapters get no values."""
    model.requires_grad_(False)
    for name, layer in model.layers.named_modules():
        if isinstance(layer, Linear) and name.rpartition(".")[2] in targets:
            with torch.device(layer.weight.device):
                layer.adapter = Adapter(layer.in_features, layer.out_features, rank, alpha, dropout)


def adapter_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """The adapters' parameters, under peft's names."""
    return {peft_name(name): parameter for name, parameter in model.named_parameters() if "lora_" in name}


def peft_name(name: str) -> str:
    return f"{_PREFIX}{name.replace('.adapter.', '.')}.weight"


def gather_adapters(model: nn.Module) -> dict[str, Tensor]:
    """The adapters whole, on the CPU, under peft's names. Where they are sharded, every rank must take part."""
    found = {}
    for name, parameter in adapter_parameters(model).items():
        whole = parameter.full_tensor() if isinstance(parameter, DTensor) else parameter
        found[name] = whole.detach().cpu().contiguous()
    return found


def export(weights: dict[str, Tensor], folder: Path, model: Decoder, base: str) -> None:
    """Write what ``gather`` gave as a folder that peft reads. Raises OSError."""
    from safetensors.torch import save

    found = [
        (name.rpartition(".")[2], layer.adapter)
        for name, layer in model.named_modules()
        if isinstance(layer, Linear) and layer.adapter is not None
    ]
    first = found[0][1]
    settings = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "r": len(first.lora_A),
        "lora_alpha": first.scale * len(first.lora_A),
        "lora_dropout": first.dropout,
        "target_modules": sorted({name for name, _ in found}),
        "bias": "none",
    }
    folder.mkdir(parents=True, exist_ok=True)
    atomic_write(folder / WEIGHTS_FILE, save(weights))
    write_json(folder / CONFIG_FILE, settings)


def verify_export(weights: dict[str, Tensor], folder: Path) -> str:
    """What reading ``export``'s file again showed. Raises SeatrialError where it is not what was trained."""
    from safetensors.torch import load_file

    found = load_file(folder / WEIGHTS_FILE)
    wrong = [name for name, tensor in weights.items() if name not in found or not torch.equal(found[name], tensor)]
    if wrong or len(found) != len(weights):
        raise SeatrialError(f"{folder / WEIGHTS_FILE} does not hold what was trained: {len(wrong)} adapters differ")
    return "loaded; equal bit by bit"


@torch.no_grad()
def load(model: nn.Module, folder: Path) -> None:
    """Put back what ``export`` (or peft) wrote. Raises UsageError where adapters are missing, too many or of another
    shape.
    """
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        found = load_file(folder / WEIGHTS_FILE)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot read the adapters in {folder}: {error}") from error
    own = adapter_parameters(model)
    if own.keys() != found.keys():
        odd = sorted(own.keys() ^ found.keys())
        raise UsageError(
            f"{folder / WEIGHTS_FILE} is not of this model: {len(odd)} adapters differ, {odd[0]} the first"
        )
    for name, parameter in own.items():
        if parameter.shape != found[name].shape:
            raise UsageError(
                f"{folder / WEIGHTS_FILE}: {name} is {list(found[name].shape)}, not {list(parameter.shape)}"
            )
        parameter.copy_(found[name])
