"""The token blocks of stack hf: rank 0 writes the files once, all ranks read them."""

from __future__ import annotations

import hashlib
import json
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from seatrial.model import SeatrialError, UsageError
from seatrial.train import data_cache, markov
from seatrial.train.disk import atomic_write_folder
from seatrial.train.hf import blocks, ranks, tokenization
from seatrial.train.hf.blocks import REPORT_FILE, Sample
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json


class Blocks(Dataset[dict[str, Tensor]]):
    """The blocks as dataset of transformers' Trainer, memory-mapped. Raises SeatrialError for a damaged file."""

    def __init__(self, folder: Path) -> None:
        try:
            self._inputs = np.load(folder / "inputs.npy", mmap_mode="r")
            self._labels = np.load(folder / "labels.npy", mmap_mode="r")
        except (OSError, ValueError, EOFError) as error:
            raise SeatrialError(
                f"cannot read the prepared data in {folder}: {error}. Remove this directory; it is written again"
            ) from error

    def __len__(self) -> int:
        return len(self._inputs)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        block = {"input_ids": self._inputs[index], "labels": self._labels[index]}
        return {name: torch.from_numpy(tokens.astype(np.int64)) for name, tokens in block.items()}


@dataclass(frozen=True)
class PreparedData:
    """Blocks, tokenizer and ``report`` (see blocks.report)."""

    folder: Path
    blocks: Blocks
    tokenizer: Any  # None for markov_chain, whose tokens are states
    report: dict[str, Any]


def prepare(config: TrainConfig, out: Path) -> PreparedData:
    """The blocks for ``config``, from data.cache, ``out``/data or SEATRIAL_DATA_CACHE; if missing, rank 0 writes them.

    All ranks must call this. Raises SeatrialError on all ranks if rank 0 fails, UsageError on a rank that does not see
    the folder of rank 0.
    """
    cache = Path(config.data.cache) if config.data.cache else out / "data"
    if config.data.layout == "markov_chain":
        folder = cache / _markov_folder_name(config)
        ranks.run_on_rank0(lambda: _write_markov(config, folder), folder)
        _write_markov(config, folder)  # a node that does not share the folder writes the same sequences
        return load(config, folder)
    on_rank0: list[data_cache.Prepared] = []  # on the other ranks it stays empty
    ranks.run_on_rank0(lambda: on_rank0.append(blocks.prepare(config, cache)), cache)
    folder = ranks.gather(on_rank0[0].folder if on_rank0 else cache)[0]
    if not folder.exists():
        raise UsageError(
            f"{folder} does not exist on rank {ranks.rank()}: set data.cache to a directory that all nodes share"
        )
    prepared = load(config, folder)
    if ranks.rank() == 0:
        if on_rank0[0].message:
            print(on_rank0[0].message, file=sys.stderr)
        blocks.print_rejected(prepared.report)
    return prepared


def load(config: TrainConfig, folder: Path) -> PreparedData:
    """The prepared data in ``folder``."""
    tokenizer = None if config.data.layout == "markov_chain" else tokenization.load(str(folder / "tokenizer"))
    return PreparedData(folder, Blocks(folder), tokenizer, blocks.report(folder))


def _markov_folder_name(config: TrainConfig) -> str:
    key = [
        _markov_sequences(config),
        config.data.packing,
        config.seq_len,
        config.seed,
        config.architecture().vocab_size,
    ]
    return f"markov_chain-{hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]}"


def _markov_sequences(config: TrainConfig) -> int:
    """Number of generated sequences: by default one per trained block, so that no block repeats."""
    return config.data.samples or config.max_steps * config.bsz * config.grad_accum * ranks.world_size()


def _write_markov(config: TrainConfig, folder: Path) -> None:
    if folder.exists():
        return
    with atomic_write_folder(folder) as temporary:
        report = blocks.write_blocks(_markov_samples(config), config, temporary, Counter())
        # entropy_bound in nats per token: the lowest possible loss
        write_json(temporary / REPORT_FILE, {"data": "generated", **report, "entropy_bound": markov.ENTROPY})


def _markov_samples(config: TrainConfig) -> Iterator[Sample]:
    vocabulary = config.architecture().vocab_size
    if vocabulary < markov.STATES:
        raise UsageError(
            f"the model's vocabulary of {vocabulary} tokens is smaller than the {markov.STATES} states of markov_chain"
        )
    for sequence in markov.generate_sequences(_markov_sequences(config), config.seq_len, config.seed):
        yield sequence.tolist(), [True] * config.seq_len
