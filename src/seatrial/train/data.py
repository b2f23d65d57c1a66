"""Token blocks to train on: rank 0 writes them once, atomically; each rank trains on different blocks."""

from __future__ import annotations

import hashlib
import json
import mmap
import socket
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seatrial.model import SeatrialError, UsageError
from seatrial.train import disk, markov, page_cache
from seatrial.train.disk import atomic_write_folder
from seatrial.train.loss import IGNORE_INDEX
from seatrial.train.train_config import TrainConfig
from seatrial.util.files import write_json
from seatrial.util.input_files import read_json

BLOCKS_FILE, INFO_FILE = "blocks.npy", "dataset.json"
DEFAULT_SEQUENCES = 4096  # without data.samples; an acceptance run reads each sequence at most twice


@dataclass(frozen=True)
class DatasetInfo:
    """Description of the blocks. ``rows``: rows read, or sequences generated.

    ``entropy_bound``: lowest possible loss in nats per token, None if unknown. ``details``: with stack hf, the number
    of rejected rows by reason and the fraction of padding.
    """

    source: str
    rows: int
    tokens: int
    vocabulary: int
    entropy_bound: float | None = None
    details: dict[str, Any] | None = None


@dataclass(frozen=True)
class Blocks:
    """``tokens``: int32 [blocks, seq_len + 1], memory-mapped; inputs and targets overlap by seq_len - 1 tokens.

    Shorter sequences are padded with IGNORE_INDEX. ``cached_share``: with data.cold, the share of the file that was in
    the page cache of some node before the training, 0 to 1.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    info: DatasetInfo
    cached_share: float | None = None

    def __len__(self) -> int:
        return len(self.tokens)

    def batch(self, indices: list[int]) -> Tensor:
        """The blocks at ``indices``: int64 [len(indices), seq_len + 1], on the CPU."""
        return torch.from_numpy(self.tokens[indices].astype(np.int64))


def prepare(settings: TrainConfig, folder: Path, is_rank0: bool, gather: Callable[[Any], list[Any]]) -> Blocks:
    """The blocks for ``settings``, from the cache ``folder``; rank 0 writes them there if they are missing.

    All ranks call this; ``gather`` is a barrier that returns the values of all ranks. All ranks raise UsageError if the
    data cannot be read, SeatrialError if the blocks cannot be written, with rank 0's message. A node that does not
    share ``folder`` generates Markov data itself, and raises UsageError for rows of a file.
    """
    blocks_folder = folder / f"blocks-{_fingerprint(settings)}"
    problem: SeatrialError | None = None
    if is_rank0:
        try:
            if not (blocks_folder / INFO_FILE).is_file():
                _write_blocks(settings, blocks_folder)
        except SeatrialError as error:  # raised below: the other ranks wait in gather
            problem = error
        except (OSError, MemoryError) as error:
            action = f"cannot write the prepared data to {folder}"
            problem = disk.disk_full_error(error, folder, action)
            problem = problem or SeatrialError(f"{action}: {error or 'out of memory'}")
            problem.__cause__ = error
    for rank_problem in gather(problem):
        if rank_problem is not None:
            raise rank_problem
    if not (blocks_folder / INFO_FILE).is_file():
        if settings.data.path is not None:
            raise UsageError(
                f"{socket.gethostname()} cannot read {blocks_folder}: set data.cache to a folder shared by all nodes"
            )
        _write_blocks(settings, blocks_folder)
    blocks = _load_blocks(blocks_folder)
    if not settings.data.cold:
        return blocks
    _disable_readahead(blocks.tokens)
    gather(None)  # all ranks have read the header of the file
    page_cache.evict(blocks_folder / BLOCKS_FILE)
    gather(None)
    return replace(blocks, cached_share=max(gather(page_cache.cached_share(blocks_folder / BLOCKS_FILE))))


def _fingerprint(settings: TrainConfig) -> str:
    """16 hex digits of a SHA-256 over all settings that determine the blocks, and size and mtime of the input files."""
    data = settings.data
    vocabulary = settings.model.architecture().vocab_size
    inputs: list[Any] = [data.samples, data.variable_length, settings.seq_len, vocabulary, settings.seed]
    for path in (data.path, data.tokenizer):
        if path is not None and Path(path).is_file():
            inputs.append((str(Path(path).resolve()), Path(path).stat().st_size, Path(path).stat().st_mtime_ns))
        else:
            inputs.append(path)
    return hashlib.sha256(json.dumps(inputs).encode()).hexdigest()[:16]


def _write_blocks(settings: TrainConfig, blocks_folder: Path) -> None:
    blocks = generate_blocks(settings) if settings.data.path is None else _tokenize_rows(settings)
    with atomic_write_folder(blocks_folder) as temporary:
        np.save(temporary / BLOCKS_FILE, blocks.tokens)
        write_json(temporary / INFO_FILE, asdict(blocks.info))


def _load_blocks(blocks_folder: Path) -> Blocks:
    try:
        info = DatasetInfo(**read_json(blocks_folder / INFO_FILE))
        return Blocks(np.load(blocks_folder / BLOCKS_FILE, mmap_mode="r"), info)
    except (OSError, ValueError, TypeError) as error:
        raise SeatrialError(f"cannot read the prepared data in {blocks_folder}: {error}") from error


def _disable_readahead(tokens: np.ndarray[Any, Any]) -> None:
    """Let each block be read when it is used: without this, the kernel reads the blocks around it too."""
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


def _tokenize_rows(settings: TrainConfig) -> Blocks:
    """The tokens of all rows, concatenated with end tokens and cut into blocks of seq_len + 1."""
    from seatrial.train import text

    path = Path(settings.data.path or "")
    rows = text.read_rows(path, settings.data.samples)
    vocabulary = settings.model.architecture().vocab_size
    encoder = text.load_tokenizer(settings.data.tokenizer, rows, vocabulary)
    tokens = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in text.encode(encoder, rows)])
    length = settings.seq_len + 1
    if len(tokens) < length:
        raise UsageError(f"{path}: {len(tokens)} tokens, fewer than one sequence of {length}")
    if tokens.max() >= vocabulary:
        raise UsageError(f"{settings.data.tokenizer}: token id {tokens.max()} exceeds the vocab_size {vocabulary}")
    blocks = tokens[: len(tokens) // length * length].reshape(-1, length)
    info = DatasetInfo(source=str(path), rows=len(rows), tokens=blocks[:, 1:].size, vocabulary=vocabulary)
    return Blocks(blocks, info)


def block_order(blocks: int, rank: int, ranks: int, seed: int, skip: int = 0) -> Iterator[int]:
    """Endless block indices for ``rank``, after ``skip`` indices: every ``ranks``-th of a new permutation per epoch.

    An epoch reads no block twice. The last ``blocks % ranks`` of each permutation are dropped, so that all ranks read
    equally many. Raises UsageError if there are fewer blocks than ranks.
    """
    per_rank = blocks // ranks
    if per_rank == 0:
        raise UsageError(f"{blocks} sequences for {ranks} ranks: expected at least one per rank")
    epoch, offset = divmod(skip, per_rank)
    while True:
        generator = torch.Generator().manual_seed((seed << 16) + epoch & 0xFFFFFFFF)
        permutation = torch.randperm(blocks, generator=generator)
        yield from permutation[: per_rank * ranks][rank::ranks].tolist()[offset:]
        epoch, offset = epoch + 1, 0


def epochs_completed(steps: int, per_step: int, blocks: int, ranks: int) -> float:
    """The number of epochs, with fractions, after ``steps`` steps of ``per_step`` blocks per rank."""
    return steps * per_step / max(1, blocks // ranks)
