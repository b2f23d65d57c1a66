"""Reads rows of text or instructions from a local file and tokenizes them, for stack native."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice
from pathlib import Path
from typing import Any

from seatrial.model import UsageError
from seatrial.util.input_files import MAX_RECORD_BYTES, open_file, read_bytes

END_TOKEN = "<|end|>"  # the end token of a tokenizer trained here; it ends each row
# Common end tokens; the first one in the tokenizer's vocabulary is used
_END_TOKENS = (END_TOKEN, "</s>", "<|endoftext|>", "<|end_of_text|>", "<|im_end|>")
MAX_TRAINED_VOCABULARY = 8192  # vocabulary of a tokenizer trained here; a larger one takes longer without benefit


def read_rows(path: Path, max_rows: int | None) -> list[str]:
    """The first ``max_rows`` rows (None: all) as text.

    Raises UsageError if the file cannot be read or has no rows, or if a row is invalid (with the number of the row).
    """
    rows = list(islice(parse_rows(path), max_rows))
    if not rows:
        raise UsageError(f"{path} has no rows")
    return [_extract_text(row, f"{path}, row {number}") for number, row in enumerate(rows, 1)]


def parse_rows(path: Path) -> Iterator[Any]:
    """The rows of a JSON list (.json), JSON lines (.jsonl) or Parquet (.parquet); a UsageError for each damaged row.

    Raises UsageError if the file cannot be read or has another format.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet_rows(path)
        elif path.suffix == ".jsonl":
            with open_file(path) as lines:
                for number, line in enumerate(lines, 1):
                    if line.strip():
                        yield _parse_json(line, f"{path}, row {number}")
        elif path.suffix == ".json":
            rows = _parse_json(read_bytes(path, MAX_RECORD_BYTES), str(path))
            if isinstance(rows, UsageError):
                raise rows
            if not isinstance(rows, list):
                raise UsageError(f"{path}: expected a JSON list of rows; rename a file of JSON lines to .jsonl")
            yield from rows
        else:
            raise UsageError(f"{path}: expected a .json, .jsonl or .parquet file")
    except OSError as error:
        raise UsageError(f"cannot read the data {path}: {error.strerror or error}") from error


def _parse_json(raw: bytes, where: str) -> Any:
    """The JSON value, or a UsageError that says why ``raw`` cannot be used."""
    try:
        value = json.loads(raw.decode())
        if b"\\u" in raw:  # JSON may escape half of a surrogate pair; tokenizers fail on it
            json.dumps(value, ensure_ascii=False).encode()
        return value
    except UnicodeEncodeError as error:
        return UsageError(f"{where} contains a lone surrogate: {error}")
    except UnicodeDecodeError as error:
        return UsageError(f"{where} is not UTF-8: {error}")
    except (ValueError, RecursionError) as error:
        return UsageError(f"{where} is not valid JSON: {error}")


def _parquet_rows(path: Path) -> Iterator[Any]:
    try:
        import pyarrow
        from pyarrow import parquet
    except ImportError as error:
        raise UsageError(
            f"{path}: parquet requires pyarrow: pip install pyarrow, or convert the file to .jsonl"
        ) from error
    try:
        for batch in parquet.ParquetFile(path).iter_batches():
            yield from batch.to_pylist()
    except (pyarrow.ArrowException, ValueError) as error:
        raise UsageError(f"{path} is not a valid parquet file: {error}") from error


def _extract_text(row: Any, where: str) -> str:
    """The text of a row with the keys text; or instruction, output and optionally input; or messages."""
    if isinstance(row, UsageError):
        raise row
    if isinstance(row, Mapping):
        if isinstance(row.get("text"), str) and row["text"]:
            return str(row["text"])
        if isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
            parts = {"Instruction": row["instruction"], "Input": row.get("input"), "Response": row["output"]}
            return "\n\n".join(f"### {name}:\n{part}" for name, part in parts.items() if part)
        if isinstance(row.get("messages"), list) and row["messages"]:
            return "\n\n".join(_message_text(message, where) for message in row["messages"])
    keys = ", ".join(map(str, row)) if isinstance(row, Mapping) else type(row).__name__
    raise UsageError(f"{where}: expected text, or instruction and output, or messages (got {keys or 'nothing'})")


def _message_text(message: Any, where: str) -> str:
    if not (
        isinstance(message, Mapping)
        and isinstance(message.get("role"), str)
        and isinstance(message.get("content"), str)
    ):
        raise UsageError(f"{where}: a message needs role and content, both text (got {str(message)[:80]})")
    return f"### {message['role'].capitalize()}:\n{message['content']}"


def read_tokenizer(path: str) -> Any:
    """The tokenizer.json at ``path``. Raises UsageError."""
    from tokenizers import Tokenizer

    try:
        return Tokenizer.from_file(path)
    except Exception as error:  # tokenizers raises nothing more specific
        raise UsageError(f"cannot read the tokenizer {path}: {error}") from error


def train_tokenizer(texts: Iterable[str], vocabulary: int, special_tokens: Sequence[str]) -> Any:
    """Byte-level BPE of at most ``vocabulary`` tokens. Raises UsageError if these do not suffice for all bytes."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    if vocabulary < len(alphabet) + len(special_tokens):
        raise UsageError(f"vocab_size {vocabulary}: expected at least {len(alphabet) + len(special_tokens)} for text")
    trained = Tokenizer(models.BPE())
    trained.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=min(vocabulary, MAX_TRAINED_VOCABULARY),
        special_tokens=list(special_tokens),
        initial_alphabet=alphabet,
        show_progress=False,
    )
    trained.train_from_iterator(texts, trainer)
    return trained


def encode(encoder: Any, rows: Sequence[str]) -> list[list[int]]:
    """The token ids of each row, and an end token. Raises UsageError if there is no end token, or if encoding fails."""
    end_ids = [encoder.token_to_id(token) for token in _END_TOKENS]
    end_id = next((token_id for token_id in end_ids if token_id is not None), None)
    if end_id is None:
        raise UsageError(f"the tokenizer has no end token: expected one of {', '.join(_END_TOKENS)}")
    try:
        encoded = encoder.encode_batch(list(rows), add_special_tokens=False)
    except Exception as error:  # tokenizers raises nothing more specific
        raise UsageError(f"the tokenizer cannot encode the rows: {error}") from error
    return [[*encoding.ids, end_id] for encoding in encoded]
