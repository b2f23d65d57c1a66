"""A device's own memory: how fast, and does every byte keep what was written to it?"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from seatrial.bench.timing import DeviceTiming, time_on_device

BLOCK_BYTES = 2**28  # bytes that are compared at a time: the comparison needs an eighth of that as scratch
# All bits clear, all set, and neighbours unlike in both phases (as memtest86's fixed patterns); the random one follows.
FIXED_PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)

_Fill = Callable[[torch.Tensor, int], torch.Tensor]  # writes a pattern to a block, by its number


@dataclass(frozen=True)
class PatternError:
    """``words`` of 8 bytes that did not keep a pattern, and the first of them; ``xor``: the bits that differ."""

    pattern: str
    words: int
    offset: int  # in bytes from the start of what was tested
    xor: str


@dataclass(frozen=True)
class PatternTestResult:
    """What a pattern test covered, in bytes, and what it found."""

    size: int
    free_bytes: int
    errors: tuple[PatternError, ...]


def time_copy(size: int, device: str, seconds: float) -> DeviceTiming:
    """Time copies of ``size`` bytes within the device's memory: each moves twice as many, a read and a write.

    What a CPU's cache reads of lines that are only written is not counted, as in STREAM.
    """
    source, target = _arrays(2, size, device)
    return time_on_device(lambda: target.copy_(source), device, seconds)


def time_triad(size: int, device: str, seconds: float) -> DeviceTiming:
    """Time a = b + s·c over arrays of ``size`` bytes: three times as many are moved (STREAM, McCalpin)."""
    a, b, c = _arrays(3, size, device)
    return time_on_device(lambda: torch.add(b, c, alpha=3.0, out=a), device, seconds)


def _arrays(count: int, size: int, device: str) -> list[torch.Tensor]:
    """Random data: zeros take less power, and on a CPU a fresh array of them is one page, read from the cache."""
    return [torch.rand(size // 4, device=device) for _ in range(count)]


def free_bytes(device: str) -> int:
    """Memory that can be had now: of the GPU, or of the host."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def run_pattern_test(size: int, device: str) -> PatternTestResult:
    """Write each pattern to all of ``size`` bytes, then read all of them: a bit that two addresses share shows too.

    Raises torch.OutOfMemoryError (RuntimeError on a CPU) when so much cannot be had.
    """
    free = free_bytes(device)
    whole, rest = divmod(size - size % 8, BLOCK_BYTES)
    lengths = [BLOCK_BYTES] * whole + [rest] * (rest > 0)
    blocks = [torch.empty(length // 8, dtype=torch.int64, device=device) for length in lengths]
    wrong = [found for name, fill in _patterns(device) for found in _test(name, fill, blocks)]
    return PatternTestResult(sum(block.nbytes for block in blocks), free, tuple(wrong))


def _patterns(device: str) -> Iterator[tuple[str, _Fill]]:
    for word in FIXED_PATTERNS:
        yield f"{word % 2**64:#018x}", partial(_fill_with, word)
    generator = torch.Generator(device)

    def fill_randomly(block: torch.Tensor, number: int) -> torch.Tensor:
        """Words that depend on the place: what one address line too few would write over, differs."""
        generator.manual_seed(number)
        return block.random_(-(2**63), None, generator=generator)  # by default the sign bit stays clear

    yield "random", fill_randomly


def _fill_with(word: int, block: torch.Tensor, _number: int) -> torch.Tensor:
    return block.fill_(word)


def _test(name: str, fill: _Fill, blocks: Sequence[torch.Tensor]) -> Iterator[PatternError]:
    for number, block in enumerate(blocks):
        fill(block, number)
    expected = torch.empty_like(blocks[0])
    words, first = 0, None
    for number, block in enumerate(blocks):
        right = fill(expected[: block.numel()], number)
        differs = block != right
        count = int(differs.sum())
        if count and first is None:
            index = int(differs.to(torch.uint8).argmax())  # of several largest the first; nonzero() takes 8 times more
            first = (number * BLOCK_BYTES + 8 * index, int(block[index] ^ right[index]) % 2**64)
        words += count
    if first:
        yield PatternError(name, words, first[0], f"{first[1]:#018x}")
