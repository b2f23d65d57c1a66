from __future__ import annotations

import numpy as np
import pytest
import torch

from seatrial.bench import data_check
from seatrial.bench.data_check import ExpectedPart, fill_input, fill_with_nan, verify

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def summed(ranks: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What an all-reduce leaves, by adding up the ranks' buffers one after another in their own type."""
    total = torch.zeros(count, dtype=dtype)
    for rank in range(ranks):
        mine = torch.empty(count, dtype=dtype)
        fill_input(mine, rank, ranks)
        total += mine
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 64, 1000])
def test_the_exact_sum_is_right_in_any_order(dtype: torch.dtype, ranks: int) -> None:
    assert verify(summed(ranks, 1001, dtype), ranks) is None


def contributions(ranks: int, count: int, dtype: torch.dtype) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """What each rank has to add, by rank and position; float32 holds all values of the other types."""
    filled = np.empty((ranks, count), dtype=np.float32)
    mine = torch.empty(count, dtype=dtype)
    for rank in range(ranks):
        fill_input(mine, rank, ranks)
        filled[rank] = mine.float().numpy()
    return filled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 64, 256, 4096])
def test_no_partial_sum_can_round(dtype: torch.dtype, ranks: int) -> None:
    magnitude = np.abs(contributions(ranks, 2048, dtype)).sum(axis=0, dtype=np.float64)
    assert 0 < magnitude.max() <= 2 / torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 8, 9, 16, 64, 100, 256, 1024, 4096])
def test_no_rank_of_a_sum_can_be_left_out_or_stand_for_another(dtype: torch.dtype, ranks: int) -> None:
    """Each adds something within 2,048 positions, and no two add the same."""
    filled = contributions(ranks, 2048, dtype)
    assert filled.any(axis=1).all()
    assert len({row.tobytes() for row in filled}) == ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [16, 128, 4096])
def test_what_is_moved_differs_between_all_ranks_at_every_position(dtype: torch.dtype, ranks: int) -> None:
    filled = torch.empty((ranks, 64), dtype=dtype)
    for rank in range(ranks):
        fill_input(filled[rank], rank, 1)
    bits = filled.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
    assert all(len(set(column)) == ranks for column in bits.T.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_moved_has_every_bit_both_ways(dtype: torch.dtype) -> None:
    mine = torch.empty(100_000, dtype=dtype)
    fill_input(mine, 3, 1)
    assert mine.isfinite().all()
    bits = mine.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
    assert np.bitwise_or.reduce(bits) == -1
    assert np.bitwise_and.reduce(bits) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("added", [1, 2, 300])
def test_what_is_not_overwritten_is_wrong_everywhere(dtype: torch.dtype, added: int) -> None:
    buffer = torch.empty(70_000, dtype=dtype)  # more than all bits of two bytes
    fill_with_nan(buffer)
    assert buffer.isnan().all()
    found = verify(buffer, added, [ExpectedPart(70_000, 0, rank=1)])
    assert found
    assert (found.wrong, found.got) == (70_000, "nan")


def test_contributions_differ_by_rank_and_position() -> None:
    buffers = [torch.empty(100_000) for _ in range(8)]
    for rank, buffer in enumerate(buffers):
        fill_input(buffer, rank, 8)
    assert len(set(buffers[0].tolist())) == 100_000
    assert len({buffer[0].item() for buffer in buffers}) == 8
    assert (buffers[0] < 0).any()
    assert (buffers[0] > 0).any()


@pytest.mark.parametrize("bit", range(32))
def test_any_flipped_bit_is_found_and_named(bit: int) -> None:
    buffer = summed(4, 1000, torch.float32)
    expected = buffer[613].item()
    bits = buffer.numpy().view(np.uint32)
    bits[613] ^= np.uint32(1 << bit)
    found = verify(buffer, 4)
    assert found
    assert (found.wrong, found.offset, found.xor) == (1, 613, f"0x{1 << bit:08x}")
    assert (found.expected, found.got) == (str(expected), str(buffer[613].item()))


def test_a_sign_bit_of_half_precision_and_nan_are_found() -> None:
    buffer = summed(2, 64, torch.bfloat16)
    buffer[9] *= -1
    buffer[40:] = float("nan")
    found = verify(buffer, 2)
    assert found
    assert (found.wrong, found.offset, found.xor) == (25, 9, "0x8000")


def test_even_the_sign_of_zero_counts() -> None:
    buffer = summed(3, 200, torch.bfloat16)
    zero = buffer.tolist().index(0)
    buffer[zero] = -0.0
    found = verify(buffer, 3)
    assert found
    assert (found.offset, found.xor) == (zero, "0x8000")


def test_chunks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = summed(3, 1000, torch.float32)
    monkeypatch.setattr(data_check, "CHUNK_ELEMENTS", 64)
    assert torch.equal(summed(3, 1000, torch.float32), whole)
    whole[130] += 1
    whole[999] += 1
    found = verify(whole, 3)
    assert found
    assert (found.wrong, found.offset) == (2, 130)


@pytest.mark.parametrize("block", [2**power for power in range(1, 14)])
def test_blocks_in_each_others_place_are_found(block: int) -> None:
    buffer = summed(4, 2**14, torch.float32)
    assert verify(torch.cat([buffer[block : 2 * block], buffer[:block], buffer[2 * block :]]), 4)


def test_a_missing_or_doubled_rank_is_found() -> None:
    assert verify(summed(4, 100, torch.float32) * 3 / 4, 4)
    own = torch.empty(100)
    fill_input(own, 2, 4)
    other = torch.empty(100)
    fill_input(other, 3, 4)
    assert verify(summed(4, 100, torch.float32) - own + other, 4)


def test_parts_are_verified_each_by_its_own_ranks_and_positions() -> None:
    mine = torch.empty(90)
    fill_input(mine, 2, 1)
    blocks = [ExpectedPart(30, 30, 2), ExpectedPart(30, 0, 2)]
    gathered = torch.cat([mine[30:60], mine[:30]])
    assert verify(gathered, 1, blocks) is None
    gathered.view(torch.int32)[41] ^= 1 << 7
    found = verify(gathered, 1, blocks)
    assert found
    assert (found.wrong, found.offset) == (1, 41)
    assert verify(torch.cat([mine[:30], mine[30:60]]), 1, blocks), "blocks in each other's place"
    assert verify(torch.cat([mine[30:60], mine[:30]]), 1, [ExpectedPart(30, 30, 2), ExpectedPart(30, 0, 1)]), (
        "of another rank"
    )
    assert verify(gathered, 1, []) is None, "where nothing is received, nothing is wrong"
