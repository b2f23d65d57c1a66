"""Initial weights of a decoder: random, or from Hugging Face's safetensors, sharded or not.

A decoder is built on the meta device, optionally sharded, and filled parameter by parameter: a rank needs memory
for its shards and one full weight. Each random weight has its own generator, so that values do not depend on sharding.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from seatrial.model import UsageError
from seatrial.train import architecture
from seatrial.train.architecture import Architecture
from seatrial.train.decoder import Decoder
from seatrial.util.input_files import read_json

WeightSource = Callable[[str, torch.Size, torch.device], Tensor]  # name, shape, device → the full weight


def build_on_meta(architecture: Architecture, dtype: torch.dtype, weight_dtype: torch.dtype) -> Decoder:
    """A decoder on the meta device that computes in ``dtype``, with weights of ``weight_dtype``."""
    with torch.device("meta"):
        return Decoder(architecture, dtype).to(weight_dtype)


@torch.no_grad()
def fill(model: nn.Module, source: WeightSource, device: torch.device) -> None:
    """Sets every parameter, sharded or not, without communication.

    ``device`` is the compute device even with CPU offloading, since random values depend on the type of device that
    generates them.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            full_weight = source(name, parameter.shape, device)
            parameter.to_local().copy_(distribute_tensor(full_weight, mesh, placements, src_data_rank=None).to_local())
        else:
            parameter.copy_(source(name, parameter.shape, device))


def random_weights(seed: int, std: float) -> WeightSource:
    """Initial weights as in transformers: norms 1, biases 0, others N(0, ``std``); LoRA adapters as in peft."""

    def generate(name: str, size: torch.Size, device: torch.device) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, device=device)
        if name.endswith((".bias", "lora_B")):
            return torch.zeros(size, device=device)
        # a seed of 32 bits, since the CPU's generator uses no more bits
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = torch.empty(size, device=device)
        if name.endswith("lora_A"):  # kaiming_uniform_(a=√5)
            bound = size[1] ** -0.5
            return values.uniform_(-bound, bound, generator=generator)
        return values.normal_(0, std, generator=generator)

    return generate


def huggingface_name(name: str) -> str:
    """Hugging Face's name of the weight ``name``."""
    name = name.removeprefix("output.")
    return name if name.startswith("lm_head") else f"model.{name}"


def from_folder(folder: str, adapter_source: WeightSource) -> WeightSource:
    """The weights in *.safetensors of ``folder``; LoRA adapters come from ``adapter_source``.

    Raises UsageError if the folder has no weights, its index cannot be read, or its config.json is of a model that
    cannot be built. The returned source raises UsageError if a weight is missing, unreadable or has another shape.
    """
    from safetensors import SafetensorError, safe_open

    if Path(folder, "config.json").is_file():
        architecture.load(folder)  # weights of another kind of model can have the same names and shapes
    file_by_name = _file_by_name(Path(folder))

    def read(name: str, size: torch.Size, device: torch.device) -> Tensor:
        if "lora_" in name:
            return adapter_source(name, size, device)
        file = file_by_name.get(huggingface_name(name))
        if file is None:
            raise UsageError(f"{folder} has no weight {huggingface_name(name)} of the configured model")
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                weight: Tensor = opened.get_tensor(huggingface_name(name))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot read {huggingface_name(name)} from {file}: {error}") from error
        if weight.shape != size:
            raise UsageError(f"{file}: {huggingface_name(name)} has shape {list(weight.shape)}, expected {list(size)}")
        return weight

    return read


def _file_by_name(folder: Path) -> dict[str, Path]:
    """Hugging Face's name of a weight → the file that contains it."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            weight_map: dict[str, Any] = read_json(index)["weight_map"]
            return {name: folder / file for name, file in weight_map.items()}
        file_by_name: dict[str, Path] = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                file_by_name.update(dict.fromkeys(opened.keys(), file))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"cannot read the weights in {folder}: {error}") from error
    if not file_by_name:
        raise UsageError(f"no *.safetensors in {folder}")
    return file_by_name
