"""Memory of a device: bandwidth, and a pattern test of every byte."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial

import psutil
import torch

from seatrial.bench.timing import DeviceTiming, time_on_device

BLOCK_BYTES = 2**28  # compared at once; this needs 1.25 times as much scratch memory, for the pattern and for masks
# All bits 0, all bits 1, 01…01 and 10…10, as in memtest86; a random pattern follows
FIXED_PATTERNS = (0, -1, 0x5555555555555555, -0x5555555555555556)

_Fill = Callable[[torch.Tensor, int], torch.Tensor]  # writes a pattern to a block and returns it; int: block number


@dataclass(frozen=True)
class PatternError:
    """Number of wrong 8-byte ``words`` under a pattern; ``offset`` and differing bits (``xor``) of the first one."""

    pattern: str
    words: int
    offset: int  # in bytes from the start of the tested memory
    xor: str


@dataclass(frozen=True)
class PatternTestResult:
    """The tested ``size`` and the memory that was free before, in bytes; ``errors``: one per failed pattern."""

    size: int
    free_bytes: int
    errors: tuple[PatternError, ...]


def time_copy(size: int, device: str, seconds: float) -> DeviceTiming:
    """Time copies of ``size`` bytes within the device's memory; a copy reads ``size`` bytes and writes as many.

    A CPU's cache also reads each line of the target before it writes to this line (write-allocate). As in STREAM, these
    reads are not counted as moved bytes.
    """
    source, target = _arrays(2, size, device)
    return time_on_device(lambda: target.copy_(source), device, seconds)


def time_triad(size: int, device: str, seconds: float) -> DeviceTiming:
    """Time a = b + s·c for arrays of ``size`` bytes; an operation moves 3 × ``size`` bytes (STREAM, McCalpin)."""
    a, b, c = _arrays(3, size, device)
    return time_on_device(lambda: torch.add(b, c, alpha=3.0, out=a), device, seconds)


def _arrays(count: int, size: int, device: str) -> list[torch.Tensor]:
    """``count`` float32 arrays of ``size`` bytes with random numbers.

    Zeros would take less power. On a CPU, all pages of a new array of zeros map to one page, which stays in the cache.
    """
    return [torch.rand(size // 4, device=device) for _ in range(count)]


def free_bytes(device: str) -> int:
    """Free memory of the GPU, or available memory of the host, in bytes."""
    if device.startswith("cuda"):
        return int(torch.cuda.mem_get_info(device)[0])
    return int(psutil.virtual_memory().available)


def run_pattern_test(size: int, device: str) -> PatternTestResult:
    """Write each pattern to all of ``size`` bytes, then compare. This also detects two addresses of one memory cell.

    Raises torch.OutOfMemoryError (RuntimeError on a CPU) if the memory cannot be allocated.
    """
    free = free_bytes(device)
    full_blocks, last_block_bytes = divmod(size - size % 8, BLOCK_BYTES)
    lengths = [BLOCK_BYTES] * full_blocks + ([last_block_bytes] if last_block_bytes else [])
    blocks = [torch.empty(length // 8, dtype=torch.int64, device=device) for length in lengths]
    errors = [_test_pattern(name, fill, blocks) for name, fill in _patterns(device)]
    return PatternTestResult(sum(block.nbytes for block in blocks), free, tuple(error for error in errors if error))


def _patterns(device: str) -> Iterator[tuple[str, _Fill]]:
    """Yield the name of each pattern with the function that writes it to a block."""
    for word in FIXED_PATTERNS:
        yield f"{word % 2**64:#018x}", partial(_fill_with, word)
    generator = torch.Generator(device)

    def fill_randomly(block: torch.Tensor, number: int) -> torch.Tensor:
        """Words that depend on the block's number, so that blocks at aliased addresses differ."""
        generator.manual_seed(number)
        return block.random_(-(2**63), None, generator=generator)  # the default range leaves the sign bit 0

    yield "random", fill_randomly


def _fill_with(word: int, block: torch.Tensor, _number: int) -> torch.Tensor:
    return block.fill_(word)


def _test_pattern(name: str, fill: _Fill, blocks: Sequence[torch.Tensor]) -> PatternError | None:
    """Write a pattern to all blocks, compare the blocks with it, and return the error; None if no word differs."""
    for number, block in enumerate(blocks):
        fill(block, number)
    expected = torch.empty_like(blocks[0])
    wrong_count, offset, xor = 0, 0, 0  # offset and xor: of the first wrong word
    for number, block in enumerate(blocks):
        pattern = fill(expected[: block.numel()], number)
        differs = block != pattern
        count = int(differs.sum())
        if count and not wrong_count:
            index = int(differs.to(torch.uint8).argmax())  # the first maximum; nonzero() takes 8 times the memory
            offset, xor = number * BLOCK_BYTES + 8 * index, int(block[index] ^ pattern[index]) % 2**64
        wrong_count += count
    return PatternError(name, wrong_count, offset, f"{xor:#018x}") if wrong_count else None
