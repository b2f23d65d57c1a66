"""Token blocks to train on: made once, by rank 0, whole or not at all; then read by every rank, each its own share."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from seatrial.model import SeatrialError, UsageError
from seatrial.train import markov
from seatrial.train.files import whole_folder, write_json
from seatrial.train.loss import IGNORED
from seatrial.train.settings import TrainConfig

BLOCKS, FACTS = "blocks.npy", "facts.json"
GENERATED = 4096  # sequences, where nobody says how many: more than any acceptance run reads twice


@dataclass(frozen=True)
class Facts:
    """What the blocks are, for the record. ``floor``: nats a token that no model gets below, where that is known.

    ``details``: stack hf's own report, with rows rejected by reason and shares of padding.
    """

    source: str
    rows: int
    tokens: int
    vocabulary: int
    floor: float | None = None
    details: dict[str, Any] | None = None


@dataclass(frozen=True)
class Blocks:
    """``tokens``: int32 [blocks, seq_len + 1], read from disk as they are used. Each is a sequence and its targets.

    Behind the end of a shorter sequence there is IGNORED.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    facts: Facts

    def __len__(self) -> int:
        return len(self.tokens)

    def take(self, chosen: list[int]) -> Tensor:
        """int64 [len(chosen), seq_len + 1], on the CPU."""
        return torch.from_numpy(self.tokens[chosen].astype(np.int64))


def prepare(settings: TrainConfig, folder: Path, first: bool, gather: Callable[[Any], list[Any]]) -> Blocks:
    """The blocks that ``settings`` describe: made by the ``first`` rank where no other run has left them in ``folder``.

    All ranks call this; ``gather`` waits for all, and returns what each has handed it. Where data cannot be read, all
    raise UsageError, and SeatrialError where it cannot be kept, with the first rank's words.
    """
    place = folder / f"blocks-{_fingerprint(settings)}"
    problem: SeatrialError | None = None
    if first:
        try:
            if not (place / FACTS).is_file():
                _make(settings, place)
        except SeatrialError as error:  # the others wait: they must not do so for ever
            problem = error
        except (OSError, MemoryError) as error:
            problem = SeatrialError(f"cannot keep the prepared data in {folder}: {error or 'out of memory'}")
            problem.__cause__ = error
    for told in gather(problem):
        if told is not None:
            raise told
    return _load(place)


def _fingerprint(settings: TrainConfig) -> str:
    """Of everything that the blocks depend on, the file's size and time among it."""
    data = settings.data
    vocabulary = settings.model.architecture().vocab_size
    said: list[Any] = [data.samples, data.unequal, settings.seq_len, vocabulary, settings.seed]
    for path in (data.path, data.tokenizer):
        if path is not None and Path(path).is_file():
            said.append((str(Path(path).resolve()), Path(path).stat().st_size, Path(path).stat().st_mtime_ns))
        else:
            said.append(path)
    return hashlib.sha256(json.dumps(said).encode()).hexdigest()[:16]


def _make(settings: TrainConfig, place: Path) -> None:
    blocks, facts = _generated(settings) if settings.data.path is None else _from_rows(settings)
    with whole_folder(place) as making:
        np.save(making / BLOCKS, blocks)
        write_json(making / FACTS, asdict(facts))


def _load(place: Path) -> Blocks:
    try:
        facts = Facts(**json.loads((place / FACTS).read_text(encoding="utf-8")))
        return Blocks(np.load(place / BLOCKS, mmap_mode="r"), facts)
    except (OSError, ValueError, TypeError) as error:
        raise SeatrialError(f"the prepared data in {place} cannot be read: {error}") from error


def _generated(settings: TrainConfig) -> tuple[np.ndarray[Any, Any], Facts]:
    vocabulary = settings.model.architecture().vocab_size
    if vocabulary < markov.STATES:
        raise UsageError(f"generated data has {markov.STATES} words, the model knows {vocabulary}")
    count = settings.data.samples or GENERATED
    walks = markov.sequences(count, settings.seq_len + 1, settings.seed).numpy().astype(np.int32)
    if settings.data.unequal:
        lengths = np.random.default_rng(settings.seed).integers(1, settings.seq_len, count, endpoint=True)
        walks[np.arange(settings.seq_len + 1) > lengths[:, None]] = IGNORED
    facts = Facts(
        source=f"generated: a Markov chain of {markov.STATES} states, entropy {markov.ENTROPY:.4f} nats/token",
        rows=count,
        tokens=int((walks[:, 1:] != IGNORED).sum()),
        vocabulary=vocabulary,
        floor=markov.ENTROPY,
    )
    return walks, facts


def _from_rows(settings: TrainConfig) -> tuple[np.ndarray[Any, Any], Facts]:
    """The rows' tokens one behind the other, each row ended by a token of its own, cut into blocks."""
    from seatrial.train import text

    path = Path(settings.data.path or "")
    rows = text.read(path, settings.data.samples)
    vocabulary = settings.model.architecture().vocab_size
    encoder = text.tokenizer(settings.data.tokenizer, rows, vocabulary)
    tokens = np.concatenate([np.asarray(ids, dtype=np.int32) for ids in text.encode(encoder, rows)])
    length = settings.seq_len + 1
    if len(tokens) < length:
        raise UsageError(f"{path}: {len(tokens)} tokens in all, fewer than one sequence of {length}")
    if tokens.max() >= vocabulary:
        raise UsageError(f"{settings.data.tokenizer} makes token {tokens.max()}, the model knows {vocabulary}")
    blocks = tokens[: len(tokens) // length * length].reshape(-1, length)
    return blocks, Facts(source=str(path), rows=len(rows), tokens=blocks[:, 1:].size, vocabulary=vocabulary)


def order(blocks: int, rank: int, ranks: int, seed: int, skip: int = 0) -> Iterator[int]:
    """The blocks that ``rank`` reads, for ever, less the first ``skip``: a new permutation each epoch, dealt in turn.

    In an epoch no block is read twice; the last ``blocks % ranks`` of each permutation are left out, so that all ranks
    read as many. With fewer blocks than ranks, raises UsageError.
    """
    each = blocks // ranks
    if each == 0:
        raise UsageError(f"{blocks} sequences for {ranks} ranks: each needs at least one")
    epoch, done = divmod(skip, each)
    while True:
        generator = torch.Generator().manual_seed((seed << 16) + epoch & 0xFFFFFFFF)
        dealt = torch.randperm(blocks, generator=generator)[: each * ranks][rank::ranks].tolist()
        yield from dealt[done:]
        epoch, done = epoch + 1, 0


def epoch_after(steps: int, per_step: int, blocks: int, ranks: int) -> float:
    """How often each block has been read, after ``steps`` of ``per_step`` blocks a rank."""
    return steps * per_step / max(1, math.floor(blocks / ranks))
