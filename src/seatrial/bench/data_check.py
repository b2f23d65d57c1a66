"""The data check: input patterns with a known exact result, compared bit by bit.

Every element depends on its position and its rank, so that the check detects swapped blocks, a missing or duplicated
rank, stale data and a flipped bit. Operations that only move data get arbitrary finite values. Operations that sum get
integers whose sum is exact in any order. This limits how many ranks can contribute to one position (8 in bfloat16).
With n ranks, different groups of 8 ranks contribute to successive positions, so that all ranks have contributed after
n/8 positions. A rank has zeros at the positions to which it does not contribute.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import isqrt

import torch

CHUNK_ELEMENTS = 2**24  # elements that are filled or verified at once; limits the scratch memory to 0.5 GiB
STRIDE = 1_000_000_007  # prime and coprime to every period, so that a pattern takes all values of its period
RANK_STRIDE = 2_654_435_761  # prime: the distance between the patterns of consecutive ranks
_INTEGERS = {2: torch.int16, 4: torch.int32}  # item size in bytes → type
# Periods of moved data: the largest prime below the number of finite values. Blocks at different positions differ if
# their distance is no multiple of the period. Block lengths are often powers of two, which are no multiples of a prime
_PERIODS = {torch.float16: 63_487, torch.bfloat16: 65_269, torch.float32: 4_278_190_079}


@dataclass(frozen=True)
class Mismatch:
    """The wrong elements of a buffer: number, and offset, values and differing bits (``xor``) of the first one."""

    wrong: int  # elements
    offset: int  # in elements
    expected: str
    got: str
    xor: str


@dataclass(frozen=True)
class ExpectedPart:
    """Expected content of ``length`` elements: a pattern from its element ``position`` on.

    The pattern is that of ``rank`` if the operation only moves data, otherwise the sum over the ranks.
    """

    length: int
    position: int
    rank: int = 0


def fill_input(buffer: torch.Tensor, rank: int, summed_ranks: int) -> None:
    """Fill ``buffer`` with the input pattern of ``rank``; neighbouring elements and different ranks differ.

    ``summed_ranks``: number of ranks whose inputs the operation sums. If it is 1, data is only moved, and the patterns
    of up to 63,486 ranks differ.
    """
    for start, chunk in _chunks(buffer):
        if summed_ranks == 1:
            _as_integers(chunk).copy_(_moved_pattern(start, chunk, rank))
        else:
            chunk.copy_(_summand_pattern(start, chunk, rank, summed_ranks))


def fill_with_nan(buffer: torch.Tensor) -> None:
    """Fill ``buffer`` with NaN. No expected result contains NaN, so that elements that are never written are found."""
    integers = _as_integers(buffer)
    integers.fill_(torch.iinfo(integers.dtype).max)


def verify(buffer: torch.Tensor, summed_ranks: int, parts: Sequence[ExpectedPart] | None = None) -> Mismatch | None:
    """Compare ``buffer`` bit by bit with ``parts`` (default: the sum over all ranks); None if all bits are equal."""
    parts = [ExpectedPart(buffer.numel(), 0)] if parts is None else parts
    wrong_elements, first_mismatch, offset = 0, None, 0
    for part in parts:
        for start, chunk in _chunks(buffer[offset : offset + part.length]):
            expected = _expected_integers(part.position + start, chunk, summed_ranks, part.rank)
            differs = _as_integers(chunk) != expected
            count = int(differs.sum())
            if count and first_mismatch is None:
                first_mismatch = _mismatch_at(int(differs.nonzero()[0]), chunk, expected, offset + start)
            wrong_elements += count
        offset += part.length
    return replace(first_mismatch, wrong=wrong_elements) if first_mismatch else None


def _expected_integers(start: int, chunk: torch.Tensor, summed_ranks: int, rank: int) -> torch.Tensor:
    if summed_ranks == 1:
        return _moved_pattern(start, chunk, rank).to(_INTEGERS[chunk.element_size()])
    contributors, period = _contributors_and_period(chunk.dtype, summed_ranks)
    sum_of_slots = contributors * (contributors - 1) // 2  # of 0, 1, …; see _summand_pattern
    sums = _position_values(start, chunk, period).mul_(contributors).add_(sum_of_slots)
    return _as_integers(sums.to(chunk.dtype))


def _mismatch_at(index: int, chunk: torch.Tensor, expected_integers: torch.Tensor, offset: int) -> Mismatch:
    """The wrong element ``index`` of ``chunk``; ``offset``: the chunk's first element in the whole buffer."""
    bits = 8 * chunk.element_size()
    xor = int(_as_integers(chunk)[index] ^ expected_integers[index]) % 2**bits
    return Mismatch(
        wrong=1,
        offset=offset + index,
        expected=str(expected_integers.view(chunk.dtype)[index].item()),
        got=str(chunk[index].item()),
        xor=f"{xor:#0{bits // 4 + 2}x}",
    )


def _moved_pattern(start: int, chunk: torch.Tensor, rank: int) -> torch.Tensor:
    """Bits of finite values of either sign, as integers; no NaN, since TORCH_NCCL_NAN_CHECK=1 would end the process."""
    period, magnitude = _PERIODS[chunk.dtype], 2 ** (8 * chunk.element_size() - 1) - 1
    values = _positions(start, chunk).mul_(STRIDE).add_(rank * RANK_STRIDE).remainder_(period).sub_(period // 2)
    sign_mask = values >> 63  # all ones if negative
    return values.bitwise_xor_(sign_mask.bitwise_and_(magnitude))  # two's complement to sign and magnitude


def _summand_pattern(start: int, chunk: torch.Tensor, rank: int, summed_ranks: int) -> torch.Tensor:
    """The position's value plus the rank's slot (0, 1, …) there; 0 if the rank does not contribute to the position."""
    contributors, period = _contributors_and_period(chunk.dtype, summed_ranks)
    if contributors == summed_ranks:
        return _position_values(start, chunk, period).add_(rank)
    slots = _positions(start, chunk).mul_(-contributors).add_(rank).remainder_(summed_ranks)
    return _position_values(start, chunk, period).add_(slots).mul_(slots.lt_(contributors))


def _contributors_and_period(dtype: torch.dtype, summed_ranks: int) -> tuple[int, int]:
    """(number of ranks that contribute to a position, number of different position values).

    The period is odd, so that blocks shifted by a power of two differ. More contributors leave fewer values; the period
    is at least four times the number of contributors.
    """
    exact = int(2 / torch.finfo(dtype).eps)  # the type represents every integer up to this one
    contributors = min(summed_ranks, isqrt(exact) // 2)
    return contributors, 2 * (exact // contributors - contributors + 1) + 1


def _position_values(start: int, chunk: torch.Tensor, period: int) -> torch.Tensor:
    """Integers around 0 that depend on the position only, one per element."""
    return _positions(start, chunk).mul_(STRIDE).remainder_(period).sub_(period // 2)


def _positions(start: int, chunk: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=chunk.device)


def _chunks(buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return ((start, buffer[start : start + CHUNK_ELEMENTS]) for start in range(0, buffer.numel(), CHUNK_ELEMENTS))


def _as_integers(values: torch.Tensor) -> torch.Tensor:
    return values.view(_INTEGERS[values.element_size()])
