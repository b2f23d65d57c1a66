"""Export of the trained model to final/, with a check that it can be loaded."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, Trainer

from seatrial.model import SeatrialError
from seatrial.train import ranks


def save(trainer: Trainer, final: Path, sharded: bool) -> str:
    """Write the model (with LoRA, only the adapters) to ``final`` and compare it with the trained model.

    Returns a text that says what was compared: the values, or with ``sharded`` only names and shapes. All ranks must
    call this. Raises SeatrialError if the exported tensors differ from the trained ones, or are not finite.
    """
    trainer.save_model(str(final))  # gathers the shards of all ranks
    ranks.run_on_rank0(lambda: _compare_with_export(trainer, final, sharded), final)
    return "loaded; compared by name and shape" if sharded else "loaded; equal bit by bit"


def _compare_with_export(trainer: Trainer, final: Path, sharded: bool) -> None:
    """Raise SeatrialError if the exported tensors differ from those of the trained model."""
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, PeftModel):
        loaded = load_peft_weights(str(final), device="cpu")
        # the tensor names in the file do not contain the adapter's name
        trained = {name.replace(".default.", "."): p for name, p in _parameters(model) if p.requires_grad}
        # Under FSDP, peft wrote 37 GB of base weights with 131 MB of adapters
        adapter_weights = sum(tensor.numel() for tensor in loaded.values())
        size = sum(path.stat().st_size for pattern in ("*.safetensors", "*.bin") for path in final.glob(pattern))
        if size > 4 * adapter_weights + 2**20:  # 4 bytes per fp32 weight, and up to 1 MiB of header
            raise SeatrialError(
                f"{final} has {size} bytes for {adapter_weights} adapter weights: it includes the base model"
            )
    else:
        loaded = dict(AutoModelForCausalLM.from_pretrained(final, dtype="auto").named_parameters())
        trained = dict(_parameters(model))
    if set(loaded) != set(trained):
        names = sorted(set(loaded) ^ set(trained))[:3]
        raise SeatrialError(f"{final}: tensor names differ from the trained model, for example {', '.join(names)}")
    different = [name for name in loaded if not _is_equal(loaded[name], trained[name], sharded)]
    if different:
        raise SeatrialError(
            f"{final}: {len(different)} of {len(loaded)} tensors differ from the trained model, for example "
            f"{different[0]}"
        )


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Yield each parameter with its name in the files: without the wrapper of FSDP's activation checkpointing."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def _is_equal(loaded: torch.Tensor, trained: torch.Tensor, sharded: bool) -> bool:
    """Whether ``loaded`` is finite and equals ``trained``; with ``sharded`` only the shapes are compared."""
    if not bool(torch.isfinite(loaded).all()):
        return False
    if sharded:  # only a shard is local; ds_shape (ZeRO-3) and DTensor.shape are unsharded
        return tuple(loaded.shape) == tuple(getattr(trained, "ds_shape", trained.shape))
    return torch.equal(loaded, trained.detach().cpu())
