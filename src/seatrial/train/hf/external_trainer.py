"""Inputs for an external trainer (Oumi), and a test of the model that the trainer has saved."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from seatrial.model import SeatrialError, UsageError
from seatrial.train.function_calling.template import END_OF_TURN, SPECIAL_TOKENS
from seatrial.train.hf import models, tokenization
from seatrial.train.hf.blocks import training_rows
from seatrial.train.oumi import MODEL_FOLDER, ROWS_FILE, convert_row
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import atomic_write, write_json

_PROMPT = "Write these words in reverse order."
_ARCHITECTURES = {"llama": "LlamaForCausalLM", "mistral": "MistralForCausalLM", "qwen2": "Qwen2ForCausalLM"}


def write_inputs(config: TrainConfig, folder: Path) -> dict[str, int]:
    """Write ``folder``/rows.jsonl, and ``folder``/model for random weights; return rejection reason → number of rows.

    The model folder has a config and a tokenizer trained on the rows; the external trainer initializes the weights.
    Raises OSError, and UsageError if rows cannot be read or none is usable.
    """
    rows, rejected = [], Counter[str]()
    for row in training_rows(config):
        try:
            rows.append(json.dumps(convert_row(config.data.layout, row), ensure_ascii=False))
        except ValueError as error:
            rejected[str(error)] += 1
    if not rows:
        raise UsageError(
            f"{config.data.path}: no usable row of layout {config.data.layout}; rejected: "
            + (", ".join(f"{count} ({reason})" for reason, count in rejected.most_common()) or "none")
        )
    text = "".join(f"{row}\n" for row in rows)
    atomic_write(folder / ROWS_FILE, text.encode())
    if config.model.weights == "random":
        (folder / MODEL_FOLDER).mkdir()
        # with rope_theta at the top level, which transformers 4 and 5 both read
        fields = config.architecture().model_dump(exclude_none=True)
        architectures = [_ARCHITECTURES[fields["model_type"]]]
        write_json(folder / MODEL_FOLDER / "config.json", {"architectures": architectures, **fields})
        _write_tokenizer(config, folder / MODEL_FOLDER, rows)
    return dict(rejected)


def _write_tokenizer(config: TrainConfig, folder: Path, texts: list[str]) -> None:
    """Write a tokenizer in files that transformers 4 and 5 both read.

    save_pretrained of version 5 would name a tokenizer class that version 4 does not know.
    """
    trained = tokenization.train(texts, config.architecture().vocab_size)
    trained.backend_tokenizer.save(str(folder / "tokenizer.json"))
    # Concatenated, because a format string would print Oumi's roles as enum members
    turn = "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    template = f"{{% for message in messages %}}{turn}{{% endfor %}}"
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": END_OF_TURN, "pad_token": SPECIAL_TOKENS[0]}
    write_json(folder / "tokenizer_config.json", {**settings, "chat_template": template})


@torch.inference_mode()
def generate_text(folder: Path) -> str:
    """Greedy output of the model in ``folder`` for a fixed prompt.

    Raises SeatrialError if the model does not load or its logits for the prompt are not finite.
    """
    try:
        tokenizer: Any = AutoTokenizer.from_pretrained(folder)
        model = models.AUTO_MODEL.from_pretrained(folder, dtype=torch.float32)
    except (OSError, ValueError, RuntimeError) as error:
        raise SeatrialError(
            f"cannot load the model in {folder}: {next(iter(str(error).splitlines()), type(error))}"
        ) from error
    prompt = tokenizer(_PROMPT, return_tensors="pt")
    if not bool(torch.isfinite(model(input_ids=prompt["input_ids"]).logits).all()):
        raise SeatrialError(f"the model in {folder} computes non-finite logits")
    output = model.generate(
        input_ids=prompt["input_ids"], attention_mask=prompt["attention_mask"], max_new_tokens=8, do_sample=False
    )
    return str(tokenizer.decode(output[0, prompt["input_ids"].shape[1] :]))
