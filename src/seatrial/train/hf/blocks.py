"""Converts rows to blocks of tokens, for stack hf. Needs numpy and transformers, but no torch.

A block has ``seq_len`` tokens with padding at its end. Blocks have no attention mask, since with causal attention no
token sees later padding, and without a mask SDPA uses its flash kernel. Packed samples are not separated: a
sample attends to the samples before it in its block.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from seatrial.model import UsageError
from seatrial.train import data_cache
from seatrial.train.blocks import IGNORE_INDEX
from seatrial.train.function_calling import generate, preprocess, template
from seatrial.train.function_calling.glaive import Conversation
from seatrial.train.hf import hub, rows, tokenization
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json

REPORT_FILE = "report.json"
GENERATED_ROWS = 1000  # default of data.samples for generated rows: as many as the SmolLM workload has

Sample = tuple[list[int], list[bool]]  # an encoded row: tokens, and for each token whether it has a loss


def prepare(config: TrainConfig, folder: Path) -> data_cache.Prepared:
    """The location of the blocks, in ``folder`` or SEATRIAL_DATA_CACHE.

    Not called for the layout markov_chain, which has no rows. Missing blocks are written to ``folder``, from data.path
    or from generated rows. Raises UsageError if rows or tokenizer cannot be read, OSError or DiskFullError if the
    blocks cannot be written.
    """
    tokenizer = tokenization.tokenizer_name(config)
    local = [Path(name) for name in (config.data.path, tokenizer) if name and hub.hub_repository(name) is None]
    read_key, write_files = partial(_key, config, tokenizer), partial(_write_files, config)
    return data_cache.prepare(config, folder, config.data.layout, local, read_key, write_files)


def report(folder: Path) -> dict[str, Any]:
    """The content of report.json: numbers of rows, rejected rows and blocks, shares of padding and trained tokens."""
    content: dict[str, Any] = json.loads((folder / REPORT_FILE).read_text())
    return content


def print_rejected(content: Mapping[str, Any]) -> None:
    """Print the number of rejected rows by reason, since nothing else in the output shows it.

    ``content``: the content of report.json.
    """
    for counts in (content, content.get("preprocess", {})):
        if rejected := counts.get("rejected"):
            message = f"{sum(rejected.values()):,} of {counts['rows']:,} rows are not used: {_reasons(rejected)}"
            print(message, file=sys.stderr)


def _reasons(rejected: Mapping[str, int]) -> str:
    return ", ".join(f"{reason} ({count:,})" for reason, count in sorted(rejected.items()))


def _key(config: TrainConfig, tokenizer: str | None) -> data_cache.Key:
    """Everything that determines the blocks. A Hub repository is in it by name, since its content is not known."""
    data = config.data

    def content(name: str, description: str) -> Any:
        return name if hub.hub_repository(name) else data_cache.content_hashes(Path(name), description)

    tokenizer_content: Any = tokenizer or "trained"
    if tokenizer and (hub.hub_repository(tokenizer) or Path(tokenizer).exists()):  # else tokenization.load fails later
        tokenizer_content = content(tokenizer, "the tokenizer")
    return {
        **data_cache.common_key(config, "tokenizers", "transformers"),
        "layout": data.layout,
        "packing": data.packing,
        "samples": data.samples or (GENERATED_ROWS if data.path is None else None),
        "template": hashlib.sha256(template.chat_template().encode()).hexdigest(),
        "data": content(data.path, "the data") if data.path else {"generated with seed": str(config.seed)},
        "tokenizer": tokenizer_content,
    }


def _write_files(config: TrainConfig, folder: Path) -> None:
    rejected: Counter[str] = Counter()
    record = {
        "data": hub.source_label(config.data.path, "generated"),
        **write_blocks(_encoded_rows(config, folder, rejected), config, folder, rejected),
    }
    if config.data.layout == "function_calling":
        record["preprocess"] = json.loads((folder / "function_calling" / "report.json").read_text())
    write_json(folder / REPORT_FILE, record)


def training_rows(config: TrainConfig) -> Iterable[Mapping[str, Any]]:
    """The training rows, read or generated. Raises UsageError, also during iteration, if they cannot be read."""
    path, layout = config.data.path, config.data.layout
    if path is None:
        count = config.data.samples or GENERATED_ROWS
        if layout == "function_calling":
            return generate.conversations(count, config.seed)
        return rows.generate_rows(layout, count, config.seed)
    repository = hub.hub_repository(path)
    if repository is None:
        return itertools.islice(preprocess.read_rows(Path(path)), config.data.samples)
    with hub.explain_load_errors(path):
        from datasets import load_dataset  # only needed for the Hub

        return itertools.islice(load_dataset(repository, split="train"), config.data.samples)


def _encoded_rows(config: TrainConfig, folder: Path, rejected: Counter[str]) -> Iterator[Sample]:
    """Yield the encoded rows that fit into ``seq_len``; count the others in ``rejected`` by reason."""
    train_rows: Iterable[Mapping[str, Any]] = list(training_rows(config))
    if config.data.layout == "function_calling":
        preprocess.preprocess(train_rows, folder / "function_calling", config.data.path or "generated")
        train_rows = [
            conversation.record() for conversation in preprocess.read_split(folder / "function_calling", "train")
        ]
    vocabulary, name = config.architecture().vocab_size, tokenization.tokenizer_name(config)
    texts = (json.dumps(row, ensure_ascii=False) for row in train_rows)
    tokenizer = tokenization.load(name) if name else tokenization.train(texts, vocabulary)
    tokenizer = tokenization.prepare(tokenizer, vocabulary, chat=config.data.layout != "alpaca")
    tokenizer.save_pretrained(folder / "tokenizer")
    for row in train_rows:
        try:
            sample = _encode(tokenizer, config.data.layout, row)
        except ValueError as error:
            rejected[str(error)] += 1
            continue
        tokens, _ = sample
        if len(tokens) > config.seq_len:
            rejected["longer than seq_len"] += 1
        else:
            yield sample


def _encode(tokenizer: Any, layout: str, row: Mapping[str, Any]) -> Sample:
    if layout == "function_calling":
        return template.encode(tokenizer, Conversation(**row))
    if layout == "no_robots":
        return template.encode(tokenizer, rows.conversation(row))
    prompt, output = rows.prompt_and_output(row)
    ids = [*tokenizer(prompt + output)["input_ids"], tokenizer.eos_token_id]
    return ids, [True] * len(ids)  # alpaca: the loss includes the prompt


def _pack(samples: Iterable[Sample], length: int) -> Iterator[Sample]:
    """Yield blocks; each contains as many whole samples as fit into ``length`` tokens."""
    ids: list[int] = []
    trained: list[bool] = []
    for sample_ids, sample_trained in samples:
        if ids and len(ids) + len(sample_ids) > length:
            yield ids, trained
            ids, trained = [], []
        # no loss on the first token of a sample, which the previous sample does not predict
        ids, trained = [*ids, *sample_ids], [*trained, False, *sample_trained[1:]]
    if ids:
        yield ids, trained


def write_blocks(
    samples: Iterable[Sample], config: TrainConfig, folder: Path, rejected: Counter[str]
) -> dict[str, Any]:
    """Write the blocks of ``samples`` to ``folder``; return the counts for report.json, including ``rejected``."""
    samples = list(samples)
    blocks = list(_pack(samples, config.seq_len)) if config.data.packing else samples
    if not blocks:
        source = config.data.path or "generated data"
        rejections = f"rejected: {_reasons(rejected)}. Increase seq_len or check the rows"
        reason = rejections if rejected else "the data set has no rows"
        raise UsageError(f"{source}: 0 usable rows at seq_len {config.seq_len}; {reason}")
    inputs = np.zeros((len(blocks), config.seq_len), np.int32)
    labels = np.full_like(inputs, IGNORE_INDEX)
    for number, (ids, trained) in enumerate(blocks):
        inputs[number, : len(ids)] = ids
        labels[number, : len(ids)] = np.where(trained, ids, IGNORE_INDEX)
    np.save(folder / "inputs.npy", inputs)
    np.save(folder / "labels.npy", labels)
    return {
        "rows": len(samples) + rejected.total(),
        "samples": len(samples),
        "rejected": dict(rejected),
        "blocks": len(blocks),
        "padding_share": 1 - sum(len(ids) for ids, _ in blocks) / inputs.size,
        "trained_share": float((labels != IGNORE_INDEX).mean()),
    }
