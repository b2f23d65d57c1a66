"""What was exported, loaded as whoever uses it would, and asked for a few words."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM

from seatrial.train.hf import tokenization

PROMPT = [{"role": "user", "content": "Say in a sentence what a checkpoint is."}]
_auto: Any = AutoModelForCausalLM  # untyped


@torch.inference_mode()
def generate(final: Path, device: str, count: int) -> dict[str, Any]:
    """At most ``count`` tokens by the model and tokenizer in ``final``, greedily: how many came, and what they say.

    ``finite`` is whether the logits of the prompt are numbers. Raises OSError where nothing can be loaded.
    """
    tokenizer = tokenization.load(str(final))
    # the training has made its GPU the current one, by whatever number this process knows it
    model = _auto.from_pretrained(final, dtype="auto").to("cpu" if device == "cpu" else "cuda")
    asked = tokenizer.apply_chat_template(PROMPT, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    asked = asked.to(model.device)
    logits = model(**asked).logits
    found = model.generate(**asked, max_new_tokens=count, do_sample=False)[0, asked["input_ids"].shape[1] :]
    return {
        "tokens": len(found),
        "finite": bool(logits.isfinite().all()),
        "text": tokenizer.decode(found, skip_special_tokens=True),
    }
