"""For a trainer that is not ours: what it starts from where nothing is named, and whether what it left can be used."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from seatrial.model import SeatrialError, UsageError
from seatrial.train.function_calling.template import END_OF_TURN, SPECIAL_TOKENS
from seatrial.train.hf import models, tokenization
from seatrial.train.hf.data import training_rows
from seatrial.train.oumi import MODEL_FOLDER, ROWS_FILE, convert_row
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import atomic_write, write_json

_PROMPT = "Write these words in reverse order."
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def write_inputs(config: TrainConfig, folder: Path) -> dict[str, int]:
    """Write ``folder``/rows.jsonl, and /model where the weights are random; how many rows are not used, by reason.

    The model is its config and a tokenizer trained on these rows; the other trainer draws the weights. Raises OSError,
    and UsageError where rows cannot be read or none can be used.
    """
    rows, rejected = [], Counter[str]()
    for row in training_rows(config):
        try:
            rows.append(json.dumps(convert_row(config.data.layout, row), ensure_ascii=False))
        except ValueError as error:
            rejected[str(error)] += 1
    if not rows:
        raise UsageError(f"{config.data.path}: no row of layout {config.data.layout}; rejected: {dict(rejected)}")
    text = "".join(f"{row}\n" for row in rows)
    atomic_write(folder / ROWS_FILE, text.encode())
    if config.model.weights == "random":
        (folder / MODEL_FOLDER).mkdir()
        _write_config(config, folder / MODEL_FOLDER)
        _write_tokenizer(config, folder / MODEL_FOLDER, rows)
    return dict(rejected)


def _write_config(config: TrainConfig, folder: Path) -> None:
    """With rope_theta on top, as transformers 4 wrote it and 5 still reads it."""
    architecture = config.architecture()
    fields = architecture.model_dump(exclude_none=True)
    write_json(folder / "config.json", {"architectures": [_ARCHITECTURES[architecture.model_type]], **fields})


def _write_tokenizer(config: TrainConfig, folder: Path, texts: list[str]) -> None:
    """In the files that transformers 4 and 5 both read; 5 by itself names a class that 4 does not know."""
    trained = tokenization.train(texts, config.architecture().vocab_size)
    trained.backend_tokenizer.save(str(folder / "tokenizer.json"))
    # added up: in the place of a text, Oumi's roles would be written as members of their enumeration
    turn = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    template = f"{{% for message in messages %}}{turn}{{% endfor %}}"
    kept = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TURN, "pad_token": SPECIAL_TOKENS[0]}
    write_json(folder / "tokenizer_config.json", {**kept, "chat_template": template})


@torch.inference_mode()
def generate_text(folder: Path) -> str:
    """What the model in ``folder`` answers, greedily. Raises SeatrialError where it does not load, or computes NaN."""
    models.disable_progress_bars()
    auto: Any = AutoModelForCausalLM  # untyped, as is the next
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model = auto.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise SeatrialError(f"{folder} does not load: {next(iter(str(error).splitlines()), type(error))}") from error
    asked = tokenizer(_PROMPT, return_tensors="pt")
    if not bool(torch.isfinite(model(input_ids=asked["input_ids"]).logits).all()):
        raise SeatrialError(f"{folder} loads, and computes numbers that are not finite")
    said = model.generate(
        input_ids=asked["input_ids"], attention_mask=asked["attention_mask"], max_new_tokens=8, do_sample=False
    )
    return str(tokenizer.decode(said[0, asked["input_ids"].shape[1] :]))
