"""Tokenizers: a pretrained one, or one that is trained on the rows at hand."""

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
MAX_VOCABULARY = 8192  # of a vocabulary of our own: a generated text has fewer words than a language


def tokenizer_name(config: TrainConfig) -> str | None:
    """Which tokenizer to load: the one that is named, else the one beside the weights; None: train one."""
    return config.data.tokenizer or (None if config.model.weights == "random" else config.model.weights)


def load(name: str) -> Any:
    """The tokenizer at ``name``: a folder, a tokenizer.json or hub:OWNER/NAME. Raises UsageError."""
    with hub.load_errors_explained(name):
        if name.endswith(".json"):
            return _from_file(name)
        return AutoTokenizer.from_pretrained(hub.hub_repository(name) or name)


def _from_file(path: str) -> Any:
    try:
        return _fast(tokenizer_file=path, eos_token=_end(path))
    except UsageError:
        raise
    except Exception as error:  # tokenizers raises nothing more specific
        raise UsageError(f"cannot read the tokenizer {path}: {error}") from error


def _end(path: str) -> str:
    vocabulary = Tokenizer.from_file(path).get_vocab()
    found = next((token for token in (template.END_OF_TURN, "</s>", "<|endoftext|>") if token in vocabulary), None)
    if found is None:
        raise UsageError(f"{path}: no token that ends a text is in it; name a folder with tokenizer_config.json")
    return found


def train(texts: Iterable[str], vocabulary: int) -> Any:
    """A byte-level BPE tokenizer for ``texts``, of at most ``vocabulary`` tokens. Raises UsageError under 259."""
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    least = len(alphabet) + len(template.SPECIAL_TOKENS)
    if vocabulary < least:
        raise UsageError(
            f"the model's vocabulary of {vocabulary} cannot hold text: bytes and marks take {least} tokens"
        )
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, MAX_VOCABULARY),
        special_tokens=list(template.SPECIAL_TOKENS),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return _fast(tokenizer_object=tokenizer, eos_token=template.END_OF_TURN)


def prepare(tokenizer: Any, vocabulary: int, chat: bool) -> Any:
    """Check that ``tokenizer`` fits the model and, for ``chat``, give it our template. Raises UsageError."""
    if tokenizer.eos_token_id is None or len(tokenizer) > vocabulary:
        raise UsageError(
            f"the tokenizer has {len(tokenizer)} tokens and ends a text with {tokenizer.eos_token!r}; the model takes "
            f"{vocabulary} tokens, and needs an end"
        )
    if chat:
        missing = [token for token in template.SPECIAL_TOKENS[1:] if token not in tokenizer.get_vocab()]
        if missing:
            raise UsageError(f"the tokenizer lacks {', '.join(missing)}, which separate the turns of a chat")
        tokenizer.chat_template = template.chat_template()
        lost = template.missing_parts(tokenizer)
        if lost:
            raise UsageError(f"the chat template loses {', '.join(lost)} with this tokenizer")
    return tokenizer


def save(tokenizer: Any, folder: Path) -> None:
    tokenizer.save_pretrained(folder)
