"""The token blocks of stack hf: rank 0 writes the files once, all ranks read them."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from seatrial.train import data_cache, markov, ranks
from seatrial.train.hf import blocks, tokenization
from seatrial.train.hf.blocks import REPORT_FILE, Sample
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json


class Blocks(Dataset[dict[str, Tensor]]):
    """The blocks as dataset of transformers' Trainer, memory-mapped. Raises SeatrialError for a damaged file."""

    def __init__(self, folder: Path) -> None:
        with data_cache.convert_read_errors(folder):
            self._inputs = np.load(folder / "inputs.npy", mmap_mode="r")
            self._labels = np.load(folder / "labels.npy", mmap_mode="r")

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

    All ranks must call this. Raises SeatrialError on all ranks if rank 0 fails. Nodes that do not share the folder: see
    ranks.prepared_folder.
    """
    cache = Path(config.data.cache) if config.data.cache else out / "data"
    generates_markov = config.data.layout == "markov_chain"
    folder = ranks.prepared_folder(config, cache, _prepare_markov if generates_markov else blocks.prepare)
    tokenizer = None if generates_markov else tokenization.load(str(folder / "tokenizer"))
    prepared = PreparedData(folder, Blocks(folder), tokenizer, blocks.report(folder))
    if ranks.rank() == 0:
        blocks.print_rejected(prepared.report)
    return prepared


def _prepare_markov(config: TrainConfig, cache: Path) -> data_cache.Prepared:
    """Write the sequences to a folder in ``cache`` if it is missing; by default one per trained block: none repeats."""
    count = config.data.samples or config.max_steps * config.bsz * config.grad_accum * ranks.world_size()
    key = [count, config.data.packing, config.seq_len, config.seed, markov.require_vocabulary(config)]

    def write_files(temporary: Path) -> None:
        sequences = markov.generate_sequences(count, config.seq_len, config.seed).tolist()
        samples: list[Sample] = [(sequence, [True] * config.seq_len) for sequence in sequences]
        report = blocks.write_blocks(samples, config, temporary, Counter())
        # entropy_bound in nats per token: the lowest possible loss
        write_json(temporary / REPORT_FILE, {"data": "generated", **report, "entropy_bound": markov.ENTROPY})

    return data_cache.prepare_generated(cache, "markov_chain", key, write_files)
