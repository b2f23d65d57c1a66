"""A strict fake of Oumi's executable, ``python oumi.py train -c FILE``; it rejects unknown configuration keys.

src/seatrial/train/oumi.py names the sources of the keys. The fake writes recorded output of transformers' Trainer
(fixtures/transformers) to the paths that Oumi uses. OUMI_FAULT selects a fault: exit, full, hang, nan, flat, cut,
no-state or no-weights; with a fault no model is saved.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import time
from pathlib import Path
from typing import Any

import yaml

# relative to this file, as the process has no PYTHONPATH to import the package tests
FIXTURE = Path(__file__).resolve().parents[1] / "fixtures" / "transformers" / "trainer_state.json"
ALLOWED_KEYS: dict[str, set[str]] = {
    "": {"model", "data", "training"},
    "model": {
        *("model_name", "model_max_length", "torch_dtype_str", "attn_implementation", "load_pretrained_weights"),
        "tokenizer_name",
    },
    "data": {"train"},
    "training": {
        *("trainer_type", "run_name", "output_dir", "max_steps", "per_device_train_batch_size", "save_steps"),
        *("gradient_accumulation_steps", "mixed_precision_dtype", "enable_gradient_checkpointing", "logging_steps"),
        *("gradient_checkpointing_kwargs", "optimizer", "learning_rate", "lr_scheduler_type", "warmup_steps"),
        *("weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm", "seed", "data_seed"),
        *("save_final_model", "enable_tensorboard", "enable_wandb"),
    },
}


def exit_if_error(message: str) -> None:
    if message:
        raise SystemExit(f"oumi: {message}")


def checked(path: str) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load(Path(path).read_text())
    for section, allowed in ALLOWED_KEYS.items():
        given = config[section] if section else config
        exit_if_error(f"unknown keys in {section}: {set(given) - allowed}" if set(given) - allowed else "")
    (rows,) = config["data"]["train"]["datasets"]
    exit_if_error("" if rows["dataset_name"] == "text_sft_jsonl" else f"no dataset {rows['dataset_name']}")
    lines = [json.loads(line) for line in Path(rows["dataset_path"]).read_text().splitlines()]
    exit_if_error("" if all(set(line) == {"messages"} for line in lines) else "dataset rows without messages")
    mixed, dtype = config["training"]["mixed_precision_dtype"], config["model"]["torch_dtype_str"]
    exit_if_error("" if mixed == "NONE" or dtype == "float32" else "mixed precision requires float32 weights")
    exit_if_error("" if "RANK" not in os.environ and "PYTHONPATH" not in os.environ else "RANK or PYTHONPATH is set")
    exit_if_error("" if os.environ.get("DO_NOT_TRACK") == "1" else "DO_NOT_TRACK is not set")
    return config


def trainer_state(fault: str) -> str:
    text = FIXTURE.read_text()
    state = json.loads(text)
    for entry in state["log_history"]:
        if "loss" in entry:
            entry.update({"flat": {"loss": 5.0}, "nan": {"grad_norm": float("nan")}}.get(fault, {}))
    text = json.dumps(state, indent=2, sort_keys=True) + "\n"
    return text[: len(text) // 2] if fault == "cut" else text


def save_model(source: str, folder: Path) -> None:
    for package in ("sklearn", "scipy"):  # not needed: see seatrial.train.hf
        sys.modules[package] = None  # type: ignore[assignment]
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

    any_auto: Any = AutoModelForCausalLM
    tokenizer: Any = AutoTokenizer.from_pretrained(source)
    turns = [{"role": "user", "content": "Hello"}, {"role": "assistant", "content": "Ahoy"}]
    text = tokenizer.apply_chat_template(turns, tokenize=False)
    exit_if_error("" if text.endswith("<|im_start|>assistant\nAhoy<|im_end|>\n") else f"the template gives {text!r}")
    any_auto.from_config(AutoConfig.from_pretrained(source)).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def main(arguments: list[str]) -> None:
    fault = os.environ.get("OUMI_FAULT", "")
    exit_if_error("" if arguments[:2] == ["train", "-c"] and len(arguments) == 3 else f"unknown arguments {arguments}")
    config = checked(arguments[2])
    print("Oumi version: 0.4.2", flush=True)
    exit_if_error("CUDA error: no kernel image is available" if fault == "exit" else "")
    exit_if_error("OSError: [Errno 28] No space left on device" if fault == "full" else "")
    time.sleep(600 if fault == "hang" else 0)
    out = Path(config["training"]["output_dir"])
    checkpoint = out / f"checkpoint-{config['training']['max_steps']}"
    checkpoint.mkdir(parents=True)
    if not fault:
        save_model(config["model"]["model_name"], out)
        shutil.copy(out / "model.safetensors", checkpoint)
    elif fault != "no-weights":
        (checkpoint / "model.safetensors").write_bytes(b"no real weights")
    (checkpoint / "trainer_state.json").write_text(trainer_state(fault))
    if fault != "no-state":
        (out / "trainer_state.json").write_text(trainer_state(fault))


if __name__ == "__main__":
    main(sys.argv[1:])
