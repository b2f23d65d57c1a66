"""Statistics of small samples, shared by bench and judge. Pure; no torch."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from functools import cache
from itertools import pairwise
from math import asin, atan2, comb, cos, floor, pi, sin, sqrt
from statistics import NormalDist, median

# Standard deviation of a normal distribution / its median absolute deviation
MAD_TO_SIGMA = 1.4826
# Smallest spread of a peer group, relative to its median: smaller differences are not significant
MIN_RELATIVE_SPREAD = 0.01
CONFIDENCE = 0.95
_MAX_EXACT_COUNT = 500  # for more samples, the normal approximation of the binomial distribution is used
# With fewer samples, the estimate of the lag-1 autocorrelation gets a larger margin (docs/results/2026-11-23-judge)
_WELL_ESTIMATED = 300


def median_interval(samples: Sequence[float], *, independent: bool = False) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the median by order statistics, for ``samples`` in order of time.

    Consecutive samples of one run are correlated. So the interval is as wide as that of fewer independent samples with
    the same information (``independent_samples``). None if these are fewer than 6.
    ``independent``: the samples are known to be uncorrelated.
    """
    ordered, count = sorted(samples), len(samples)
    effective = count if independent else floor(independent_samples(samples, cautious=True))
    if not (rank := interval_rank(effective)):
        return None
    scaled_rank = max(1, floor(rank * count / effective))  # the same quantile among all samples
    return ordered[scaled_rank - 1], ordered[count - scaled_rank]


def independent_samples(samples: Sequence[float], *, cautious: bool = False) -> float:
    """Return how many independent samples have a median as uncertain as that of ``samples``; at most ``len(samples)``.

    ``cautious``: use the upper confidence bound of the correlation, since few samples do not determine the correlation.

    The variance of a median depends on whether consecutive samples are on the same side of the median. For a
    stationary first-order autoregressive Gaussian process with lag-1 correlation r, the sequence of these sides has
    the correlation 2/pi·asin(r^k) at lag k (Kedem, Binary Time Series, 1980).
    """
    return len(samples) / _variance_ratio(_lag_1_correlation(samples, cautious=cautious))


def expected_half_width(count: int) -> float:
    """Return the half width of the interval of ``count`` uncorrelated normal samples, in standard deviations.

    If there are too few samples for an interval: half of their expected range, since the judge then uses the range.
    """
    # ``median_interval`` estimates the correlation, which is rarely exactly 0 for uncorrelated samples. Assume an
    # estimate of one standard error; one series in six gives a larger one.
    correlation = 1 / sqrt(count)
    independent = count / _variance_ratio(min(correlation + _margin(count, correlation), 0.99))
    if not (rank := interval_rank(floor(independent))):
        return NormalDist().inv_cdf(count / (count + 1))
    return NormalDist().inv_cdf(1 - (rank - 0.5) / floor(independent))


def spread(values: Sequence[float]) -> float:
    """Return the scaled median absolute deviation, at least 1 % of the median (a robust standard deviation)."""
    return max(deviation(values), MIN_RELATIVE_SPREAD * abs(median(values)))


def deviation(values: Sequence[float]) -> float:
    """Return the scaled median absolute deviation from the median (a robust standard deviation)."""
    middle = median(values)
    return MAD_TO_SIGMA * median(abs(value - middle) for value in values)


def binomial_tail(successes: int, trials: int, probability: float) -> float:
    """Return the probability of at least ``successes`` in ``trials``, each of which succeeds with ``probability``."""
    return sum(
        comb(trials, count) * probability**count * (1 - probability) ** (trials - count)
        for count in range(successes, trials + 1)
    )


@cache
def interval_rank(count: int) -> int:
    """Return k: the interval reaches from the k-th smallest to the k-th largest of ``count`` independent samples.

    0 if there are too few samples for an interval.
    """
    if count > _MAX_EXACT_COUNT:
        return floor(count / 2 - NormalDist().inv_cdf((1 + CONFIDENCE) / 2) * sqrt(count) / 2)
    rank, tail = 0, 1 / 2**count  # tail: probability that at most ``rank`` samples are below the true median
    while 2 * tail <= 1 - CONFIDENCE:
        rank += 1
        tail += comb(count, rank) / 2**count
    return rank


def _lag_1_correlation(samples: Sequence[float], *, cautious: bool) -> float:
    """Return the lag-1 autocorrelation of the samples' normal scores, from 0 to 0.99.

    The estimate of a short series is too low by (1 + 3r)/n (Kendall and Stuart, The Advanced Theory of Statistics).
    """
    count, scores = len(samples), _normal_scores(samples)
    if count < 6 or not (variance := sum(score * score for score in scores)):
        return 0.0
    estimate = sum(a * b for a, b in pairwise(scores)) / variance
    unbiased = min(max((estimate + 1 / count) / (1 - 3 / count), 0.0), 0.99)
    if not cautious:
        return unbiased
    return unbiased + _margin(count, unbiased)


def _margin(count: int, correlation: float) -> float:
    """Return the margin to add to a correlation that was estimated from ``count`` samples: ``weight`` standard errors.

    ``weight`` is near 2 for few samples and decreases with ``count``, down to ``correlation``. The margin is smaller if
    the sum would exceed 0.99.
    """
    weight = max(correlation, 2 * (1 - count / _WELL_ESTIMATED))
    return min(weight * sqrt((1 - correlation**2) / count), 0.99 - correlation)


def _variance_ratio(correlation: float) -> float:
    """Return the variance of the median relative to that of as many independent samples."""
    ratio, power = 1.0, 1.0
    while (power := power * correlation) > 1e-3:
        ratio += 4 / pi * asin(power)
    return ratio


def _normal_scores(samples: Sequence[float]) -> list[float]:
    """Return the standard normal quantile of each sample's rank; equal samples have the same one."""
    ordered, count, normal = sorted(samples), len(samples), NormalDist()
    middles = {value: (bisect_left(ordered, value) + bisect_right(ordered, value)) / 2 for value in {*ordered}}
    scores = {value: normal.inv_cdf(middle / count) for value, middle in middles.items()}
    return [scores[value] for value in samples]


def t_tail(t: float, freedom: int) -> float:
    """Return the probability that Student's t with ``freedom`` degrees of freedom is at least ``t`` from 0.

    Finite series for integer degrees of freedom: Abramowitz and Stegun, 26.7.3 and 26.7.4.
    """
    angle = atan2(abs(t), sqrt(freedom))
    is_odd, cosine = freedom % 2, cos(angle)
    total, term = 0.0, cosine**is_odd
    for k in range(1 + is_odd, freedom + is_odd, 2):
        total += term
        term *= k / (k + 1) * cosine**2
    inside = 2 / pi * (angle + sin(angle) * total) if is_odd else sin(angle) * total
    return max(0.0, 1 - inside)


@cache
def t_quantile(probability: float, freedom: int) -> float:
    """Return the distance from 0 that Student's t exceeds with ``probability``, on both sides together."""
    low, high = 0.0, 1e6
    while high - low > 1e-9 * high:
        middle = (low + high) / 2
        low, high = (middle, high) if t_tail(middle, freedom) > probability else (low, middle)
    return high
