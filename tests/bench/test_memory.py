from __future__ import annotations

from typing import Any

import pytest
import torch

from seatrial.bench import memory
from seatrial.bench.memory import FIXED_PATTERNS, PatternError, run_pattern_test, time_copy, time_triad

WORDS = 512  # of a block
VICTIM, INDEX = 2, 77


@pytest.fixture(autouse=True)
def small_blocks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "BLOCK_BYTES", 8 * WORDS)


class Flipping:
    """``fill`` with a bit of one block that does not keep what was written: it flips once all is written."""

    def __init__(self, fill: Any, bit: int, blocks: int) -> None:
        self.fill, self.bit, self.blocks, self.written = fill, bit, blocks, list[torch.Tensor]()

    def __call__(self, block: torch.Tensor, number: int) -> torch.Tensor:
        filled: torch.Tensor = self.fill(block, number)
        if len(self.written) < self.blocks:
            self.written.append(block)
            if len(self.written) == self.blocks:
                self.written[VICTIM][INDEX] ^= -(2**63) if self.bit == 63 else 1 << self.bit
        return filled


def flip(monkeypatch: pytest.MonkeyPatch, pattern: str, bit: int, blocks: int) -> None:
    real = memory._patterns
    monkeypatch.setattr(
        memory,
        "_patterns",
        lambda device: (
            (name, Flipping(fill, bit, blocks) if name == pattern else fill) for name, fill in real(device)
        ),
    )


def test_good_memory_keeps_everything_to_the_last_word() -> None:
    tested = run_pattern_test(4 * 8 * WORDS + 8 * 3 + 5, "cpu")
    assert tested.errors == ()
    assert tested.size == 4 * 8 * WORDS + 8 * 3
    assert tested.free_bytes > tested.size


@pytest.mark.parametrize("bit", [0, 31, 63])
@pytest.mark.parametrize("pattern", ["0x0000000000000000", "0xffffffffffffffff", "0x5555555555555555", "random"])
def test_a_flipped_bit_is_found_and_placed(pattern: str, bit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    flip(monkeypatch, pattern, bit, blocks=4)
    offset = 8 * (VICTIM * WORDS + INDEX)
    assert run_pattern_test(4 * 8 * WORDS, "cpu").errors == (PatternError(pattern, 1, offset, f"{1 << bit:#018x}"),)


def test_the_first_of_several_and_their_number_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_two_addresses_for_one_word_are_found_by_the_random_pattern_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """An address line too few: block 0 and block 2 are the same memory."""
    real, made = torch.empty, list[torch.Tensor]()

    def empty(count: int, **options: Any) -> torch.Tensor:
        made.append(made[0] if len(made) == 2 else real(count, **options))
        return made[-1]

    monkeypatch.setattr(torch, "empty", empty)
    (wrong,) = run_pattern_test(4 * 8 * WORDS, "cpu").errors
    assert (wrong.pattern, wrong.offset) == ("random", 0)
    assert wrong.words == WORDS


def test_patterns_have_every_bit_both_ways() -> None:
    for bit in range(64):
        assert {word >> bit & 1 for word in FIXED_PATTERNS} == {0, 1}
    words = dict(memory._patterns("cpu"))["random"](torch.empty(4096, dtype=torch.int64), 3)
    assert 0.4 < float((words < 0).double().mean()) < 0.6


def test_random_words_depend_on_the_block_and_come_again() -> None:
    fill = dict(memory._patterns("cpu"))["random"]
    one, other, again = (fill(torch.empty(64, dtype=torch.int64), number).clone() for number in (1, 2, 1))
    assert torch.equal(one, again)
    assert not torch.equal(one, other)


@pytest.mark.parametrize("time_it", [time_copy, time_triad])
def test_bandwidth_is_measured_on_data_that_was_written(time_it: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh zeros on a CPU are all one page: reading them measures the cache."""
    real, made = torch.rand, list[torch.Tensor]()

    def rand(count: int, **options: Any) -> torch.Tensor:
        made.append(real(count, **options))
        return made[-1]

    monkeypatch.setattr(torch, "rand", rand)
    assert time_it(2**20, "cpu", 0.05).median > 0
    assert [array.nbytes for array in made] == [2**20] * (2 if time_it is time_copy else 3)
