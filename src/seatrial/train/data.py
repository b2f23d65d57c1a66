"""Token blocks for stack native: rank 0 writes them once, atomically; each rank trains on different blocks."""

from __future__ import annotations

import mmap
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seatrial.model import UsageError
from seatrial.train import blocks, data_cache, markov, page_cache, ranks
from seatrial.train.blocks import BLOCKS_FILE, IGNORE_INDEX, INFO_FILE, DatasetInfo
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json
from seatrial.util.input_files import read_json

# Number of generated sequences if data.samples is not set: an acceptance run reads each at most twice
DEFAULT_SEQUENCES = 4096


@dataclass(frozen=True)
class Blocks:
    """``tokens``: int32 [blocks, seq_len + 1], memory-mapped if read from a file.

    The first seq_len tokens of a block are inputs, the last seq_len tokens are targets. Shorter sequences are padded
    with IGNORE_INDEX. ``cached_share``: with data.cold, the share of the file, 0 to 1, that is still in the page cache
    after its eviction and before training starts; the largest value of all nodes.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    info: DatasetInfo
    cached_share: float | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: list[int]) -> Tensor:
        """The blocks at ``indices``: int64 [len(indices), seq_len + 1], on the CPU."""
        return torch.from_numpy(self.tokens[indices].astype(np.int64))


def prepare(settings: TrainConfig, folder: Path) -> Blocks:
    """The blocks for ``settings``, from ``folder`` or SEATRIAL_DATA_CACHE; rank 0 writes missing ones to ``folder``.

    All ranks call this. If rank 0 fails, all ranks raise its error: UsageError if the data cannot be read,
    SeatrialError if the blocks cannot be written. See ranks.prepared_folder for nodes that do not share ``folder``.
    """
    blocks_folder = ranks.prepared_folder(settings, folder, _prepare)
    with data_cache.convert_read_errors(blocks_folder):
        tokens = np.load(blocks_folder / BLOCKS_FILE, mmap_mode="r")
        if tokens.ndim != 2 or not tokens.size:
            raise ValueError(f"{BLOCKS_FILE} has the shape {tokens.shape}, expected (blocks, seq_len + 1)")
        loaded = Blocks(tokens, DatasetInfo(**read_json(blocks_folder / INFO_FILE)))
    if not settings.data.cold:
        return loaded
    buffer: Any = tokens
    while not isinstance(buffer, mmap.mmap):
        buffer = buffer.base
    buffer.madvise(mmap.MADV_RANDOM)  # without it the kernel also reads the blocks beside the used one
    ranks.gather(None)  # a barrier: evict only after all ranks have read the header of the file
    page_cache.evict(blocks_folder / BLOCKS_FILE)
    ranks.gather(None)
    return replace(loaded, cached_share=max(ranks.gather(page_cache.cached_share(blocks_folder / BLOCKS_FILE))))


def _prepare(settings: TrainConfig, folder: Path) -> data_cache.Prepared:
    """Writes the prepared data if it is missing."""
    if settings.data.path is not None:
        return blocks.prepare(settings, folder)
    key = [
        settings.data.samples,
        settings.data.variable_length,
        settings.seq_len,
        settings.seed,
        settings.model.architecture().vocab_size,
    ]

    def write_files(temporary: Path) -> None:
        generated = generate_blocks(settings)
        np.save(temporary / BLOCKS_FILE, generated.tokens)
        write_json(temporary / INFO_FILE, asdict(generated.info))

    return data_cache.prepare_generated(folder, blocks.PREFIX, key, write_files)


def generate_blocks(settings: TrainConfig) -> Blocks:
    """Sequences of the Markov chain, in memory, identical on every rank; UsageError for a too small vocabulary."""
    vocabulary = markov.require_vocabulary(settings)
    count = settings.data.samples or DEFAULT_SEQUENCES
    sequences = markov.generate_sequences(count, settings.seq_len + 1, settings.seed).numpy().astype(np.int32)
    if settings.data.variable_length:
        lengths = np.random.default_rng(settings.seed).integers(1, settings.seq_len, count, endpoint=True)
        sequences[np.arange(settings.seq_len + 1) > lengths[:, None]] = IGNORE_INDEX
    info = DatasetInfo(
        source=f"generated: a Markov chain of {markov.STATES} states, entropy {markov.ENTROPY:.4f} nats/token",
        rows=count,
        tokens=int((sequences[:, 1:] != IGNORE_INDEX).sum()),
        vocabulary=vocabulary,
        entropy_bound=markov.ENTROPY,
    )
    return Blocks(sequences, info)


def block_order(blocks: int, rank: int, world_size: int, seed: int, skip: int = 0) -> Iterator[int]:
    """Endless block indices for ``rank``, without the first ``skip`` indices.

    Each epoch has a new permutation of all blocks, of which a rank reads every ``world_size``-th block. An epoch reads
    no block twice. The last ``blocks % world_size`` blocks of a permutation are dropped, so that all ranks read the
    same number. Raises UsageError if there are fewer blocks than ranks.
    """
    per_rank = blocks // world_size
    if per_rank == 0:
        raise UsageError(f"{blocks} sequences for {world_size} ranks: expected at least one per rank")
    epoch, offset = divmod(skip, per_rank)
    while True:
        generator = torch.Generator().manual_seed(((seed << 16) + epoch) & 0xFFFFFFFF)
        permutation = torch.randperm(blocks, generator=generator)
        yield from permutation[: per_rank * world_size][rank::world_size].tolist()[offset:]
        epoch, offset = epoch + 1, 0
