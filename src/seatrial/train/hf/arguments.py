"""A training config as transformers' TrainingArguments. Reasons for departures from defaults stand beside them."""

from __future__ import annotations

import importlib.util
import json
import os
import warnings
from pathlib import Path
from typing import Any

import torch
from accelerate import DistributedType, PartialState
from transformers import TrainingArguments

from seatrial.model import UsageError
from seatrial.train.train_config import TrainConfig

NO_DEEPSPEED = "fsdp2, in place of zero3: deepspeed is not installed"


def effective_strategy(config: TrainConfig) -> str:
    """What will really run: ddp, fsdp2, zero3, or NO_DEEPSPEED. Never zero3 without DeepSpeed."""
    if config.parallel.strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        return NO_DEEPSPEED
    return config.parallel.strategy


def training_arguments(config: TrainConfig, out: Path) -> TrainingArguments:
    """The arguments; making them also joins the process group. Raises UsageError for what this stack cannot do."""
    _refuse(config)
    if config.tensorboard:
        os.environ["TENSORBOARD_LOGGING_DIR"] = str(out / "tensorboard")
    on_gpu = torch.cuda.is_available()
    schedule, optimizer, checkpoint = config.learning_rate, config.optimizer, config.checkpoint
    return TrainingArguments(
        output_dir=str(out / "checkpoints"),
        run_name=config.run_name,
        max_steps=config.max_steps,
        per_device_train_batch_size=config.bsz,
        gradient_accumulation_steps=config.grad_accum,
        learning_rate=schedule.peak,
        lr_scheduler_type="cosine_with_min_lr"
        if schedule.schedule == "cosine" and schedule.min_ratio
        else schedule.schedule,
        lr_scheduler_kwargs={"min_lr_rate": schedule.min_ratio} if schedule.min_ratio else None,
        warmup_steps=schedule.warmup_steps,
        adam_beta1=optimizer.beta1,
        adam_beta2=optimizer.beta2,
        adam_epsilon=optimizer.eps,
        weight_decay=optimizer.weight_decay,
        max_grad_norm=optimizer.max_grad_norm,
        optim="adamw_torch_fused" if on_gpu else "adamw_torch",
        bf16=config.bf16,
        seed=config.seed,
        save_strategy="steps" if checkpoint.every else "no",
        save_steps=checkpoint.every or 500,
        save_total_limit=checkpoint.keep,
        logging_steps=1,
        logging_nan_inf_filter=False,  # True shows the mean of the last losses in place of a NaN, and goes on
        report_to=["tensorboard"] if config.tensorboard else "none",
        disable_tqdm=True,
        dataloader_drop_last=True,  # blocks are all of one size, and so are batches then
        dataloader_pin_memory=on_gpu,
        remove_unused_columns=False,
        ddp_timeout=int(config.timeout_s),
        # None means True for a PeftModel: it breaks on checkpointing ("marked ready twice"), and searches each step
        ddp_find_unused_parameters=False,
        **_device(config, on_gpu),
        **_recompute(config),
        **_sharding(config),
    )


def _refuse(config: TrainConfig) -> None:
    if effective_strategy(config) != "ddp" and "WORLD_SIZE" not in os.environ:
        raise UsageError(
            f"{config.parallel.strategy} shards over ranks, and this process is alone: torchrun --standalone "
            "--nproc-per-node=N -m seatrial train CONFIG, or --set parallel.strategy=ddp"
        )
    if config.checkpoint.asynchronous:
        raise UsageError("checkpoint.asynchronous: transformers saves synchronously; use stack native")
    if config.learning_rate.schedule == "linear" and config.learning_rate.min_ratio:
        raise UsageError("learning_rate.floor: transformers' linear rate goes down to 0; use shape cosine, or no floor")


def _device(config: TrainConfig, on_gpu: bool) -> dict[str, Any]:
    if on_gpu:
        return {}
    if effective_strategy(config) == "zero3":
        _join_deepspeed_on_cpu()
        return {"accelerator_config": {"use_configured_state": True}}
    if effective_strategy(config) != "ddp":
        # accelerate leaves FSDP out, without a word, where ranks have no GPU: a rehearsal would rehearse DDP
        PartialState(cpu=True, backend="gloo").distributed_type = DistributedType.MULTI_GPU
        return {"use_cpu": True, "accelerator_config": {"use_configured_state": True}}
    return {"use_cpu": True, "ddp_backend": "gloo" if "WORLD_SIZE" in os.environ else None}


def _join_deepspeed_on_cpu() -> None:
    """Open DeepSpeed's group over gloo: transformers would ask for none on a CPU, and take itself for alone."""
    os.environ["DS_ACCELERATOR"] = "cpu"
    import deepspeed

    # one of its operators is for the CPU, and would be compiled now, for minutes
    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False
    os.environ["ACCELERATE_USE_DEEPSPEED"] = "true"
    PartialState(backend="gloo")
    del os.environ["ACCELERATE_USE_DEEPSPEED"]  # as transformers does


def _recompute(config: TrainConfig) -> dict[str, Any]:
    """The Trainer's activation checkpointing, in all cases but FSDP2's own (below)."""
    if not config.gradient_checkpointing or _fsdp_recomputes(config):
        return {}
    # ZeRO-3 gathers other metadata when it recomputes frozen weights, which non-reentrant checkpointing refuses
    # (transformers issue 47254); DDP with reentrant checkpointing sees a parameter ready twice (peft issue 313)
    reentrant = effective_strategy(config) == "zero3" and config.use_lora
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


def _fsdp_recomputes(config: TrainConfig) -> bool:
    """Whether FSDP2 recomputes activations itself, which saves it one gathering of weights.

    Not with LoRA: it wraps modules in others, by whose names peft finds no adapters, and saves files without any
    (seen with accelerate 1.15 and peft 0.21).
    """
    return config.gradient_checkpointing and effective_strategy(config) not in ("ddp", "zero3") and not config.use_lora


def _sharding(config: TrainConfig) -> dict[str, Any]:
    if effective_strategy(config) == "ddp":
        return {}
    if effective_strategy(config) == "zero3":
        return {"deepspeed": _deepspeed(str(config.parallel.deepspeed))}
    fsdp = {
        "version": 2,
        "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
        "reshard_after_forward": config.parallel.reshard_after_forward,
        "cpu_offload": config.parallel.cpu_offload,
        "activation_checkpointing": _fsdp_recomputes(config),
        "state_dict_type": "FULL_STATE_DICT",  # final/ must load without FSDP
    }
    return {"fsdp": True, "fsdp_config": fsdp}


def _deepspeed(path: str) -> dict[str, Any]:
    # DeepSpeed calls what torch 2.13 has given other names, and each rank is told at each call
    old = r"`torch\.distributed\.(all_gather_into_tensor|reduce_scatter_tensor)` is deprecated"
    warnings.filterwarnings("ignore", old, FutureWarning)
    try:
        found = json.loads(Path(path).read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UsageError(f"cannot read parallel.deepspeed {path}: {error}") from error
    if not isinstance(found, dict) or found.get("zero_optimization", {}).get("stage") != 3:
        raise UsageError(f"{path}: expected DeepSpeed's config with zero_optimization.stage 3, as strategy zero3 says")
    return found
