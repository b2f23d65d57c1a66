"""The data check: buffers of integers whose sums are exact in any order, so that one wrong bit shows.

Every element depends on its position, every rank adds a number of its own: blocks in each other's place, a missing or
doubled rank, old data and a flipped bit all differ from what is expected.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from seatrial.model import UsageError

CHUNK = 2**24  # elements whose expected values are held at once: an 8 GiB buffer is checked with 0.5 GiB of scratch
STRIDE = 1_000_000_007  # prime and above every period in use, so that a pattern visits all values of its period
_BITS = {2: torch.int16, 4: torch.int32}


@dataclass(frozen=True)
class Mismatch:
    """A buffer that differs from the exact result: how often, and the first place. ``xor``: the bits that differ."""

    wrong: int
    offset: int  # in elements
    expected: str
    got: str
    xor: str


@dataclass(frozen=True)
class Part:
    """``length`` elements that must be those of the given ``ranks`` summed, of position ``position`` and onwards."""

    length: int
    position: int
    ranks: tuple[int, ...]


def fill(buffer: torch.Tensor, rank: int, ranks: int) -> None:
    """Write this rank's contribution: integers that differ by rank and position, small enough to sum exactly.

    In any order and grouping, no partial sum over ``ranks`` leaves the integers that the type holds exactly.
    Raises UsageError where so many ranks leave no such integers.
    """
    period, shifts = _pattern(buffer.dtype, ranks)
    for start, chunk in _chunks(buffer):
        chunk.copy_(_positions(start, chunk, period).add_(rank % shifts))


def verify(buffer: torch.Tensor, ranks: int, parts: Sequence[Part] | None = None) -> Mismatch | None:
    """Compare bit by bit with what ``parts`` say; without them, with the sum over all ranks. None when all is right."""
    parts = [Part(buffer.numel(), 0, tuple(range(ranks)))] if parts is None else parts
    found, offset = [], 0
    for part in parts:
        found.append(_verify_part(buffer[offset : offset + part.length], ranks, part, offset))
        offset += part.length
    wrong = [mismatch for mismatch in found if mismatch]
    if not wrong:
        return None
    first = wrong[0]
    return Mismatch(sum(one.wrong for one in wrong), first.offset, first.expected, first.got, first.xor)


def _verify_part(buffer: torch.Tensor, ranks: int, part: Part, offset: int) -> Mismatch | None:
    period, shifts = _pattern(buffer.dtype, ranks)
    shift = sum(rank % shifts for rank in part.ranks)
    wrong, first = 0, None
    for start, chunk in _chunks(buffer):
        positions = _positions(part.position + start, chunk, period)
        expected = positions.mul_(len(part.ranks)).add_(shift).to(chunk.dtype)
        differs = _as_bits(chunk) != _as_bits(expected)
        count = int(differs.sum())
        if count and first is None:
            first = (offset + start, int(differs.nonzero()[0]), chunk, expected)
        wrong += count
    return _mismatch(wrong, *first) if first else None


def _mismatch(wrong: int, start: int, index: int, got: torch.Tensor, expected: torch.Tensor) -> Mismatch:
    width = 8 * got.element_size()
    xor = int(_as_bits(got)[index] ^ _as_bits(expected)[index]) % 2**width
    values = str(expected[index].item()), str(got[index].item())
    return Mismatch(wrong, start + index, *values, xor=f"{xor:#0{width // 4 + 2}x}")


def _pattern(dtype: torch.dtype, ranks: int) -> tuple[int, int]:
    """The number of values that positions take (odd, so that shifted blocks, powers of two, differ) and ranks take."""
    exact = int(2 / torch.finfo(dtype).eps)  # every integer up to here has a value of its own
    largest = exact // ranks
    if not largest:
        raise UsageError(f"the data check sums integers exactly, and {dtype} holds none for {ranks} ranks: use float32")
    shifts = min(ranks, largest // 2 + 1)
    return 2 * (largest - shifts + 1) + 1, shifts


def _positions(start: int, chunk: torch.Tensor, period: int) -> torch.Tensor:
    """Integers around 0, one an element, that depend on the position alone."""
    position = torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=chunk.device)
    return position.mul_(STRIDE).remainder_(period).sub_(period // 2)


def _chunks(buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return ((start, buffer[start : start + CHUNK]) for start in range(0, buffer.numel(), CHUNK))


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.element_size()])
