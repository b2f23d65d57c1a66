"""Weights of a decoder: drawn from a seed, or read from Hugging Face's safetensors; whole, or each rank its share.

A decoder is built on torch's meta device, without memory, sharded (or not), and filled here parameter by parameter, so
that a rank never holds more than its share and one whole weight; and each weight is drawn by a generator of its own, so
that every way of sharding starts from the same numbers.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from seatrial.model import UsageError
from seatrial.train.architecture import Architecture
from seatrial.train.decoder import Decoder

WeightSource = Callable[[str, torch.Size, torch.device], Tensor]  # the whole weight of that name


def build_on_meta(shape: Architecture, dtype: torch.dtype, held: torch.dtype) -> Decoder:
    """A decoder without memory, which computes in ``dtype`` and whose weights are to be ``held`` so."""
    with torch.device("meta"):
        return Decoder(shape, dtype).to(held)


@torch.no_grad()
def fill(model: nn.Module, source: WeightSource, device: torch.device) -> None:
    """Give every parameter that has memory, whole or sharded, its values. Each rank for itself: nothing is sent.

    They are drawn on ``device``, where the ranks compute, even if kept on the CPU: another device draws others.
    """
    for name, parameter in model.named_parameters():
        if isinstance(parameter, DTensor):
            mesh, placements = parameter.device_mesh, parameter.placements
            whole = source(name, parameter.shape, device)
            parameter.to_local().copy_(distribute_tensor(whole, mesh, placements, src_data_rank=None).to_local())
        else:
            parameter.copy_(source(name, parameter.shape, device))


def random_weights(seed: int, spread: float) -> WeightSource:
    """First weights as transformers draws them: N(0, ``spread``), norms 1, biases 0; adapters as peft does."""

    def draw(name: str, size: torch.Size, device: torch.device) -> Tensor:
        if name.endswith("norm.weight"):
            return torch.ones(size, device=device)
        if name.endswith((".bias", "lora_B")):
            return torch.zeros(size, device=device)
        # 32 bits: the CPU's generator looks at no more
        generator = torch.Generator(device).manual_seed(zlib.crc32(f"{seed} {name}".encode()))
        values = torch.empty(size, device=device)
        if name.endswith("lora_A"):  # kaiming_uniform_(a=√5)
            bound = size[1] ** -0.5
            return values.uniform_(-bound, bound, generator=generator)
        return values.normal_(0, spread, generator=generator)

    return draw


def huggingface_name(name: str) -> str:
    """What Hugging Face calls the weight that is ``name`` here."""
    name = name.removeprefix("output.")
    return name if name.startswith("lm_head") else f"model.{name}"


def from_folder(folder: str, otherwise: WeightSource) -> WeightSource:
    """The weights of *.safetensors in ``folder``; adapters, which it does not hold, are drawn by ``otherwise``.

    Raises UsageError, naming weight and file, where one is missing, has another shape, or cannot be read.
    """
    from safetensors import SafetensorError, safe_open

    files = _files(Path(folder))

    def read(name: str, size: torch.Size, device: torch.device) -> Tensor:
        if "lora_" in name:
            return otherwise(name, size, device)
        file = files.get(huggingface_name(name))
        if file is None:
            raise UsageError(f"{folder} holds no weight {huggingface_name(name)}: is it of this architecture?")
        try:
            with safe_open(file, framework="pt", device=str(device)) as opened:
                found: Tensor = opened.get_tensor(huggingface_name(name))
        except (OSError, SafetensorError) as error:
            raise UsageError(f"cannot read {huggingface_name(name)} from {file}: {error}") from error
        if found.shape != size:
            raise UsageError(f"{file}: {huggingface_name(name)} is {list(found.shape)}, the model's is {list(size)}")
        return found

    return read


def _files(folder: Path) -> dict[str, Path]:
    """Weight → the file that holds it."""
    from safetensors import SafetensorError, safe_open

    index = folder / "model.safetensors.index.json"
    try:
        if index.is_file():
            weights: dict[str, Any] = json.loads(index.read_text(encoding="utf-8"))["weight_map"]
            return {name: folder / file for name, file in weights.items()}
        found = {}
        for file in sorted(folder.glob("*.safetensors")):
            with safe_open(file, framework="pt") as opened:
                found.update(dict.fromkeys(opened.keys(), file))
    except (OSError, ValueError, KeyError, SafetensorError) as error:
        raise UsageError(f"cannot read the weights in {folder}: {error}") from error
    if not found:
        raise UsageError(f"no *.safetensors in {folder}")
    return found
