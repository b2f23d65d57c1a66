"""Converts a training config to the format of Oumi, a training framework that runs as a separate program.

Oumi pins its own package versions, so it cannot run in seatrial's environment.

Sources, github.com/oumi-ai/oumi: src/oumi/core/configs/params/{model,data,training}_params.py for the keys,
src/oumi/core/configs/training_config.py for valid combinations (mixed precision requires float32 weights),
src/oumi/datasets/sft/sft_jsonlines.py for text_sft_jsonl, src/oumi/cli/train.py for ``oumi train -c FILE``.

seatrial writes all rows to a file for Oumi's dataset text_sft_jsonl, since Oumi cannot read no_robots from the Hub:

- Oumi has no class for no_robots and passes its rows to TRL unchanged. Because of the column ``prompt``, TRL expects a
  column ``completion``, which no_robots does not have (KeyError 'completion').
- Oumi's HuggingFaceDataset reads ``messages``, but rejects the role system (src/oumi/datasets/sft/huggingface.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from seatrial.model import UsageError
from seatrial.train.hf import rows
from seatrial.train.train_config import HUB_PREFIX, TrainConfig

MODEL_FOLDER, ROWS_FILE, OUTPUT_FOLDER = "model", "rows.jsonl", "trained"  # in the config's folder
_LAYOUTS = ("no_robots", "alpaca")
_HEADER = "# Written by seatrial for `oumi train -c`. The loss includes prompt tokens.\n"


def render(config: TrainConfig, folder: Path) -> str:
    """Oumi's YAML for ``config``; creates no files.

    Rows are read from ``folder``/rows.jsonl, a model with random weights from ``folder``/model; the trained model goes
    to ``folder``/trained. Raises UsageError for settings that cannot be converted.
    """
    _check_supported(config)
    dataset = {"dataset_name": "text_sft_jsonl", "dataset_path": str(folder / ROWS_FILE)}
    content = {
        "model": _model(config, folder),
        "data": {"train": {"datasets": [dataset]}},
        "training": _training(config, folder),
    }
    return f"{_HEADER}{yaml.safe_dump(content, sort_keys=False)}"


def convert_row(layout: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """A no_robots or alpaca ``row`` with the keys that Oumi's text_sft_jsonl reads. Raises ValueError if invalid."""
    if layout == "alpaca":
        rows.prompt_and_output(row)
        return {"instruction": row["instruction"], "input": row.get("input") or "", "output": row["output"]}
    return {"messages": rows.conversation(row).messages}


def _check_supported(config: TrainConfig) -> None:
    applies_by_reason = {
        f"data.layout {config.data.layout}, expected {' or '.join(_LAYOUTS)}": config.data.layout not in _LAYOUTS,
        "use_lora true, expected false": config.use_lora,
        f"parallel.strategy {config.parallel.strategy}, expected ddp": config.parallel.strategy != "ddp",
        "data.packing true, expected false": config.data.packing,
        f"learning_rate.min_ratio {config.learning_rate.min_ratio:g}, expected 0": config.learning_rate.min_ratio > 0,
    }
    for reason, applies in applies_by_reason.items():
        if applies:
            raise UsageError(f"cannot convert {config.run_name} for Oumi: {reason}")


def _model(config: TrainConfig, folder: Path) -> dict[str, Any]:
    weights = config.model.weights
    bf16_weights = config.bf16 and config.master_dtype == "bf16"
    fields = {
        "model_name": str(folder / MODEL_FOLDER) if weights == "random" else weights.removeprefix(HUB_PREFIX),
        "model_max_length": config.seq_len,
        "torch_dtype_str": "bfloat16" if bf16_weights else "float32",
        "attn_implementation": "sdpa",
        "load_pretrained_weights": weights != "random",
    }
    if config.data.tokenizer:
        fields["tokenizer_name"] = config.data.tokenizer.removeprefix(HUB_PREFIX)
    return fields


def _training(config: TrainConfig, folder: Path) -> dict[str, Any]:
    schedule, optimizer = config.learning_rate, config.optimizer
    mixed = config.bf16 and config.master_dtype == "fp32"
    return {
        "trainer_type": "TRL_SFT",
        "run_name": config.run_name,
        "output_dir": str(folder / OUTPUT_FOLDER),
        "max_steps": config.max_steps,
        "per_device_train_batch_size": config.bsz,
        "gradient_accumulation_steps": config.grad_accum,
        "mixed_precision_dtype": "BF16" if mixed else "NONE",
        "enable_gradient_checkpointing": config.gradient_checkpointing,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
        "optimizer": "adamw_torch",
        "learning_rate": schedule.peak,
        "lr_scheduler_type": schedule.schedule,
        "warmup_steps": schedule.warmup_steps,
        "weight_decay": optimizer.weight_decay,
        "adam_beta1": optimizer.beta1,
        "adam_beta2": optimizer.beta2,
        "adam_epsilon": optimizer.eps,
        "max_grad_norm": optimizer.max_grad_norm,
        "seed": config.seed,
        "data_seed": config.seed,
        "logging_steps": 1,
        "save_steps": config.checkpoint.every,  # 0: no intermediate checkpoints
        "save_final_model": True,  # writes trainer_state.json too
        "enable_tensorboard": config.tensorboard,
        "enable_wandb": False,
    }
