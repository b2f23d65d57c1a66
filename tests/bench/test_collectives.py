from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import chain, cycle, repeat

import numpy as np
import pytest
import torch

from seatrial.bench import collectives
from seatrial.bench.collectives import (
    Timings,
    algorithm_bandwidth,
    all_reduce_factor,
    fill,
    median_interval,
    time_operation,
    verify,
)
from seatrial.model import UsageError

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


# Lines that nccl-tests printed: size in B, time in us, ranks, algbw and busbw in GB/s.
# 72 GPUs of a GB200 NVL72: coreweave/nccl-tests#43; 8 GPUs: kvcache-ai/Mooncake#3484.
@pytest.mark.parametrize(
    ("size", "us", "ranks", "algbw", "busbw"),
    [
        (8589934592, 20299, 72, 423.16, 834.57),
        (1073741824, 3108.8, 72, 345.38, 681.17),
        (16777216, 121.33, 8, 138.28, 242.00),
        (1048576, 27.76, 8, 37.78, 66.11),
    ],
)
def test_bandwidths_are_those_of_nccl_tests(size: int, us: float, ranks: int, algbw: float, busbw: float) -> None:
    measured = algorithm_bandwidth(size, us * 1e-6)
    assert measured == pytest.approx(algbw, rel=2e-4)
    assert measured * all_reduce_factor(ranks) == pytest.approx(busbw, rel=2e-4)


def summed(ranks: int, count: int, dtype: torch.dtype) -> torch.Tensor:
    """What an all-reduce leaves, by adding up the ranks' buffers one after another in their own type."""
    total = torch.zeros(count, dtype=dtype)
    for rank in range(ranks):
        mine = torch.empty(count, dtype=dtype)
        fill(mine, rank, ranks)
        total += mine
    return total


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 64])
def test_the_exact_sum_is_right_in_any_order(dtype: torch.dtype, ranks: int) -> None:
    assert verify(summed(ranks, 1001, dtype), ranks) is None


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ranks", [2, 3, 8, 64, 256])
def test_no_partial_sum_can_round(dtype: torch.dtype, ranks: int) -> None:
    magnitude = np.zeros(4096)
    for rank in range(ranks):
        mine = torch.empty(4096, dtype=dtype)
        fill(mine, rank, ranks)
        magnitude += np.abs(mine.double().numpy())
    assert 0 < magnitude.max() <= 2 / torch.finfo(dtype).eps


def test_contributions_differ_by_rank_and_position() -> None:
    buffers = [torch.empty(100_000) for _ in range(8)]
    for rank, buffer in enumerate(buffers):
        fill(buffer, rank, 8)
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
    monkeypatch.setattr(collectives, "CHUNK", 64)
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
    fill(own, 2, 4)
    other = torch.empty(100)
    fill(other, 3, 4)
    assert verify(summed(4, 100, torch.float32) - own + other, 4)


def test_a_type_that_cannot_sum_so_many_ranks_is_refused() -> None:
    with pytest.raises(UsageError, match=r"bfloat16.*257 ranks"):
        fill(torch.empty(8, dtype=torch.bfloat16), 0, 257)


# Order statistics of the median: 20 samples → 6th and 15th, under 6 samples none.
@pytest.mark.parametrize(("count", "ranks"), [(5, None), (6, (1, 6)), (10, (2, 9)), (20, (6, 15))])
def test_interval_of_the_median(count: int, ranks: tuple[int, int] | None) -> None:
    assert median_interval(range(count, 0, -1)) == ranks


def test_interval_of_the_median_covers_it_as_often_as_it_says() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval(rng.exponential(size=15).tolist()) or (1.0, 0.0)
        hits += low <= np.log(2) <= high
    assert 0.94 < hits / 2000 < 0.99


def test_timings_by_window_and_by_rank() -> None:
    timings = Timings(windows=((1.0, 3.0), (2.0, 4.0), (9.0, 5.0)), per_window=4, warmup=6)
    assert timings.means == (2.0, 3.0, 7.0)
    assert timings.of_rank(1) == (3.0, 4.0, 5.0)
    assert timings.slowest == 1


def time_it(monkeypatch: pytest.MonkeyPatch, clock: Iterator[float], seconds: float, at_least: float = 0.0) -> Timings:
    """Time an operation that takes what ``clock`` says, on one rank with itself as the only peer."""

    def window(operation: Callable[[], object], count: int, device: torch.device) -> float:
        del operation, count, device
        return next(clock)

    monkeypatch.setattr(collectives, "time_window", window)
    monkeypatch.setattr(collectives, "gather", lambda value: [value])
    return time_operation(lambda: None, torch.device("cpu"), seconds, at_least)


def test_steady_times_end_early_and_the_warm_up_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    cold = (9.0, 0.004, 0.002)  # the first use, the first guess (5 a window), the window of 5
    timings = time_it(monkeypatch, chain(cold, repeat(0.001)), seconds=2)
    assert timings.windows == ((0.001,),) * collectives.MIN_WINDOWS
    assert (timings.per_window, timings.warmup) == (10, 1 + 1 + 5)


def test_unsteady_times_go_on_to_the_cap(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, cycle((0.010, 0.010, 0.010, 0.011, 0.011, 0.011)), seconds=1)
    assert timings.per_window == 2
    assert 1 <= 2 * sum(timings.means) < 1.03


def test_a_burn_in_goes_on_when_the_median_is_known(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, repeat(0.001), seconds=2, at_least=60)
    assert 60 <= sum(timings.means) * timings.per_window < 61
    assert len(timings.windows) <= collectives.MAX_WINDOWS + 1  # longer windows, not thousands of samples


def test_ranks_of_unlike_speed_agree_on_the_end_of_a_burn_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each rank sees its own clock, and decides by what all of them measured."""
    counts = []
    for own, other in ((0.001, 0.0017), (0.0017, 0.001)):
        monkeypatch.setattr(collectives, "time_window", lambda *_, own=own: own)
        monkeypatch.setattr(collectives, "gather", lambda value, other=other: [value, other])
        timings = time_operation(lambda: None, torch.device("cpu"), 2, at_least=10)
        counts.append((len(timings.windows), timings.per_window))
    assert counts[0] == counts[1]


def test_an_operation_longer_than_the_cap_is_timed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, repeat(3.0), seconds=1)
    assert (timings.windows, timings.per_window) == (((3.0,),), 1)


def test_a_misjudged_window_does_not_run_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    timings = time_it(monkeypatch, chain((1, 1, 1), cycle((1e-5, 1e-4))), seconds=2)
    assert len(timings.windows) == collectives.MAX_WINDOWS
