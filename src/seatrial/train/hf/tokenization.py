"""Tokenizers for stack hf: pretrained, or trained on the rows of the run."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from transformers import AutoTokenizer, PreTrainedTokenizerFast

from seatrial.model import UsageError
from seatrial.train import text
from seatrial.train.function_calling import template
from seatrial.train.hf import hub
from seatrial.train.train_config import TrainConfig

_fast: Any = PreTrainedTokenizerFast  # untyped


def tokenizer_name(config: TrainConfig) -> str | None:
    """The tokenizer to load: the configured one, else that of pretrained weights; None: train a tokenizer."""
    return config.data.tokenizer or (None if config.model.weights == "random" else config.model.weights)


def load(name: str) -> Any:
    """The tokenizer at ``name``: a folder, a tokenizer.json or hub:OWNER/NAME. Raises UsageError if loading fails."""
    with hub.explain_load_errors(name):
        if name.endswith(".json"):
            tokenizer = text.read_tokenizer(name)
            vocabulary = tokenizer.get_vocab()
            end_tokens = (token for token in (template.END_OF_TURN, "</s>", "<|endoftext|>") if token in vocabulary)
            if (end_token := next(end_tokens, None)) is None:
                raise UsageError(f"{name}: no end-of-text token; use a directory with tokenizer_config.json")
            return _fast(tokenizer_object=tokenizer, eos_token=end_token)
        return AutoTokenizer.from_pretrained(hub.hub_repository(name) or name)


def train(texts: Iterable[str], vocabulary: int) -> Any:
    """A tokenizer of text.train_tokenizer with the special tokens of the chat template. Raises UsageError."""
    tokenizer = text.train_tokenizer(texts, vocabulary, template.SPECIAL_TOKENS)
    return _fast(tokenizer_object=tokenizer, eos_token=template.END_OF_TURN)


def prepare(tokenizer: Any, vocabulary: int, chat: bool) -> Any:
    """Check that ``tokenizer`` fits the model and, for ``chat``, set seatrial's chat template; return ``tokenizer``.

    Raises UsageError if it lacks a special token, is larger than ``vocabulary``, or does not work with the template.
    """
    if tokenizer.eos_token_id is None or len(tokenizer) > vocabulary:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens and end-of-text token {tokenizer.eos_token!r}; expected an "
            f"end-of-text token and at most {vocabulary} tokens (the model's vocabulary)"
        )
    if chat:
        missing = [token for token in template.SPECIAL_TOKENS[1:] if token not in tokenizer.get_vocab()]
        if missing:
            raise UsageError(f"the tokenizer lacks the special tokens of the chat template: {', '.join(missing)}")
        tokenizer.chat_template = template.chat_template()
        if not template.trains_end_of_turn(tokenizer):
            raise UsageError(
                f"the tokenizer does not encode {template.END_OF_TURN} as one token at the end of each turn: expected "
                "a tokenizer in which it is a special token"
            )
    return tokenizer
