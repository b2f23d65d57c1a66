from __future__ import annotations

import numpy as np
import pytest
import torch

from seatrial.bench import data_check
from seatrial.bench.data_check import ExpectedPart, fill_input, fill_with_nan, verify

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def sum_of_inputs(ranks: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """Result of an all-reduce: the sum of the ranks' inputs, in their type."""
    total = torch.zeros(count, dtype=dtype)
    for rank in range(ranks):
        buffer = torch.empty(count, dtype=dtype)
        fill_input(buffer, rank, ranks)
        total += buffer
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 64, 1000])
def test_sum_is_verified(dtype: torch.dtype, ranks: int) -> None:
    assert verify(sum_of_inputs(ranks, 1001, dtype), ranks) is None


def all_inputs(ranks: int, count: int, dtype: torch.dtype) -> np.ndarray[tuple[int, int], np.dtype[np.float32]]:
    """Inputs by rank and position; float32 represents all values of the other types."""
    filled = np.empty((ranks, count), dtype=np.float32)
    buffer = torch.empty(count, dtype=dtype)
    for rank in range(ranks):
        fill_input(buffer, rank, ranks)
        filled[rank] = buffer.float().numpy()
    return filled


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 9, 64, 256, 4096])
def test_partial_sums_are_exact(dtype: torch.dtype, ranks: int) -> None:
    magnitude = np.abs(all_inputs(ranks, 2048, dtype)).sum(axis=0, dtype=np.float64)
    assert 0 < magnitude.max() <= 2 / torch.finfo(dtype).eps


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 8, 9, 16, 64, 100, 256, 1024, 4096])
def test_inputs_of_a_sum_differ_between_all_ranks(dtype: torch.dtype, ranks: int) -> None:
    """Every rank contributes within 2,048 positions, and no two ranks contribute the same."""
    filled = all_inputs(ranks, 2048, dtype)
    assert filled.any(axis=1).all()
    assert len({row.tobytes() for row in filled}) == ranks


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [16, 128, 4096])
def test_moved_data_differs_between_all_ranks_at_every_position(dtype: torch.dtype, ranks: int) -> None:
    filled = torch.empty((ranks, 64), dtype=dtype)
    for rank in range(ranks):
        fill_input(filled[rank], rank, 1)
    bits = filled.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
    assert all(len(set(column)) == ranks for column in bits.T.tolist())


@pytest.mark.parametrize("dtype", DTYPES)
def test_moved_data_has_every_bit_0_and_1(dtype: torch.dtype) -> None:
    buffer = torch.empty(100_000, dtype=dtype)
    fill_input(buffer, 3, 1)
    assert buffer.isfinite().all()
    bits = buffer.view(torch.int16 if dtype.itemsize == 2 else torch.int32).numpy()
    assert np.bitwise_or.reduce(bits) == -1
    assert np.bitwise_and.reduce(bits) == 0


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("summed_ranks", [1, 2, 300])
def test_data_that_is_not_overwritten_is_wrong_everywhere(dtype: torch.dtype, summed_ranks: int) -> None:
    buffer = torch.empty(70_000, dtype=dtype)  # more elements than 2-byte values
    fill_with_nan(buffer)
    assert buffer.isnan().all()
    mismatch = verify(buffer, summed_ranks, [ExpectedPart(70_000, 0, rank=1)])
    assert mismatch
    assert (mismatch.wrong, mismatch.got) == (70_000, "nan")


def test_inputs_differ_by_rank_and_position() -> None:
    buffers = [torch.empty(100_000) for _ in range(8)]
    for rank, buffer in enumerate(buffers):
        fill_input(buffer, rank, 8)
    assert len(set(buffers[0].tolist())) == 100_000
    assert len({buffer[0].item() for buffer in buffers}) == 8
    assert (buffers[0] < 0).any()
    assert (buffers[0] > 0).any()


@pytest.mark.parametrize("bit", range(32))
def test_any_flipped_bit_is_found(bit: int) -> None:
    buffer = sum_of_inputs(4, 1000, torch.float32)
    expected = buffer[613].item()
    bits = buffer.numpy().view(np.uint32)
    bits[613] ^= np.uint32(1 << bit)
    mismatch = verify(buffer, 4)
    assert mismatch
    assert (mismatch.wrong, mismatch.offset, mismatch.xor) == (1, 613, f"0x{1 << bit:08x}")
    assert (mismatch.expected, mismatch.got) == (str(expected), str(buffer[613].item()))


def test_sign_bit_of_bfloat16_and_nan_are_found() -> None:
    buffer = sum_of_inputs(2, 64, torch.bfloat16)
    buffer[9] *= -1
    buffer[40:] = float("nan")
    mismatch = verify(buffer, 2)
    assert mismatch
    assert (mismatch.wrong, mismatch.offset, mismatch.xor) == (25, 9, "0x8000")


def test_sign_of_zero_is_compared() -> None:
    buffer = sum_of_inputs(3, 200, torch.bfloat16)
    zero = buffer.tolist().index(0)
    buffer[zero] = -0.0
    mismatch = verify(buffer, 3)
    assert mismatch
    assert (mismatch.offset, mismatch.xor) == (zero, "0x8000")


def test_result_does_not_depend_on_the_chunk_size(monkeypatch: pytest.MonkeyPatch) -> None:
    buffer = sum_of_inputs(3, 1000, torch.float32)
    monkeypatch.setattr(data_check, "CHUNK_ELEMENTS", 64)
    assert torch.equal(sum_of_inputs(3, 1000, torch.float32), buffer)
    buffer[130] += 1
    buffer[999] += 1
    mismatch = verify(buffer, 3)
    assert mismatch
    assert (mismatch.wrong, mismatch.offset) == (2, 130)


@pytest.mark.parametrize("block", [2**power for power in range(1, 14)])
def test_swapped_blocks_are_found(block: int) -> None:
    buffer = sum_of_inputs(4, 2**14, torch.float32)
    assert verify(torch.cat([buffer[block : 2 * block], buffer[:block], buffer[2 * block :]]), 4)


def test_missing_or_duplicated_rank_is_found() -> None:
    assert verify(sum_of_inputs(4, 100, torch.float32) * 3 / 4, 4)
    left_out = torch.empty(100)
    fill_input(left_out, 2, 4)
    duplicated = torch.empty(100)
    fill_input(duplicated, 3, 4)
    assert verify(sum_of_inputs(4, 100, torch.float32) - left_out + duplicated, 4)


def test_parts_are_verified_by_their_rank_and_position() -> None:
    buffer = torch.empty(90)
    fill_input(buffer, 2, 1)
    blocks = [ExpectedPart(30, 30, 2), ExpectedPart(30, 0, 2)]
    gathered = torch.cat([buffer[30:60], buffer[:30]])
    assert verify(gathered, 1, blocks) is None
    gathered.view(torch.int32)[41] ^= 1 << 7
    mismatch = verify(gathered, 1, blocks)
    assert mismatch
    assert (mismatch.wrong, mismatch.offset) == (1, 41)
    assert verify(torch.cat([buffer[:30], buffer[30:60]]), 1, blocks), "swapped blocks"
    assert verify(torch.cat([buffer[30:60], buffer[:30]]), 1, [ExpectedPart(30, 30, 2), ExpectedPart(30, 0, 1)]), (
        "part of another rank"
    )
    assert verify(gathered, 1, []) is None, "nothing received"
