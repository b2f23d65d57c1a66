from __future__ import annotations

from statistics import median

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from seatrial.util.quantiles import (
    binomial_tail,
    independent_samples,
    interval_rank,
    median_interval,
    spread,
    t_quantile,
    t_tail,
)

SAMPLES = some.lists(some.floats(1, 1000), min_size=6, max_size=200)


@given(SAMPLES)
def test_interval_contains_the_median(samples: list[float]) -> None:
    interval = median_interval(samples)
    if interval is None:  # too few independent samples
        assert independent_samples(samples, cautious=True) < 6
        return
    assert interval[0] <= median(samples) <= interval[1]
    assert set(interval) <= set(samples)


def test_interval_of_independent_samples_only() -> None:
    assert median_interval([1.0] * 5) is None
    rising = [float(value) for value in range(50)]
    assert median_interval(rising) is None, "fifty windows of a steady drift are one observation"
    shuffled = np.random.default_rng(1).permutation(rising).tolist()
    interval = median_interval(shuffled)
    assert interval is not None
    assert 10 <= interval[0] < 18
    assert independent_samples([3.0] * 20) == 20, "equal samples show no correlation"


@pytest.mark.parametrize(("count", "left_out"), [(5, None), (6, 0), (8, 0), (9, 1), (10, 1), (20, 5), (100, 39)])
def test_interval_matches_published_tables(count: int, left_out: int | None) -> None:
    """Order statistics of the binomial with p = 1/2 (Conover, Practical Nonparametric Statistics, table A3)."""
    assert interval_rank(count) == (0 if left_out is None else left_out + 1)


def test_spread_is_robust_and_at_least_one_percent() -> None:
    assert spread([100.0, 100, 100]) == 1.0
    assert spread([90.0, 100, 110]) == pytest.approx(14.826)
    assert spread([90.0, 100, 110, 100, 1e9]) == pytest.approx(14.826)


@pytest.mark.parametrize("correlation", [0.0, 0.9])
def test_interval_coverage_of_correlated_windows(correlation: float) -> None:
    """300 windows with this lag-1 correlation; docs/results/2026-11-23-judge has the whole table."""
    rng, hits, draws = np.random.default_rng(0), 0, 400
    for _ in range(draws):
        noise = rng.standard_normal(300)
        samples = [noise[0]]
        for innovation in noise[1:]:
            samples.append(correlation * samples[-1] + np.sqrt(1 - correlation**2) * innovation)
        low, high = median_interval(samples) or (1.0, 0.0)
        hits += low <= 0 <= high
    assert 0.92 < hits / draws < 0.985


def test_binomial_tail() -> None:
    assert binomial_tail(0, 10, 0.05) == pytest.approx(1)
    assert binomial_tail(4, 10, 0.05) == pytest.approx(0.00103, abs=1e-5)


# From tables of Student's t, two-sided: 5 % and 0.1 %
@pytest.mark.parametrize(
    ("freedom", "five_percent", "one_per_mille"),
    [(1, 12.706, 636.62), (4, 2.776, 8.610), (9, 2.262, 4.781), (30, 2.042, 3.646)],
)
def test_students_t_is_that_of_the_tables(freedom: int, five_percent: float, one_per_mille: float) -> None:
    assert t_quantile(0.05, freedom) == pytest.approx(five_percent, abs=6e-4)
    assert t_quantile(0.001, freedom) == pytest.approx(one_per_mille, rel=2e-4)
    assert t_tail(-t_quantile(0.05, freedom), freedom) == pytest.approx(0.05, rel=1e-6)
    assert t_tail(0.0, freedom) == pytest.approx(1.0)
