"""The data check: buffers of which every bit is known beforehand, so that one wrong bit shows.

Every element depends on its position and on its rank: blocks in each other's place, a missing or doubled rank, old data
and a flipped bit all differ from what is expected. What is only moved is any finite value of its type. What is added up
is integers whose sums are exact in any order, so that there are few of them: of many ranks only some add to a position,
and others to the next. With bfloat16 these are 8, so that n ranks have had their turn after n/8 positions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import isqrt

import torch

CHUNK_ELEMENTS = (
    2**24
)  # elements whose expected values are held at once: an 8 GiB buffer is checked with 0.5 GiB of scratch
STRIDE = 1_000_000_007  # prime, and no divisor of a period in use: a pattern visits all values of its period
APART = 2_654_435_761  # prime: as far as the patterns of two ranks that follow each other are from one another
_BITS = {2: torch.int16, 4: torch.int32}
# Of what is moved: the largest prime below the number of finite values, so that no block's length has it in it
_PERIODS = {torch.float16: 63_487, torch.bfloat16: 65_269, torch.float32: 4_278_190_079}


@dataclass(frozen=True)
class Mismatch:
    """A buffer that differs from the exact result: how often, and the first place. ``xor``: the bits that differ."""

    wrong: int
    offset: int  # in elements
    expected: str
    got: str
    xor: str


@dataclass(frozen=True)
class ExpectedPart:
    """``length`` elements that must be those of position ``position`` and onwards, of ``rank`` or of all ranks' sum."""

    length: int
    position: int
    rank: int = 0


def fill_input(buffer: torch.Tensor, rank: int, summed_ranks: int) -> None:
    """Write what this rank has to give: other bits than any other rank at each position, and than its neighbours.

    ``added``: the number of ranks whose contributions will be summed up, small integers then, of which no partial sum
    in any order and grouping leaves the integers that the type holds exactly. 1: they are moved as they are, and ranks
    up to 63,486 differ.
    """
    for start, chunk in _chunks(buffer):
        if summed_ranks == 1:
            _as_bits(chunk).copy_(_marks(start, chunk, rank))
        else:
            chunk.copy_(_contributions(start, chunk, rank, summed_ranks))


def fill_with_nan(buffer: torch.Tensor) -> None:
    """Write what no contribution and no sum is anywhere, a NaN: what is not overwritten shows."""
    bits = _as_bits(buffer)
    bits.fill_(torch.iinfo(bits.dtype).max)


def verify(buffer: torch.Tensor, summed_ranks: int, parts: Sequence[ExpectedPart] | None = None) -> Mismatch | None:
    """Compare bit by bit with what ``parts`` say; without them, with the whole. None when all is right."""
    parts = [ExpectedPart(buffer.numel(), 0)] if parts is None else parts
    found, offset = [], 0
    for part in parts:
        found.append(_verify_part(buffer[offset : offset + part.length], summed_ranks, part, offset))
        offset += part.length
    wrong = [mismatch for mismatch in found if mismatch]
    if not wrong:
        return None
    first = wrong[0]
    return Mismatch(sum(one.wrong for one in wrong), first.offset, first.expected, first.got, first.xor)


def _verify_part(buffer: torch.Tensor, added: int, part: ExpectedPart, offset: int) -> Mismatch | None:
    wrong, first = 0, None
    for start, chunk in _chunks(buffer):
        expected = _expected(part.position + start, chunk, added, part.rank)
        differs = _as_bits(chunk) != expected
        count = int(differs.sum())
        if count and first is None:
            first = (offset + start, int(differs.nonzero()[0]), chunk, expected)
        wrong += count
    return _mismatch(wrong, *first) if first else None


def _expected(start: int, chunk: torch.Tensor, added: int, rank: int) -> torch.Tensor:
    """The bits that a chunk must have, as integers."""
    if added == 1:
        return _marks(start, chunk, rank).to(_BITS[chunk.element_size()])
    some, period = _addends(chunk.dtype, added)
    sums = _centred(start, chunk, period).mul_(some).add_(some * (some - 1) // 2)
    return _as_bits(sums.to(chunk.dtype))


def _mismatch(wrong: int, start: int, index: int, got: torch.Tensor, bits: torch.Tensor) -> Mismatch:
    width = 8 * got.element_size()
    xor = int(_as_bits(got)[index] ^ bits[index]) % 2**width
    values = str(bits.view(got.dtype)[index].item()), str(got[index].item())
    return Mismatch(wrong, start + index, *values, xor=f"{xor:#0{width // 4 + 2}x}")


def _marks(start: int, chunk: torch.Tensor, rank: int) -> torch.Tensor:
    """The bits of finite values of either sign, as integers: a NaN would end a process that looks out for them."""
    period, magnitude = _PERIODS[chunk.dtype], 2 ** (8 * chunk.element_size() - 1) - 1
    marks = _positions(start, chunk).mul_(STRIDE).add_(rank * APART).remainder_(period).sub_(period // 2)
    negative = marks >> 63  # all ones
    return marks.bitwise_xor_(negative.bitwise_and_(magnitude))  # two's complement to sign and magnitude


def _contributions(start: int, chunk: torch.Tensor, rank: int, added: int) -> torch.Tensor:
    """A value of the position, one more for each seat; with few ranks the seat is the rank. Without one: nothing."""
    some, period = _addends(chunk.dtype, added)
    if some == added:
        return _centred(start, chunk, period).add_(rank)
    seats = _positions(start, chunk).mul_(-some).add_(rank).remainder_(added)
    return _centred(start, chunk, period).add_(seats).mul_(seats.lt_(some))


def _addends(dtype: torch.dtype, added: int) -> tuple[int, int]:
    """How many ranks add to a position, and how many values positions take.

    Odd, so that shifted blocks, powers of two, differ. The more ranks, the fewer values: here at least four times more.
    """
    exact = int(2 / torch.finfo(dtype).eps)  # every integer up to here has a value of its own
    some = min(added, isqrt(exact) // 2)
    return some, 2 * (exact // some - some + 1) + 1


def _centred(start: int, chunk: torch.Tensor, period: int) -> torch.Tensor:
    """Integers around 0, one an element, that depend on the position alone."""
    return _positions(start, chunk).mul_(STRIDE).remainder_(period).sub_(period // 2)


def _positions(start: int, chunk: torch.Tensor) -> torch.Tensor:
    return torch.arange(start, start + chunk.numel(), dtype=torch.int64, device=chunk.device)


def _chunks(buffer: torch.Tensor) -> Iterator[tuple[int, torch.Tensor]]:
    return ((start, buffer[start : start + CHUNK_ELEMENTS]) for start in range(0, buffer.numel(), CHUNK_ELEMENTS))


def _as_bits(values: torch.Tensor) -> torch.Tensor:
    return values.view(_BITS[values.element_size()])
