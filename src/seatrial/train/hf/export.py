"""final/: written so that it loads by itself, and proven to."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from peft.utils import load_peft_weights
from transformers import AutoModelForCausalLM, Trainer

from seatrial.model import SeatrialError
from seatrial.train.hf import ranks

WEIGHTS = ("*.safetensors", "*.bin")


def save(trainer: Trainer, final: Path, sharded: bool) -> str:
    """Write the model (of LoRA, the adapters alone) to ``final`` and read it again; what that showed.

    All ranks must call this. Raises SeatrialError where what was read is not what was trained.
    """
    trainer.save_model(str(final))  # gathers what is sharded, so that every rank takes part
    ranks.run_on_rank_0(lambda: _check(trainer, final, sharded), final)
    return "loaded; compared by name and shape" if sharded else "loaded; equal bit by bit"


def _check(trainer: Trainer, final: Path, sharded: bool) -> None:
    model: Any = trainer.accelerator.unwrap_model(trainer.model)
    if isinstance(model, PeftModel):
        found = load_peft_weights(str(final), device="cpu")
        # the file leaves out which of several adapters it is
        trained = {name.replace(".default.", "."): p for name, p in _parameters(model) if p.requires_grad}
        _refuse_base(final, sum(tensor.numel() for tensor in found.values()))
    else:
        found = dict(AutoModelForCausalLM.from_pretrained(final, dtype="auto").named_parameters())
        trained = dict(_parameters(model))
    if set(found) != set(trained):
        raise SeatrialError(f"{final} does not hold what was trained: {sorted(set(found) ^ set(trained))[:3]} differ")
    wrong = [name for name in found if not _agree(found[name], trained[name], sharded)]
    if wrong:
        raise SeatrialError(f"{final}: {len(wrong)} of {len(found)} tensors are not as trained, such as {wrong[0]}")


def _parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """By the names that files have: FSDP's activation checkpointing wraps modules in others."""
    for name, parameter in model.named_parameters():
        yield name.replace("_checkpoint_wrapped_module.", ""), parameter


def _refuse_base(final: Path, adapters: int) -> None:
    """Under FSDP, peft has been seen to write 37 GB of frozen weights beside 131 MB of adapters."""
    size = sum(path.stat().st_size for pattern in WEIGHTS for path in final.glob(pattern))
    if size > 4 * adapters + 2**20:  # at most fp32, and a header
        raise SeatrialError(
            f"{final} holds {size} bytes for {adapters} adapter weights: the base model is in it as well"
        )


def _agree(found: torch.Tensor, trained: torch.Tensor, sharded: bool) -> bool:
    if not bool(torch.isfinite(found).all()):
        return False
    if sharded:  # this rank holds a share: ds_shape is what ZeRO-3 keeps of the whole, and a DTensor has its own
        return tuple(found.shape) == tuple(getattr(trained, "ds_shape", trained.shape))
    return torch.equal(found, trained.detach().cpu())
