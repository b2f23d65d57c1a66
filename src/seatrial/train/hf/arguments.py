"""Conversion of a training config to transformers' TrainingArguments."""

from __future__ import annotations

import importlib.util
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from transformers import TrainingArguments

from seatrial.model import UsageError
from seatrial.train.train_config import TrainConfig
from seatrial.util.input_files import read_json

# The strategy in use if zero3 is configured without DeepSpeed: the first word is a strategy, the rest is the reason
NO_DEEPSPEED = "fsdp2 instead of zero3: deepspeed is not installed"


def effective_strategy(config: TrainConfig) -> str:
    """The strategy in use: ddp, fsdp2, zero3, or NO_DEEPSPEED if zero3 is configured and DeepSpeed is not installed."""
    if config.parallel.strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        return NO_DEEPSPEED
    return config.parallel.strategy


def training_arguments(config: TrainConfig, out: Path) -> TrainingArguments:
    """The arguments; creating them joins the process group. Raises UsageError if the strategy needs torchrun."""
    strategy = effective_strategy(config)
    if strategy != "ddp" and "WORLD_SIZE" not in os.environ:
        raise UsageError(
            f"parallel.strategy={config.parallel.strategy} needs torchrun, but WORLD_SIZE is not set: run "
            "torchrun --standalone --nproc-per-node=N -m seatrial train run CONFIG, or use --set parallel.strategy=ddp"
        )
    if config.tensorboard:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(out / "tensorboard")
    on_gpu = torch.cuda.is_available()
    learning_rate, optimizer, checkpoint = config.learning_rate, config.optimizer, config.checkpoint
    min_ratio = learning_rate.min_ratio
    scheduler = "cosine_with_min_lr" if learning_rate.schedule == "cosine" and min_ratio else learning_rate.schedule
    return TrainingArguments(
        output_dir=str(out / "checkpoints"),
        run_name=config.run_name,
        max_steps=config.max_steps,
        per_device_train_batch_size=config.bsz,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=learning_rate.peak,
        lr_scheduler_type=scheduler,
        lr_scheduler_kwargs={"min_lr_rate": min_ratio} if min_ratio else None,
        warmup_steps=learning_rate.warmup_steps,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        bf16=config.bf16,
        seed=config.seed,
        save_strategy="steps" if checkpoint.every else "no",
        save_steps=checkpoint.every or 500,  # 500: transformers' default, unused without saves
        save_total_limit=checkpoint.keep,
        logging_steps=1,
        logging_nan_inf_filter=False,  # True would log the mean of the last losses instead of a NaN, and continue
        report_to=["tensorboard"] if config.tensorboard else "none",
        disable_tqdm=True,
        dataloader_drop_last=True,  # all batches have the same size
        dataloader_pin_memory=on_gpu,
        remove_unused_columns=False,
        ddp_timeout=int(config.timeout_s),
        # None means True for a PeftModel; DDP would then search in each step, and fail with activation checkpointing
        ddp_find_unused_parameters=False,
        **_device_arguments(strategy, on_gpu),
        **_checkpointing_arguments(config),
        **_sharding_arguments(config),
    )


def _device_arguments(strategy: str, on_gpu: bool) -> dict[str, Any]:
    """Arguments that select the CPU and gloo; empty with a GPU, which is the default."""
    if on_gpu:
        return {}
    if strategy == "zero3":
        _join_deepspeed_on_cpu()
        return {"accelerator_config": {"use_configured_state": True}}
    if strategy != "ddp":
        # otherwise accelerate silently replaces FSDP by DDP on ranks without a GPU
        PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
        return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
    return {"use_cpu": True, "ddp_backend": "gloo" if "WORLD_SIZE" in os.environ else None}


def _join_deepspeed_on_cpu() -> None:
    """Open DeepSpeed's process group with gloo; otherwise, on CPUs, transformers runs each rank as a single process."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # avoids compiling a CPU operator, which takes minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]  # as in transformers


def _checkpointing_arguments(config: TrainConfig) -> dict[str, Any]:
    """Arguments for activation checkpointing by the Trainer; empty if FSDP2 does it, or if it is not configured."""
    if not config.gradient_checkpointing or _fsdp_recomputes(config):
        return {}
    # Reentrant only with ZeRO-3 and LoRA: when ZeRO-3 recomputes frozen weights, their metadata differ, and
    # non-reentrant checkpointing fails (transformers issue 47254). Reentrant checkpointing fails with DDP, which would
    # mark a parameter ready twice (peft issue 313).
    reentrant = effective_strategy(config) == "zero3" and config.use_lora
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


def _fsdp_recomputes(config: TrainConfig) -> bool:
    """Whether FSDP2 does the activation checkpointing instead of the Trainer.

    FSDP2 saves one all-gather of the weights. False with LoRA, since FSDP2 wraps modules under new names, and peft then
    saves files without adapters (accelerate 1.15, peft 0.21).
    """
    return config.gradient_checkpointing and effective_strategy(config) not in ("ddp", "zero3") and not config.use_lora


def _sharding_arguments(config: TrainConfig) -> dict[str, Any]:
    """Arguments for FSDP2 or DeepSpeed; empty with DDP."""
    if effective_strategy(config) == "ddp":
        return {}
    if effective_strategy(config) == "zero3":
        return {"deepspeed": _deepspeed_config(str(config.parallel.deepspeed))}
    fsdp = {
        "version": 2,
        "auto_wrap_policy": "NO_WRAP" if config.parallel.wrap == "none" else "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": config.parallel.reshard_after_forward,
        "cpu_offload": config.parallel.cpu_offload,
        "activation_checkpointing": _fsdp_recomputes(config),
        "state_dict_type": "FULL_STATE_DICT",  # final/ must load without FSDP
    }
    return {"fsdp": True, "fsdp_config": fsdp}


def _deepspeed_config(path: str) -> dict[str, Any]:
    """The content of DeepSpeed's config file. Raises UsageError if it is not a config for ZeRO-3."""
    # DeepSpeed uses names that torch 2.13 deprecates; every rank would warn at each call
    deprecation = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", deprecation, FutureWarning)
    try:
        settings = read_json(Path(path))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read parallel.deepspeed {path}: {error}") from error
    if not isinstance(settings, dict) or settings.get("zero_optimization", {}).get("stage") != 3:
        raise UsageError(
            f"parallel.deepspeed {path}: expected a DeepSpeed config with zero_optimization.stage 3 (strategy zero3)"
        )
    return settings
