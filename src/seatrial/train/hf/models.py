"""Builds transformers models for the stack ``hf`` (Hugging Face).

The models have the same architectures as those of stack ``native``. Their weights are random or pretrained.
"""

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

from seatrial.model import UsageError
from seatrial.train import weights
from seatrial.train.hf import hub
from seatrial.train.train_config import TrainConfig

AUTO_MODEL: Any = AutoModelForCausalLM  # untyped
_is_zero3_enabled: Any = is_deepspeed_zero3_enabled
_disable_progress_bars: Any = logging.disable_progress_bar
_disable_progress_bars()  # they fill logs


def weights_dtype(config: TrainConfig) -> torch.dtype:
    """The dtype of the weights in memory; not transformers' "auto", which depends on the weights file."""
    bf16 = config.bf16 if config.use_lora else config.master_dtype == "bf16"  # frozen weights need no fp32 copy
    return torch.bfloat16 if bf16 else torch.float32


def build(config: TrainConfig, device: torch.device) -> PreTrainedModel:
    """The base model on ``device``; under ZeRO-3 this rank's shard. Raises UsageError if weights cannot be loaded."""
    options: dict[str, Any] = {"dtype": weights_dtype(config), "attn_implementation": "sdpa"}
    name = config.model.weights
    if name == "random":
        architecture = config.architecture()
        fields = architecture.model_dump(exclude={"model_type", "rope_theta", "attention_bias", "sliding_window"})
        if architecture.model_type == "mistral":
            fields["sliding_window"] = architecture.sliding_window
        rope = {"rope_type": "default", "rope_theta": architecture.rope_theta}
        hf_config = AutoConfig.for_model(architecture.model_type, rope_parameters=rope, use_cache=False, **fields)
        with device if not _is_zero3_enabled() else nullcontext():  # ZeRO-3 places shards itself
            model = AUTO_MODEL.from_config(hf_config, **options)
        _initialize(model, config, device)
    else:
        with hub.explain_load_errors(name):
            try:
                model = AUTO_MODEL.from_pretrained(hub.hub_repository(name) or name, **options)
            except SafetensorError as error:
                raise ValueError(f"cannot read the weights: {error}") from error
            except RuntimeError as error:
                if "mismatched_sizes" not in str(error):  # another error, such as out of memory or a lost peer
                    raise
                raise ValueError("the shapes of the weights differ from config.json") from error
        _require_named_model(model.config, config)
        if not _is_zero3_enabled():
            model = model.to(device)
    return cast("PreTrainedModel", model)


def _require_named_model(loaded: Any, config: TrainConfig) -> None:
    """Raise UsageError unless the ``loaded`` config is that of model.name, from which FLOPs and memory are computed."""
    architecture = config.architecture()
    for field in ("num_hidden_layers", "hidden_size"):
        found, expected = getattr(loaded, field, None), getattr(architecture, field)
        if found != expected:
            raise UsageError(
                f"{config.model.weights} has {field} {found}, but model.name {config.model.name} has {expected}: set "
                "model.name to its model, or download the weights and set model.weights to their directory"
            )


@torch.no_grad()
def _initialize(model: Any, config: TrainConfig, device: torch.device) -> None:
    """Initialize weights from the seed and their names: the same values for any strategy and number of ranks.

    transformers' own initialization differs under ZeRO-3. A file of initial weights would take a minute to write and
    read.
    """
    source = weights.random_weights(config.seed, config.architecture().initializer_range)
    for name, parameter in model.named_parameters():
        with _gathered(parameter):
            parameter.copy_(source(name, parameter.shape, device))


def _gathered(parameter: torch.nn.Parameter) -> AbstractContextManager[Any]:
    """Context manager: ``parameter`` is unsharded. ZeRO-3 shards it again at the end, with the values of rank 0."""
    if not hasattr(parameter, "ds_id"):
        return nullcontext()
    import deepspeed

    context: AbstractContextManager[Any] = deepspeed.zero.GatheredParameters([parameter], modifier_rank=0)
    return context


def add_lora(model: PreTrainedModel, config: TrainConfig) -> PeftModel:
    """The frozen ``model`` with adapters in fp32.

    With strategy zero3 the adapters have the model's dtype, since a buffer of DeepSpeed has one dtype for all weights.
    """
    adapters = LoraConfig(
        r=config.lora_r,
        lora_alpha=config.lora_alpha,  # type: ignore[arg-type]  # a scale: may be fractional
        lora_dropout=config.lora_dropout,
        target_modules=list(config.lora_targets),
        bias="none",
        task_type="CAUSAL_LM",
    )
    # By now, strategies have drawn different numbers of random values; with all, the adapters must be the same
    set_seed(config.seed)
    wrapped = get_peft_model(model, adapters, autocast_adapter_dtype=config.parallel.strategy != "zero3")
    assert isinstance(wrapped, PeftModel)
    return wrapped


def load(folder: Path, config: TrainConfig) -> Any:
    """The unsharded model saved in ``folder``, on the CPU."""
    return AUTO_MODEL.from_pretrained(folder, dtype=weights_dtype(config))
