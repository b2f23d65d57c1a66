"""Text generation with an exported model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from seatrial.train.hf import models, tokenization

PROMPT = [{"role": "user", "content": "Say in a sentence what a checkpoint is."}]


@torch.inference_mode()
def generate(final: Path, device: str, count: int) -> dict[str, Any]:
    """Greedy output, at most ``count`` tokens, of the model in ``final`` for PROMPT.

    Returns ``text``, ``tokens`` (their number), and ``finite``: whether all logits of the prompt are finite. Raises
    UsageError or OSError if ``final`` cannot be loaded.
    """
    tokenizer = tokenization.load(str(final))
    # "cuda" is the current device, which the training has set
    model = models.AUTO_MODEL.from_pretrained(final, dtype="auto").to("cpu" if device == "cpu" else "cuda")
    prompt = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    prompt = prompt.to(model.device)
    logits = model(**prompt).logits
    output = model.generate(**prompt, max_new_tokens=count, do_sample=False)[0, prompt["input_ids"].shape[1] :]
    return {
        "tokens": len(output),
        "finite": bool(logits.isfinite().all()),
        "text": tokenizer.decode(output, skip_special_tokens=True),
    }
