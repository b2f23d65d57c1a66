"""Rows of text or instructions from a local file, and the tokens they become."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from seatrial.model import UsageError

END_TOKEN = "<|end|>"  # behind each row, of a tokenizer that is trained here
# What files call the end of a text; the first that a tokenizer knows is taken
_ENDS = (END_TOKEN, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>")
MAX_TRAINED_VOCABULARY = 8192  # words of a tokenizer trained here: more take longer and teach no more


def read_rows(path: Path, most: int | None) -> list[str]:
    """The first ``most`` rows as text. Raises UsageError, naming file and row, for one that is none."""
    try:
        rows = list(islice(_rows(path), most))
    except OSError as error:
        raise UsageError(f"cannot read the data {path}: {error.strerror or error}") from error
    if not rows:
        raise UsageError(f"{path} holds no rows")
    return [_text(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def _rows(path: Path) -> Iterator[Any]:
    if path.suffix == ".parquet":
        yield from _parquet(path)
    elif path.suffix == ".jsonl":
        with path.open("rb") as file:
            for number, line in enumerate(file, 1):
                yield _json(line, f"{path}, row {number}")
    elif path.suffix == ".json":
        yield from _list(path)
    else:
        raise UsageError(f"{path}: expected a .json, .jsonl or .parquet file")


def _list(path: Path) -> list[Any]:
    """A JSON list of rows, as alpaca-cleaned and glaive-function-calling-v2 are published."""
    rows = _json(path.read_bytes(), str(path))
    if not isinstance(rows, list):
        raise UsageError(f"{path}: expected a JSON list of rows; JSON lines are to be called .jsonl")
    return rows


def _json(raw: bytes, where: str) -> Any:
    try:
        return json.loads(raw.decode())
    except UnicodeDecodeError as error:
        raise UsageError(f"{where} is not UTF-8: {error}") from error
    except (ValueError, RecursionError) as error:
        raise UsageError(f"{where} is no JSON: {error}") from error


def _parquet(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(f"{path}: parquet needs pyarrow, which is not installed; .jsonl needs nothing") from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except pyarrow.ArrowException as error:
        raise UsageError(f"{path} is no whole parquet file: {error}") from error


def _text(row: Any, where: str) -> str:
    text = _said(row, where)
    try:
        text.encode()
    except UnicodeEncodeError as error:  # JSON may escape half of a pair, which tokenizers refuse
        raise UsageError(f"{where} holds half a character ({text[error.start]!r})") from error
    return text


def _said(row: Any, where: str) -> str:
    """A row's text: its own, or instruction (input) and output, as alpaca-cleaned has them; or messages' contents."""
    if isinstance(row, Mapping):
        if isinstance(row.get("text"), str) and row["text"]:
            return str(row["text"])
        if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
            parts = {"Instruction": row["instruction"], "Input": row.get("input"), "Response": row["output"]}
            return "\n\n".join(f"### {name}:\n{part}" for name, part in parts.items() if part)
        if isinstance(row.get("messages"), list) and row["messages"]:
            return "\n\n".join(_turn(turn, where) for turn in row["messages"])
    keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
    raise UsageError(f"{where}: expected text; instruction and output; or messages (got {keys or 'nothing'})")


def _turn(turn: Any, where: str) -> str:
    if not (isinstance(turn, Mapping) and isinstance(turn.get("role"), str) and isinstance(turn.get("content"), str)):
        raise UsageError(f"{where}: a message needs role and content, both text (got {str(turn)[:80]})")
    return f"### {turn['role'].capitalize()}:\n{turn['content']}"


def load_tokenizer(path: str | None, rows: Sequence[str], vocabulary: int) -> Any:
    """The tokenizer.json at ``path``; without one, byte-level BPE trained on ``rows``, of at most ``vocabulary`` words.

    Raises UsageError where it cannot be read.
    """
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    if path is not None:
        try:
            return Tokenizer.from_file(path)
        except Exception as error:  # tokenizers raises nothing more specific
            raise UsageError(f"cannot read the tokenizer {path}: {error}") from error
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary <= len(alphabet):
        raise UsageError(f"a vocabulary of {vocabulary} is too small for text: {len(alphabet) + 1} at least")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, MAX_TRAINED_VOCABULARY),
        special_tokens=[END_TOKEN],
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(rows, trainer)
    return trained


def encode(encoder: Any, rows: Sequence[str]) -> list[list[int]]:
    """Each row's tokens, ended by the tokenizer's own token for it. Raises UsageError where it knows none, or fails."""
    end = next((found for word in _ENDS if (found := encoder.token_to_id(word)) is not None), None)
    if end is None:
        raise UsageError(f"the tokenizer knows none of {', '.join(_ENDS)}: rows could not be told apart")
    try:
        encoded = encoder.encode_batch(list(rows), add_special_tokens=False)
    except Exception as error:  # tokenizers raises nothing more specific
        raise UsageError(f"the tokenizer cannot read the rows: {error}") from error
    return [[*one.ids, end] for one in encoded]
