"""Tokenizers for stack hf: pretrained, or trained on the rows of the run."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoTokenizer, PreTrainedTokenizerFast

from seatrial.model import UsageError
from seatrial.train.function_calling import template
from seatrial.train.hf import hub
from seatrial.train.train_config import TrainConfig

_fast: Any = PreTrainedTokenizerFast  # untyped
MAX_TRAINED_VOCABULARY = 8192  # tokens of a tokenizer trained here: generated rows have few words


def tokenizer_name(config: TrainConfig) -> str | None:
    """The tokenizer to load: the configured one, else that of pretrained weights; None: train a tokenizer."""
    return config.data.tokenizer or (None if config.model.weights == "random" else config.model.weights)


def load(name: str) -> Any:
    """The tokenizer at ``name``: a folder, a tokenizer.json or hub:OWNER/NAME. Raises UsageError if loading fails."""
    with hub.explain_load_errors(name):
        if name.endswith(".json"):
            return _from_file(name)
        return AutoTokenizer.from_pretrained(hub.hub_repository(name) or name)


def _from_file(path: str) -> Any:
    try:
        return _fast(tokenizer_file=path, eos_token=_end_token(path))
    except UsageError:
        raise
    except Exception as error:  # tokenizers has no specific exception
        raise UsageError(f"cannot read the tokenizer {path}: {error}") from error


def _end_token(path: str) -> str:
    vocabulary = Tokenizer.from_file(path).get_vocab()
    end_token = next((token for token in (template.END_OF_TURN, "</s>", "<|endoftext|>") if token in vocabulary), None)
    if end_token is None:
        raise UsageError(f"{path}: no end-of-text token; use a directory with tokenizer_config.json")
    return end_token


def train(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer, trained on ``texts``, of at most ``vocabulary`` tokens.

    Raises UsageError if ``vocabulary`` is below 259: 256 bytes and the special tokens.
    """
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    min_vocabulary = len(alphabet) + len(template.SPECIAL_TOKENS)
    if vocabulary < min_vocabulary:
        raise UsageError(
            f"the model's vocabulary of {vocabulary} tokens is too small for text: bytes and special tokens need "
            f"{min_vocabulary}"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, MAX_TRAINED_VOCABULARY),
        special_tokens=list(template.SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
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
        missing_parts = template.missing_parts(tokenizer)
        if missing_parts:
            raise UsageError(f"the chat template loses {', '.join(missing_parts)} with this tokenizer")
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
