from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from seatrial.util.quantiles import median_interval, spread

SAMPLES = some.lists(some.floats(1, 1000), min_size=6, max_size=200)


@given(SAMPLES)
def test_interval_contains_the_median(samples: list[float]) -> None:
    interval = median_interval(samples)
    assert interval is not None
    assert interval[0] <= median(samples) <= interval[1]
    assert set(interval) <= set(samples)


@pytest.mark.parametrize(("count", "left_out"), [(5, None), (6, 0), (8, 0), (9, 1), (10, 1), (20, 5), (100, 39)])
def test_interval_matches_published_tables(count: int, left_out: int | None) -> None:
    """Order statistics of the binomial with p = 1/2 (Conover, Practical Nonparametric Statistics, table A3)."""
    interval = median_interval(range(count))
    assert interval == (None if left_out is None else (left_out, count - 1 - left_out))


def test_spread_is_robust_and_at_least_one_percent() -> None:
    assert spread([100.0, 100, 100]) == 1.0
    assert spread([90.0, 100, 110]) == pytest.approx(14.826)
    assert spread([90.0, 100, 110, 100, 1e9]) == pytest.approx(14.826)


def test_interval_coverage() -> None:
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(2000):
        low, high = median_interval(rng.exponential(size=15).tolist()) or (1.0, 0.0)
        hits += low <= np.log(2) <= high
    assert 0.94 < hits / 2000 < 0.99
