"""Rows → blocks of tokens, made once by rank 0 and read by all.

A block has ``seq_len`` tokens; padding stands at its end. No attention mask goes with it: behind causal attention,
nothing sees the padding that follows, and without a mask SDPA keeps its flash kernel.
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
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json

REPORT_FILE = "report.json"
GENERATED_ROWS = 1000  # as many as no_robots gives to SmolLM's workload
IGNORED_LABEL = -100  # a label that takes no part in the loss, as torch's cross entropy has it
Sample = tuple[list[int], list[bool]]  # tokens, and which of them are trained on


class Blocks(Dataset[dict[str, Tensor]]):
    """Blocks as the Trainer takes them; read from the disk as they are needed."""

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
    """``report``: rows, rejected by reason, blocks, shares of padding and of tokens that are trained on."""

    folder: Path
    blocks: Blocks
    tokenizer: Any  # None for walks, whose tokens are states
    report: dict[str, Any]


def prepare(config: TrainConfig, out: Path) -> PreparedData:
    """The blocks for ``config``: those that are there, else rank 0 makes them. All ranks must call this.

    Raises SeatrialError on all ranks where that fails.
    """
    folder = (Path(config.data.cache) if config.data.cache else out / "data") / _key(config)
    ranks.run_on_rank_0(lambda: _make(config, folder), folder)
    if config.data.layout == "markov_chain":  # the seed's: a node that does not share the first rank's makes the same
        _make(config, folder)
    if not folder.exists():
        raise UsageError(f"rank {ranks.rank()} does not see {folder}: data.cache must be a folder that all nodes share")
    found = load(config, folder)
    if ranks.rank() == 0:
        _tell_rejected(found.report)
    return found


def _tell_rejected(report: Mapping[str, Any]) -> None:
    """A file that lost half of its rows trains well: whoever looks must see it."""
    for counted in (report, report.get("preprocess", {})):
        if rejected := counted.get("rejected"):
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in sorted(rejected.items()))
            print(f"{sum(rejected.values()):,} of {counted['rows']:,} rows are not used: {reasons}", file=sys.stderr)


def load(config: TrainConfig, folder: Path) -> PreparedData:
    report = json.loads((folder / REPORT_FILE).read_text())
    tokenizer = None if config.data.layout == "markov_chain" else tokenization.load(str(folder / "tokenizer"))
    return PreparedData(folder, Blocks(folder), tokenizer, report)


def _key(config: TrainConfig) -> str:
    """Names what decides the blocks: another config, or another version of the file, gets a folder of its own."""
    parts: list[Any] = [
        config.data.model_dump(exclude={"cache"}),
        config.model.model_dump(),
        config.seq_len,
        config.seed,
        _wanted(config),
    ]
    if config.data.path and hub.hub_repository(config.data.path) is None:
        try:
            found = Path(config.data.path).stat()
        except OSError as error:
            raise UsageError(f"cannot read data.path {config.data.path}: {error.strerror}") from error
        parts += [found.st_size, found.st_mtime_ns]
    return f"{config.data.layout}-{hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:12]}"


def _wanted(config: TrainConfig) -> int:
    """How many rows are generated: of walks one a block, no walk twice."""
    steps = config.max_steps * config.bsz * config.grad_accum * ranks.world_size()
    return config.data.samples or (steps if config.data.layout == "markov_chain" else GENERATED_ROWS)


def _make(config: TrainConfig, folder: Path) -> None:
    if not folder.exists():
        with atomic_write_folder(folder) as making:
            _fill(config, making)


def _fill(config: TrainConfig, making: Path) -> None:
    rejected: Counter[str] = Counter()
    if config.data.layout == "markov_chain":
        samples: Iterable[Sample] = _walks(config)
    else:
        samples = _text_samples(config, making, rejected)
    report = {
        "data": hub.source_label(config.data.path, "generated"),
        **_write_blocks(samples, config, making, rejected),
    }
    if config.data.layout == "function_calling":
        report["preprocess"] = json.loads((making / "function_calling" / "report.json").read_text())
    if config.data.layout == "markov_chain":
        report["floor"] = markov.ENTROPY  # nats a token, which no model gets below
    write_json(making / REPORT_FILE, report)


def _walks(config: TrainConfig) -> Iterator[Sample]:
    vocabulary = config.architecture().vocab_size
    if vocabulary < markov.STATES:
        raise UsageError(f"the model's vocabulary of {vocabulary} is smaller than the chain's {markov.STATES} states")
    for walk in markov.generate_sequences(_wanted(config), config.seq_len, config.seed):
        yield walk.tolist(), [True] * config.seq_len


def training_rows(config: TrainConfig) -> Iterable[Mapping[str, Any]]:
    """The rows that are trained on, read or generated. Raises UsageError where they cannot be read."""
    path, layout = config.data.path, config.data.layout
    if path is None:
        wanted = _wanted(config)
        return (
            generate.rows(wanted, config.seed) if layout == "function_calling" else rows.generate(layout, wanted, config.seed)
        )
    repository = hub.hub_repository(path)
    if repository is None:
        return itertools.islice(preprocess.read_rows(Path(path)), config.data.samples)
    with hub.load_errors_explained(path):
        from datasets import load_dataset  # only for the Hub: a local file needs none of it

        return itertools.islice(load_dataset(repository, split="train"), config.data.samples)


def _text_samples(config: TrainConfig, folder: Path, rejected: Counter[str]) -> Iterator[Sample]:
    found: Iterable[Mapping[str, Any]] = list(training_rows(config))
    if config.data.layout == "function_calling":
        preprocess.preprocess(found, folder / "function_calling", config.data.path or "generated")
        found = [conversation.record() for conversation in preprocess.read_split(folder / "function_calling", "train")]
    tokenizer = _tokenizer(config, found)
    tokenization.save(tokenizer, folder / "tokenizer")
    for row in found:
        try:
            sample = _encode(tokenizer, config.data.layout, row)
        except ValueError as error:
            rejected[str(error)] += 1
            continue
        if len(sample[0]) > config.seq_len:
            rejected["longer than seq_len"] += 1
        else:
            yield sample


def _tokenizer(config: TrainConfig, found: Iterable[Mapping[str, Any]]) -> Any:
    vocabulary = config.architecture().vocab_size
    name = tokenization.tokenizer_name(config)
    texts = (json.dumps(row, ensure_ascii=False) for row in found)
    tokenizer = tokenization.load(name) if name else tokenization.train(texts, vocabulary)
    return tokenization.prepare(tokenizer, vocabulary, chat=config.data.layout != "alpaca")


def _encode(tokenizer: Any, layout: str, row: Mapping[str, Any]) -> Sample:
    if layout == "function_calling":
        return template.encode(tokenizer, Conversation(**row))
    if layout == "no_robots":
        return template.encode(tokenizer, rows.conversation(row))
    prompt, output = rows.prompt_and_output(row)
    ids = [*tokenizer(prompt + output)["input_ids"], tokenizer.eos_token_id]
    return ids, [True] * len(ids)  # the prompt too, as the plain fine-tune has it


def _packed(samples: Iterable[Sample], length: int) -> Iterator[Sample]:
    """Whole samples one behind the other, as many as fit into ``length`` tokens."""
    ids: list[int] = []
    trained: list[bool] = []
    for more, mask in samples:
        if ids and len(ids) + len(more) > length:
            yield ids, trained
            ids, trained = [], []
        ids, trained = [*ids, *more], [*trained, False, *mask[1:]]  # nothing before it says how a sample begins
    if ids:
        yield ids, trained


def _write_blocks(
    samples: Iterable[Sample], config: TrainConfig, folder: Path, rejected: Counter[str]
) -> dict[str, Any]:
    taken = 0

    def counted() -> Iterator[Sample]:
        nonlocal taken
        for sample in samples:
            taken += 1
            yield sample

    blocks = list(_packed(counted(), config.seq_len) if config.data.packing else counted())
    if not blocks:
        why = f"rejected: {dict(rejected)}" if rejected else "there are none"
        raise UsageError(f"{config.data.path or 'data'}: no row can be trained on at seq_len {config.seq_len}; {why}")
    inputs = np.zeros((len(blocks), config.seq_len), np.int32)
    labels = np.full_like(inputs, IGNORED_LABEL)
    for number, (ids, trained) in enumerate(blocks):
        inputs[number, : len(ids)] = ids
        labels[number, : len(ids)] = np.where(trained, ids, IGNORED_LABEL)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return {
        "rows": taken + rejected.total(),
        "samples": taken,
        "rejected": dict(rejected),
        "blocks": len(blocks),
        "padding_share": 1 - sum(len(ids) for ids, _ in blocks) / inputs.size,
        "trained_share": float((labels != IGNORED_LABEL).mean()),
    }
