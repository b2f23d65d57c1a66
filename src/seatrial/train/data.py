"""Token blocks for stack native: rank 0 writes them once, atomically; each rank trains on different blocks."""

from __future__ import annotations

import hashlib
import json
import mmap
import socket
import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seatrial.model import SeatrialError, UsageError
from seatrial.train import blocks, data_cache, disk, markov, page_cache
from seatrial.train.blocks import BLOCKS_FILE, IGNORE_INDEX, INFO_FILE, DatasetInfo
from seatrial.train.disk import atomic_write_folder
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


def prepare(settings: TrainConfig, folder: Path, is_rank_0: bool, gather: Callable[[Any], list[Any]]) -> Blocks:
    """The blocks for ``settings``, from ``folder`` or SEATRIAL_DATA_CACHE; rank 0 writes missing ones to ``folder``.

    All ranks call this; ``gather`` is a barrier that returns the values of all ranks. If rank 0 fails, all ranks raise
    its error: UsageError if the data cannot be read, SeatrialError if the blocks cannot be written. On a node that does
    not share ``folder``, the ranks generate Markov data themselves; with data from a file they raise UsageError.
    """
    rank0_result: Path | SeatrialError | None = None
    if is_rank_0:
        try:
            prepared = _prepare(settings, folder)
            if prepared.message:
                print(prepared.message, file=sys.stderr)
            rank0_result = prepared.folder
        except SeatrialError as error:  # raised below: the other ranks wait in gather
            rank0_result = error
        except (OSError, MemoryError) as error:
            action = f"cannot write the prepared data to {folder}"
            failure = disk.disk_full_error(error, folder, action)
            rank0_result = failure or SeatrialError(f"{action}: {str(error) or 'out of memory'}")
            rank0_result.__cause__ = error
    blocks_folder = gather(rank0_result)[0]
    if isinstance(blocks_folder, SeatrialError):
        raise blocks_folder
    if blocks_folder is None or not (blocks_folder / INFO_FILE).is_file():
        if settings.data.path is not None:
            raise UsageError(
                f"{socket.gethostname()} cannot read {blocks_folder}: set data.cache to a directory shared by all nodes"
            )
        blocks_folder = _prepare(settings, folder).folder
    loaded = _load_blocks(blocks_folder)
    if not settings.data.cold:
        return loaded
    _disable_readahead(loaded.tokens)
    gather(None)  # a barrier: evict only after all ranks have read the header of the file
    page_cache.evict(blocks_folder / BLOCKS_FILE)
    gather(None)
    return replace(loaded, cached_share=max(gather(page_cache.cached_share(blocks_folder / BLOCKS_FILE))))


def _prepare(settings: TrainConfig, folder: Path) -> data_cache.Prepared:
    """Writes the prepared data if it is missing; called on rank 0, and by ranks that do not see rank 0's folder."""
    if settings.data.path is not None:
        return blocks.prepare(settings, folder)
    key = [
        settings.data.samples,
        settings.data.variable_length,
        settings.seq_len,
        settings.seed,
        settings.model.architecture().vocab_size,
    ]
    digest = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:16]
    markov_folder = folder / f"{blocks.PREFIX}-{digest}"
    if not markov_folder.is_dir():
        generated = generate_blocks(settings)
        with atomic_write_folder(markov_folder) as temporary:
            np.save(temporary / BLOCKS_FILE, generated.tokens)
            write_json(temporary / INFO_FILE, asdict(generated.info))
    return data_cache.Prepared(markov_folder, hit=False, message="")


def _load_blocks(blocks_folder: Path) -> Blocks:
    try:
        info = DatasetInfo(**read_json(blocks_folder / INFO_FILE))
        tokens = np.load(blocks_folder / BLOCKS_FILE, mmap_mode="r")
        if tokens.ndim != 2 or not tokens.size:
            raise ValueError(f"{BLOCKS_FILE} has the shape {tokens.shape}, expected (blocks, seq_len + 1)")
        return Blocks(tokens, info)
    except (OSError, ValueError, TypeError, EOFError) as error:
        raise SeatrialError(
            f"cannot read the prepared data in {blocks_folder}: {error}. Remove this directory; it is written again"
        ) from error


def _disable_readahead(tokens: np.ndarray[Any, Any]) -> None:
    """Make the kernel read only the block that is used; by default the kernel also reads neighbouring blocks."""
    buffer: Any = tokens
    while not isinstance(buffer, mmap.mmap):
        buffer = buffer.base
    buffer.madvise(mmap.MADV_RANDOM)


def generate_blocks(settings: TrainConfig) -> Blocks:
    """Sequences of the Markov chain, in memory, identical on every rank.

    Raises UsageError if the model's vocabulary is smaller than the number of states.
    """
    vocabulary = settings.model.architecture().vocab_size
    if vocabulary < markov.STATES:
        raise UsageError(f"vocab_size {vocabulary}: expected at least {markov.STATES} for generated data")
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


def block_order(blocks: int, rank: int, ranks: int, seed: int, skip: int = 0) -> Iterator[int]:
    """Endless block indices for ``rank``, without the first ``skip`` indices.

    Each epoch has a new permutation of all blocks, of which a rank reads every ``ranks``-th block. An epoch reads no
    block twice. The last ``blocks % ranks`` blocks of a permutation are dropped, so that all ranks read the same
    number. Raises UsageError if there are fewer blocks than ranks.
    """
    per_rank = blocks // ranks
    if per_rank == 0:
        raise UsageError(f"{blocks} sequences for {ranks} ranks: expected at least one per rank")
    epoch, offset = divmod(skip, per_rank)
    while True:
        generator = torch.Generator().manual_seed(((seed << 16) + epoch) & 0xFFFFFFFF)
        permutation = torch.randperm(blocks, generator=generator)
        yield from permutation[: per_rank * ranks][rank::ranks].tolist()[offset:]
        epoch, offset = epoch + 1, 0


def epochs_completed(steps: int, blocks_per_step: int, blocks: int, ranks: int) -> float:
    """The number of epochs, with fractions, after ``steps`` steps of ``blocks_per_step`` blocks per rank."""
    return steps * blocks_per_step / max(1, blocks // ranks)
