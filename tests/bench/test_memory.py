from __future__ import annotations

from typing import Any

import pytest
import torch

from seatrial.bench import memory
from seatrial.bench.memory import FIXED_PATTERNS, PatternError, run_pattern_test, time_copy, time_triad

WORDS = 512  # per block
FAULTY_BLOCK, INDEX = 2, 77


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK_BYTES", 8 * WORDS)


class FlippedBit:
    """``fill``, flipping one bit of a block after all blocks are written."""

    def __init__(self, fill: Any, bit: int, blocks: int) -> None:
        self.fill, self.bit, self.blocks, self.written = fill, bit, blocks, list[torch.Tensor]()

    def __call__(self, block: torch.Tensor, number: int) -> torch.Tensor:
        filled: torch.Tensor = self.fill(block, number)
        if len(self.written) < self.blocks:
            self.written.append(block)
            if len(self.written) == self.blocks:
                self.written[FAULTY_BLOCK][INDEX] ^= -(2**63) if self.bit == 63 else 1 << self.bit
        return filled


def flip(monkeypatch: pytest.MonkeyPatch, pattern: str, bit: int, blocks: int) -> None:
    real = memory._patterns
    monkeypatch.setattr(
        memory,
        "_patterns",
        lambda device: (
            (name, FlippedBit(fill, bit, blocks) if name == pattern else fill) for name, fill in real(device)
        ),
    )


def test_good_memory_has_no_errors() -> None:
    result = run_pattern_test(4 * 8 * WORDS + 8 * 3 + 5, "cpu")
    assert result.errors == ()
    assert result.size == 4 * 8 * WORDS + 8 * 3
    assert result.free_bytes > result.size


@pytest.mark.parametrize("bit", [0, 31, 63])
@pytest.mark.parametrize("pattern", ["0x0000000000000000", "0xffffffffffffffff", "0x5555555555555555", "random"])
def test_flipped_bit_is_found_with_its_offset(pattern: str, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(monkeypatch, pattern, bit, blocks=4)
    offset = 8 * (FAULTY_BLOCK * WORDS + INDEX)
    assert run_pattern_test(4 * 8 * WORDS, "cpu").errors == (PatternError(pattern, 1, offset, f"{1 << bit:#018x}"),)


def test_first_offset_and_number_of_wrong_words(monkeypatch: pytest.MonkeyPatch) -> None:
    real = memory._fill_with

    def faulty(word: int, block: torch.Tensor, number: int) -> torch.Tensor:
        real(word, block, number)
        if len(calls) < 3 and word == 0:
            block[9:12] = 4
        calls.append(number)
        return block

    calls: list[int] = []
    monkeypatch.setattr(memory, "_fill_with", faulty)
    assert run_pattern_test(3 * 8 * WORDS, "cpu").errors == (PatternError("0x0000000000000000", 9, 72, f"{4:#018x}"),)


def test_aliased_blocks_are_found_by_the_random_pattern(monkeypatch: pytest.MonkeyPatch) -> None:
    """A missing address line: blocks 0 and 2 are the same memory."""
    real, made = torch.empty, list[torch.Tensor]()

    def empty(count: int, **options: Any) -> torch.Tensor:
        made.append(made[0] if len(made) == 2 else real(count, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    (error,) = run_pattern_test(4 * 8 * WORDS, "cpu").errors
    assert (error.pattern, error.offset) == ("random", 0)
    assert error.words == WORDS


def test_patterns_have_every_bit_0_and_1() -> None:
    for bit in range(64):
        assert {word >> bit & 1 for word in FIXED_PATTERNS} == {0, 1}
    words = dict(memory._patterns("cpu"))["random"](torch.empty(4096, dtype=torch.int64), 3)
    assert 0.4 < float((words < 0).double().mean()) < 0.6


def test_random_words_depend_on_the_block_and_are_reproducible() -> None:
    fill = dict(memory._patterns("cpu"))["random"]
    first, other, repeated = (fill(torch.empty(64, dtype=torch.int64), number).clone() for number in (1, 2, 1))
    assert torch.equal(first, repeated)
    assert not torch.equal(first, other)


@pytest.mark.parametrize("time_it", [time_copy, time_triad])
def test_bandwidth_is_measured_on_random_data(time_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """New arrays of zeros on a CPU share one page, so reading them would measure the cache."""
    real, made = torch.rand, list[torch.Tensor]()

    def rand(count: int, **options: Any) -> torch.Tensor:
        made.append(real(count, **options))
        return made[-1]

    monkeypatch.setattr(torch, "rand", rand)
    assert time_it(2**20, "cpu", 0.05).median > 0
    assert [array.nbytes for array in made] == [2**20] * (2 if time_it is time_copy else 3)
