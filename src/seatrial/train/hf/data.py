"""Conversion of rows to blocks of tokens: rank 0 writes them once, all ranks read them.

A block has ``seq_len`` tokens with padding at its end. It needs no attention mask: with causal attention no token sees
later padding, and without a mask SDPA uses its flash kernel.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from seatrial.model import UsageError
from seatrial.train import markov
from seatrial.train.disk import atomic_write_folder
from seatrial.train.function_calling import generate, preprocess, template
from seatrial.train.function_calling.glaive import Conversation
from seatrial.train.hf import hub, ranks, rows, tokenization
from seatrial.train.loss import IGNORE_INDEX
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json

REPORT_FILE = "report.json"
GENERATED_ROWS = 1000  # without data.samples: the number of rows of the SmolLM workload

Sample = tuple[list[int], list[bool]]  # tokens, and for each whether it is trained on


class Blocks(Dataset[dict[str, Tensor]]):
    """The Trainer's dataset of blocks, memory-mapped from disk."""

    def __init__(self, folder: Path) -> None:
        self._inputs = np.load(folder / "inputs.npy", mmap_mode="r")
        self._labels = np.load(folder / "labels.npy", mmap_mode="r")

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = {"input_ids": self._inputs[index], "labels": self._labels[index]}
        return {name: torch.from_numpy(tokens.astype(np.int64)) for name, tokens in block.items()}


@dataclass(frozen=True)
class PreparedData:
    """Blocks, tokenizer and ``report``.

    The report has the numbers of rows, of rejected rows by reason and of blocks, and the fractions of padding and of
    trained tokens.
    """

    folder: Path
    blocks: Blocks
    tokenizer: Any  # None for markov_chain, whose tokens are states
    report: dict[str, Any]


def prepare(config: TrainConfig, out: Path) -> PreparedData:
    """The blocks for ``config``, written by rank 0 if they do not exist. All ranks must call this.

    Raises SeatrialError on all ranks if rank 0 fails.
    """
    folder = (Path(config.data.cache) if config.data.cache else out / "data") / _folder_name(config)
    ranks.run_on_rank_0(lambda: _write_if_missing(config, folder), folder)
    if config.data.layout == "markov_chain":  # a node that does not share the folder generates the same sequences
        _write_if_missing(config, folder)
    if not folder.exists():
        raise UsageError(
            f"{folder} does not exist on rank {ranks.rank()}: set data.cache to a folder that all nodes share"
        )
    prepared = load(config, folder)
    if ranks.rank() == 0:
        _print_rejected(prepared.report)
    return prepared


def _print_rejected(report: Mapping[str, Any]) -> None:
    """Print the number of rejected rows by reason: nothing else in a training's output shows them."""
    for counts in (report, report.get("preprocess", {})):
        if rejected := counts.get("rejected"):
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sorted(rejected.items()))
            print(f"{sum(rejected.values()):,} of {counts['rows']:,} rows are not used: {reasons}", file=sys.stderr)


def load(config: TrainConfig, folder: Path) -> PreparedData:
    """The prepared data in ``folder``."""
    report = json.loads((folder / REPORT_FILE).read_text())
    tokenizer = None if config.data.layout == "markov_chain" else tokenization.load(str(folder / "tokenizer"))
    return PreparedData(folder, Blocks(folder), tokenizer, report)


def _folder_name(config: TrainConfig) -> str:
    """A folder name with a hash of all settings and file versions that determine the blocks."""
    parts: list[Any] = [
        config.data.model_dump(exclude={"cache"}),
        config.model.model_dump(),
        config.seq_len,
        config.seed,
        _generated_rows(config),
    ]
    if config.data.path and hub.hub_repository(config.data.path) is None:
        try:
            stat = Path(config.data.path).stat()
        except OSError as error:
            raise UsageError(f"cannot read data.path {config.data.path}: {error.strerror}") from error
        parts += [stat.st_size, stat.st_mtime_ns]
    return f"{config.data.layout}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"


def _generated_rows(config: TrainConfig) -> int:
    """Number of generated rows; for markov_chain one per trained block, so that no sequence repeats."""
    blocks = config.max_steps * config.bsz * config.grad_accum * ranks.world_size()
    return config.data.samples or (blocks if config.data.layout == "markov_chain" else GENERATED_ROWS)


def _write_if_missing(config: TrainConfig, folder: Path) -> None:
    if not folder.exists():
        with atomic_write_folder(folder) as temporary:
            _write_files(config, temporary)


def _write_files(config: TrainConfig, folder: Path) -> None:
    rejected: Counter[str] = Counter()
    if config.data.layout == "markov_chain":
        samples: Iterable[Sample] = _markov_samples(config)
    else:
        samples = _text_samples(config, folder, rejected)
    report = {
        "data": hub.source_label(config.data.path, "generated"),
        **_write_blocks(samples, config, folder, rejected),
    }
    if config.data.layout == "function_calling":
        report["preprocess"] = json.loads((folder / "function_calling" / "report.json").read_text())
    if config.data.layout == "markov_chain":
        report["entropy_bound"] = markov.ENTROPY  # nats per token: the lowest possible loss
    write_json(folder / REPORT_FILE, report)


def _markov_samples(config: TrainConfig) -> Iterator[Sample]:
    vocabulary = config.architecture().vocab_size
    if vocabulary < markov.STATES:
        raise UsageError(
            f"the model's vocabulary of {vocabulary} tokens is smaller than the {markov.STATES} states of markov_chain"
        )
    for sequence in markov.generate_sequences(_generated_rows(config), config.seq_len, config.seed):
        yield sequence.tolist(), [True] * config.seq_len


def training_rows(config: TrainConfig) -> Iterable[Mapping[str, Any]]:
    """The training rows, read or generated. Raises UsageError if they cannot be read."""
    path, layout = config.data.path, config.data.layout
    if path is None:
        count = _generated_rows(config)
        return (
            generate.rows(count, config.seed)
            if layout == "function_calling"
            else rows.generate(layout, count, config.seed)
        )
    repository = hub.hub_repository(path)
    if repository is None:
        return itertools.islice(preprocess.read_rows(Path(path)), config.data.samples)
    with hub.explain_load_errors(path):
        from datasets import load_dataset  # only needed for the Hub

        return itertools.islice(load_dataset(repository, split="train"), config.data.samples)


def _text_samples(config: TrainConfig, folder: Path, rejected: Counter[str]) -> Iterator[Sample]:
    """Yield the encoded rows that fit into ``seq_len``; count the others in ``rejected`` by reason."""
    train_rows: Iterable[Mapping[str, Any]] = list(training_rows(config))
    if config.data.layout == "function_calling":
        preprocess.preprocess(train_rows, folder / "function_calling", config.data.path or "generated")
        train_rows = [
            conversation.record() for conversation in preprocess.read_split(folder / "function_calling", "train")
        ]
    tokenizer = _tokenizer(config, train_rows)
    tokenization.save(tokenizer, folder / "tokenizer")
    for row in train_rows:
        try:
            sample = _encode(tokenizer, config.data.layout, row)
        except ValueError as error:
            rejected[str(error)] += 1
            continue
        if len(sample[0]) > config.seq_len:
            rejected["longer than seq_len"] += 1
        else:
            yield sample


def _tokenizer(config: TrainConfig, train_rows: Iterable[Mapping[str, Any]]) -> Any:
    vocabulary = config.architecture().vocab_size
    name = tokenization.tokenizer_name(config)
    texts = (json.dumps(row, ensure_ascii=False) for row in train_rows)
    tokenizer = tokenization.load(name) if name else tokenization.train(texts, vocabulary)
    return tokenization.prepare(tokenizer, vocabulary, chat=config.data.layout != "alpaca")


def _encode(tokenizer: Any, layout: str, row: Mapping[str, Any]) -> Sample:
    if layout == "function_calling":
        return template.encode(tokenizer, Conversation(**row))
    if layout == "no_robots":
        return template.encode(tokenizer, rows.conversation(row))
    prompt, output = rows.prompt_and_output(row)
    ids = [*tokenizer(prompt + output)["input_ids"], tokenizer.eos_token_id]
    return ids, [True] * len(ids)  # alpaca: the loss includes the prompt


def _packed(samples: Iterable[Sample], length: int) -> Iterator[Sample]:
    """Yield blocks of whole samples, as many as fit into ``length`` tokens."""
    ids: list[int] = []
    trained: list[bool] = []
    for sample_ids, mask in samples:
        if ids and len(ids) + len(sample_ids) > length:
            yield ids, trained
            ids, trained = [], []
        # the first token is not trained on: the previous sample does not predict it
        ids, trained = [*ids, *sample_ids], [*trained, False, *mask[1:]]
    if ids:
        yield ids, trained


def _write_blocks(
    samples: Iterable[Sample], config: TrainConfig, folder: Path, rejected: Counter[str]
) -> dict[str, Any]:
    used = 0

    def counted() -> Iterator[Sample]:
        nonlocal used
        for sample in samples:
            used += 1
            yield sample

    blocks = list(_packed(counted(), config.seq_len) if config.data.packing else counted())
    if not blocks:
        reason = f"rejected: {dict(rejected)}" if rejected else "it has no rows"
        raise UsageError(f"{config.data.path or 'data'}: no usable row at seq_len {config.seq_len}; {reason}")
    inputs = np.zeros((len(blocks), config.seq_len), np.int32)
    labels = np.full_like(inputs, IGNORE_INDEX)
    for number, (ids, trained) in enumerate(blocks):
        inputs[number, : len(ids)] = ids
        labels[number, : len(ids)] = np.where(trained, ids, IGNORE_INDEX)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return {
        "rows": used + rejected.total(),
        "samples": used,
        "rejected": dict(rejected),
        "blocks": len(blocks),
        "padding_share": 1 - sum(len(ids) for ids, _ in blocks) / inputs.size,
        "trained_share": float((labels != IGNORE_INDEX).mean()),
    }
