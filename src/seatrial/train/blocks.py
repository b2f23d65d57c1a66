"""Converts the rows of a file to blocks of tokens, for stack native. Needs numpy and tokenizers, but no torch."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from seatrial.model import UsageError
from seatrial.train import data_cache
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json

BLOCKS_FILE, INFO_FILE = "blocks.npy", "dataset.json"
PREFIX = "blocks"  # folder names: PREFIX-HASH
IGNORE_INDEX = -100  # a target with this value has no loss, as in torch and transformers


@dataclass(frozen=True)
class DatasetInfo:
    """Description of the blocks."""

    source: str
    rows: int  # number of rows that were read or generated
    tokens: int  # number of targets in all blocks; with stack hf, padding counts too
    vocabulary: int  # vocab_size of the model
    entropy_bound: float | None = None  # lowest possible loss in nats per token; None if unknown
    details: dict[str, Any] | None = None  # stack hf: content of report.json, and the blocks' ``folder``; else None


def prepare(settings: TrainConfig, folder: Path) -> data_cache.Prepared:
    """The location of the blocks for the rows in data.path: in ``folder``, or in SEATRIAL_DATA_CACHE.

    Missing blocks are written to ``folder``. Raises UsageError if data or tokenizer cannot be read, SeatrialError or
    OSError if the blocks cannot be written.
    """
    data, path = settings.data, Path(settings.data.path or "")
    tokenizer = Path(data.tokenizer) if data.tokenizer else None

    def read_key() -> data_cache.Key:
        return {
            **data_cache.common_key(settings, "tokenizers"),
            "data": data_cache.content_hashes(path, "the data"),
            "tokenizer": data_cache.content_hashes(tokenizer, "the tokenizer") if tokenizer else "trained",
            "samples": data.samples,
        }

    def write_files(temporary: Path) -> None:
        tokens, info = _tokenize_rows(settings)
        np.save(temporary / BLOCKS_FILE, tokens)
        write_json(temporary / INFO_FILE, asdict(info))

    inputs = [path, *([tokenizer] if tokenizer else [])]
    return data_cache.prepare(settings, folder, PREFIX, inputs, read_key, write_files)


def _tokenize_rows(settings: TrainConfig) -> tuple[np.ndarray[Any, np.dtype[np.int32]], DatasetInfo]:
    """The tokens of all rows, concatenated with end tokens and cut into blocks: int32 [blocks, seq_len + 1]."""
    from seatrial.train import text

    path = Path(settings.data.path or "")
    rows = text.read_rows(path, settings.data.samples)
    vocabulary = settings.model.architecture().vocab_size
    name = settings.data.tokenizer
    encoder = text.train_tokenizer(rows, vocabulary, [text.END_TOKEN]) if name is None else text.read_tokenizer(name)
    tokens = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in text.encode(encoder, rows)])
    length = settings.seq_len + 1
    if len(tokens) < length:
        raise UsageError(f"{path}: {len(tokens)} tokens, fewer than one sequence of {length}")
    if tokens.max() >= vocabulary:
        raise UsageError(
            f"{settings.data.tokenizer}: token id {tokens.max()}, but the model's vocab_size is {vocabulary}"
        )
    blocks = tokens[: len(tokens) // length * length].reshape(-1, length)
    return blocks, DatasetInfo(source=str(path), rows=len(rows), tokens=blocks[:, 1:].size, vocabulary=vocabulary)
