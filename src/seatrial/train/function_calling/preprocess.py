"""Converts rows of glaive-function-calling-v2 to a folder with three splits and a report that counts every row.

``unseen.jsonl``: conversations that list a held-out function; training conversations never list one. ``seen.jsonl``:
other held-out conversations. ``train.jsonl``: the rest. The split of a row depends only on hashes of its content, and
so neither on the order of the rows nor on the machine.
"""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from seatrial.model import UsageError
from seatrial.train import text
from seatrial.train.disk import atomic_write_folder
from seatrial.train.function_calling.glaive import Conversation, RejectedRow, convert
from seatrial.util.files import write_json

Split = Literal["train", "seen", "unseen"]
SPLITS: tuple[Split, ...] = ("train", "seen", "unseen")
HELD_OUT_CONVERSATIONS, HELD_OUT_FUNCTIONS = 0.05, 0.1  # fractions that are held out from training
EXAMPLES_PER_REASON = 3  # rejected rows that the report quotes for each reason


def preprocess(rows: Iterable[Mapping[str, Any]], out: Path, source: str) -> dict[str, Any]:
    """Convert ``rows`` to the folder ``out``, written atomically, and return the content of ``report.json``.

    ``source``: the origin of the rows, for the report. Raises UsageError if ``out`` exists or no row is for training.
    """
    if out.exists():
        raise UsageError(f"{out} exists: prepared data is never overwritten; use another directory or remove it")
    kept, rejected, digests = Counter[Split](), Counter[str](), set[bytes]()
    examples: dict[str, list[str]] = {}  # rejection reason → messages of the first rows
    functions = {split: set[str]() for split in SPLITS}  # normalized names in the conversations of each split
    with atomic_write_folder(out) as folder:
        with ExitStack() as stack:
            files = {
                split: stack.enter_context((folder / f"{split}.jsonl").open("w", encoding="utf-8")) for split in SPLITS
            }
            for number, row in enumerate(rows):
                try:
                    conversation = convert(row)
                    if (digest := _digest(conversation)) in digests:
                        raise RejectedRow("duplicate")
                except RejectedRow as error:
                    rejected[error.reason] += 1
                    examples.setdefault(error.reason, []).append(f"row {number}: {error}")
                    del examples[error.reason][EXAMPLES_PER_REASON:]
                    continue
                digests.add(digest)
                split = assign_split(conversation)
                kept[split] += 1
                functions[split] |= set(map(_normalized, conversation.parameter_schemas))
                files[split].write(json.dumps(conversation.record(), ensure_ascii=False) + "\n")
        report = {
            "source": source,
            "rows": kept.total() + rejected.total(),
            "kept": {split: kept[split] for split in SPLITS},
            "rejected": dict(rejected.most_common()),
            "examples": examples,
            "functions": {
                "train": len(functions["train"]),
                "unseen": len(functions["unseen"] - functions["train"]),
            },
        }
        if not kept["train"]:
            reasons = ", ".join(f"{count} {reason}" for reason, count in rejected.most_common()) or "none"
            raise UsageError(
                f"{source}: no row for training; rows: {report['rows']}, held out: {kept.total()}, rejected: {reasons}"
            )
        write_json(folder / "report.json", report)
    return report


def assign_split(conversation: Conversation) -> Split:
    """The split of the conversation, independent of other rows."""
    names = [_normalized(name) for name in conversation.parameter_schemas]
    if any(_hash_fraction(name) < HELD_OUT_FUNCTIONS for name in names):
        return "unseen"
    return "seen" if _hash_fraction(_digest(conversation).hex()) < HELD_OUT_CONVERSATIONS else "train"


def _normalized(name: str) -> str:
    """``name`` without case and punctuation: getWeather and get_weather are the same function to a model."""
    return "".join(filter(str.isalnum, name)).casefold()


def _hash_fraction(value: str) -> float:
    """A number in [0, 1) from the hash of ``value``."""
    return int.from_bytes(hashlib.sha256(f"0/{value}".encode()).digest()[:8], "big") / 2**64


def _digest(conversation: Conversation) -> bytes:
    return hashlib.sha256(json.dumps(conversation.record(), sort_keys=True).encode()).digest()


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """The rows of text.parse_rows; a row that is not a JSON object in UTF-8 is empty, which convert() rejects."""
    return (row if isinstance(row, dict) else {} for row in text.parse_rows(path))


def read_split(folder: Path, split: Split) -> list[Conversation]:
    """The conversations of a split. Raises UsageError if ``folder`` was not written by preprocess()."""
    path = folder / f"{split}.jsonl"
    try:
        with path.open(encoding="utf-8") as lines:
            return [Conversation(**json.loads(line)) for line in lines]
    except (OSError, ValueError, TypeError) as error:
        raise UsageError(f"cannot read {path}: {error}; expected a file written by preprocess") from error
