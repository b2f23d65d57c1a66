"""Rows → a folder of three splits and a report that accounts for every row.

``train.jsonl``, ``seen.jsonl`` (other conversations about the same functions) and ``unseen.jsonl`` (functions that no
conversation in training so much as lists). All choices are hashes of the content: the same row lands in the same split
in whatever order, and on whatever machine, it is read.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from seatrial.model import UsageError
from seatrial.train.disk import atomic_write_folder
from seatrial.train.function_calling.glaive import Conversation, RejectedRow, convert
from seatrial.util.files import write_json

Split = Literal["train", "seen", "unseen"]
SPLITS: tuple[Split, ...] = ("train", "seen", "unseen")
EXAMPLES = 3  # row numbers kept for each reason: enough to look, and no second copy of the data


@dataclass(frozen=True, kw_only=True)
class HeldOutFractions:
    """Which part of the conversations, and of the function names, is kept from training."""

    conversations: float = 0.05
    functions: float = 0.1
    seed: int = 0


@dataclass
class Tally:
    """Where each row went."""

    splits: Counter[Split] = field(default_factory=Counter)
    rejected: Counter[str] = field(default_factory=Counter)
    examples: dict[str, list[str]] = field(default_factory=dict)
    functions: dict[Split, set[str]] = field(
        default_factory=lambda: {split: set() for split in SPLITS}
    )  # that it lists

    def reject(self, row: int, error: RejectedRow) -> None:
        self.rejected[error.reason] += 1
        kept = self.examples.setdefault(error.reason, [])
        if len(kept) < EXAMPLES:
            kept.append(f"row {row}: {error}")

    def record(self) -> dict[str, Any]:
        return {
            "rows": self.splits.total() + self.rejected.total(),
            "kept": {split: self.splits[split] for split in SPLITS},
            "rejected": dict(self.rejected.most_common()),
            "examples": self.examples,
            "functions": {
                "train": len(self.functions["train"]),
                "unseen": len(self.functions["unseen"] - self.functions["train"]),
            },
        }


def preprocess(
    rows: Iterable[Mapping[str, Any]], out: Path, source: str, shares: HeldOutFractions | None = None
) -> dict[str, Any]:
    """Convert ``rows`` into the folder ``out``, which appears whole or not at all; the report, as in ``report.json``.

    ``source`` says where the rows are from. Raises UsageError when nothing is left to train on, or ``out`` is there.
    """
    if out.exists():
        raise UsageError(f"{out} is there already: preprocessed data is never changed under a training that reads it")
    with atomic_write_folder(out) as making:
        tally = Tally()
        with ExitStack() as stack:
            files = {s: stack.enter_context((making / f"{s}.jsonl").open("w", encoding="utf-8")) for s in SPLITS}
            for split, conversation in _sorted(rows, shares or HeldOutFractions(), tally):
                files[split].write(json.dumps(conversation.record(), ensure_ascii=False) + "\n")
        report = {"source": source, **tally.record()}
        if not tally.splits["train"]:
            raise UsageError(f"{source}: no row of {report['rows']} can be trained on; rejected: {report['rejected']}")
        write_json(making / "report.json", report)
    return report


def _sorted(
    rows: Iterable[Mapping[str, Any]], shares: HeldOutFractions, tally: Tally
) -> Iterator[tuple[Split, Conversation]]:
    seen: set[bytes] = set()
    for number, row in enumerate(rows):
        try:
            conversation = convert(row)
            digest = _digest(conversation)
            if digest in seen:
                raise RejectedRow("duplicate")
        except RejectedRow as error:
            tally.reject(number, error)
            continue
        seen.add(digest)
        split = split_of(conversation, shares)
        tally.splits[split] += 1
        tally.functions[split] |= {_plain(name) for name in conversation.parameter_schemas}
        yield split, conversation


def split_of(conversation: Conversation, shares: HeldOutFractions) -> Split:
    """The split that the conversation belongs to, whatever else there is."""
    if any(_draw(_plain(name), shares.seed) < shares.functions for name in conversation.parameter_schemas):
        return "unseen"
    return "seen" if _draw(_digest(conversation).hex(), shares.seed) < shares.conversations else "train"


def _plain(name: str) -> str:
    """getWeather and get_weather are one function to a model that has seen either."""
    return "".join(filter(str.isalnum, name)).casefold()


def _draw(text: str, seed: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    return int.from_bytes(hashlib.sha256(f"{seed}/{text}".encode()).digest()[:8], "big") / 2**64


def _digest(conversation: Conversation) -> bytes:
    return hashlib.sha256(json.dumps(conversation.record(), sort_keys=True).encode()).digest()


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of a file: a JSON list (.json), JSON lines (.jsonl) or Parquet (.parquet).

    A line that is no JSON object in UTF-8 comes out as an empty row, which convert() rejects and so counts. Raises
    UsageError.
    """
    try:
        if path.suffix == ".parquet":
            yield from _parquet(path)
        elif path.suffix == ".jsonl":
            with path.open("rb") as lines:
                yield from (_row(line) for line in lines if line.strip())
        elif path.suffix == ".json":
            rows = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(rows, list):
                raise UsageError(f"{path}: expected a JSON list of rows")
            yield from (row if isinstance(row, dict) else {} for row in rows)
        else:
            raise UsageError(f"{path}: expected a .json, .jsonl or .parquet file")
    except (OSError, ValueError, RecursionError) as error:
        raise UsageError(f"cannot read the rows in {path}: {error}") from error


def _row(line: bytes) -> Mapping[str, Any]:
    try:
        row = json.loads(line.decode())
        if b"\\u" in line:  # JSON may escape half of a pair, which tokenizers refuse
            json.dumps(row, ensure_ascii=False).encode()
    except (ValueError, RecursionError):  # UTF-8's errors are ValueErrors, too
        return {}
    return row if isinstance(row, dict) else {}


def _parquet(path: Path) -> Iterator[Mapping[str, Any]]:
    from pyarrow.parquet import ParquetFile  # comes with datasets; JSON needs none of it

    with ParquetFile(path) as file:
        for batch in file.iter_batches():
            yield from batch.to_pylist()


def read_split(folder: Path, split: Split) -> list[Conversation]:
    """The conversations of a split. Raises UsageError when the folder is not one of preprocess()."""
    path = folder / f"{split}.jsonl"
    try:
        with path.open(encoding="utf-8") as lines:
            return [Conversation(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"cannot read {path}, as `preprocess` writes it: {error}") from error
