"""A training config in the words of Oumi, which pins versions of its own and so trains as a program of its own.

Sources, github.com/oumi-ai/oumi: src/oumi/core/configs/params/{model,data,training}_params.py for the keys,
src/oumi/core/configs/training_config.py for what goes with what (mixed precision wants weights in float32),
src/oumi/datasets/sft/sft_jsonlines.py for text_sft_jsonl, src/oumi/cli/train.py for ``oumi train -c FILE``.

Rows always go through text_sft_jsonl. Oumi passes a data set of the Hub that it has no class for to TRL as it is:
no_robots has a column ``prompt`` beside ``messages``, for which TRL expects a ``completion`` (KeyError 'completion').
Oumi's HuggingFaceDataset reads ``messages``, but refuses the role system (src/oumi/datasets/sft/huggingface.py).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from seatrial.model import UsageError
from seatrial.train.hf import rows
from seatrial.train.train_config import HUB_PREFIX, TrainConfig

MODEL_FOLDER, ROWS_FILE, OUTPUT_FOLDER = "model", "rows.jsonl", "trained"  # beside the config
_LAYOUTS = ("no_robots", "alpaca")
_HEADER = "# What seatrial has `oumi train -c` do. Every token counts in its loss, those of the prompt as well.\n"


def render(config: TrainConfig, folder: Path) -> str:
    """Oumi's YAML for ``config``. Pure: names files below ``folder``, and makes none.

    The rows, from wherever they come, are in ``folder``/rows.jsonl, a model with random weights in ``folder``/model;
    the result goes to ``folder``/trained. Raises UsageError for what is not rendered here.
    """
    _refuse(config)
    text = yaml.safe_dump(
        {"model": _model(config, folder), "data": _data(folder), "training": _training(config, folder)},
        sort_keys=False,
    )
    return f"{_HEADER}{text}"


def convert_row(layout: str, row: Mapping[str, Any]) -> dict[str, Any]:
    """``row`` of no_robots or alpaca, with only the keys that Oumi's text_sft_jsonl reads. Raises ValueError."""
    if layout == "alpaca":
        rows.prompt_and_output(row)
        return {"instruction": row["instruction"], "input": row.get("input") or "", "output": row["output"]}
    return {"messages": rows.conversation(row).messages}


def _refuse(config: TrainConfig) -> None:
    wrong = {
        f"data.layout {config.data.layout}: expected {' or '.join(_LAYOUTS)}": config.data.layout not in _LAYOUTS,
        "use_lora: only a full fine-tune is": config.use_lora,
        f"parallel.strategy {config.parallel.strategy}: one GPU is": config.parallel.strategy != "ddp",
        "data.packing: rows one by one are": config.data.packing,
        "learning_rate.floor: only a rate that ends at 0 is": bool(config.learning_rate.min_ratio),
    }
    if reason := next((reason for reason, holds in wrong.items() if holds), None):
        raise UsageError(f"{config.run_name} cannot be rendered for Oumi: {reason} rendered")


def _model(config: TrainConfig, folder: Path) -> dict[str, Any]:
    weights = config.model.weights
    trained_low = config.bf16 and config.master_dtype == "bf16"
    found = {
        "model_name": str(folder / MODEL_FOLDER) if weights == "random" else weights.removeprefix(HUB_PREFIX),
        "model_max_length": config.seq_len,
        "torch_dtype_str": "bfloat16" if trained_low else "float32",
        "attn_implementation": "sdpa",
        "load_pretrained_weights": weights != "random",
    }
    return found | ({"tokenizer_name": config.data.tokenizer.removeprefix(HUB_PREFIX)} if config.data.tokenizer else {})


def _data(folder: Path) -> dict[str, Any]:
    return {"train": {"datasets": [{"dataset_name": "text_sft_jsonl", "dataset_path": str(folder / ROWS_FILE)}]}}


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
        "save_steps": config.checkpoint.every,  # 0: none on the way
        "save_final_model": True,  # trainer_state.json comes with it
        "enable_tensorboard": config.tensorboard,
        "enable_wandb": False,
    }
