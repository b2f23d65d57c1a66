"""The network as transformers builds it: the architecture of the native stack, or pretrained weights."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any, cast

import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel, set_seed
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import logging

from seatrial.train import weights
from seatrial.train.architecture import Architecture
from seatrial.train.hf import hub
from seatrial.train.train_config import TrainConfig

_auto: Any = AutoModelForCausalLM  # untyped, as is the next
_is_sharded: Any = is_deepspeed_zero3_enabled


def weights_dtype(config: TrainConfig) -> torch.dtype:
    """Of the weights in memory. Never transformers' "auto": it trains the same config at two precisions."""
    low = config.bf16 if config.use_lora else config.master_dtype == "bf16"  # frozen weights need no master copy
    return torch.bfloat16 if low else torch.float32


def build(config: TrainConfig, device: torch.device) -> PreTrainedModel:
    """The base model on ``device``; under ZeRO-3 this rank's share of it. Raises UsageError."""
    options: dict[str, Any] = {"dtype": weights_dtype(config), "attn_implementation": "sdpa"}
    name = config.model.weights
    if name == "random":
        with device if not _is_sharded() else nullcontext():  # ZeRO-3 has a device of its own
            model = _auto.from_config(_hf_config(config.architecture()), **options)
        _draw(model, config, device)
    else:
        with hub.load_errors_explained(name):
            try:
                model = _auto.from_pretrained(hub.hub_repository(name) or name, **options)
            except SafetensorError as error:
                raise ValueError(f"its weights cannot be read: {error}") from error
            except RuntimeError as error:
                if "mismatched_sizes" not in str(error):  # out of memory is none of theirs, nor a peer that is lost
                    raise
                raise ValueError("its weights are not of the shapes that its config.json tells") from error
        if not _is_sharded():
            model = model.to(device)
    return cast("PreTrainedModel", model)


@torch.no_grad()
def _draw(model: Any, config: TrainConfig, device: torch.device) -> None:
    """First weights, by the seed and their names alone: who asks the model later, alone, draws those of all ranks.

    transformers itself draws others under ZeRO-3; and a file of them takes a minute to write and to read.
    """
    source = weights.random_weights(config.seed, config.architecture().initializer_range)
    for name, parameter in model.named_parameters():
        with _whole(parameter):
            parameter.copy_(source(name, parameter.shape, device))


def _whole(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Within, all of ``parameter`` is here, also where ZeRO-3 shares it; then what rank 0 made of it is shared."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    gathered: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return gathered


def _hf_config(architecture: Architecture) -> Any:
    fields = architecture.model_dump(exclude={"model_type", "rope_theta", "attention_bias", "sliding_window"})
    rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
    if architecture.model_type == "mistral":
        fields["sliding_window"] = architecture.sliding_window
    return AutoConfig.for_model(architecture.model_type, rope_parameters=rope, use_cache=False, **fields)


def add_lora(model: PreTrainedModel, config: TrainConfig) -> PeftModel:
    """``model``, frozen, with adapters. They are kept in fp32, but for ZeRO-3, whose buffers hold one dtype only."""
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # a scale: it need not be whole
        lora_dropout=config.lora_dropout,
        target_modules=list(config.lora_targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    set_seed(config.seed)  # building the model draws more or less, by strategy: adapters begin alike in all
    wrapped = get_peft_model(model, adapters, autocast_adapter_dtype=config.parallel.strategy != "zero3")
    assert isinstance(wrapped, PeftModel)
    return wrapped


def load(folder: Path, config: TrainConfig) -> Any:
    """The model that was saved whole in ``folder``, on the CPU."""
    return _auto.from_pretrained(folder, dtype=weights_dtype(config))


def disable_progress_bars() -> None:
    """No progress bars: they fill logs."""
    hide: Any = logging.disable_progress_bar
    hide()
