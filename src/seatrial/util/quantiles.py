"""Statistics of small samples, shared by bench and judge. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

# Standard deviation of a normal distribution / its median absolute deviation
MAD_TO_SIGMA = 1.4826
# Smallest spread of a peer group, relative to its median: smaller differences are not significant
MIN_RELATIVE_SPREAD = 0.01


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the median by order statistics; None for fewer than 6 samples."""
    ordered, count = sorted(samples), len(samples)
    # tail: probability that at most `outside` samples are below the true median
    tail, outside = 1 / 2**count, 0
    while 2 * tail <= 0.05:
        outside += 1
        tail += comb(count, outside) / 2**count
    return (ordered[outside - 1], ordered[count - outside]) if outside else None


def spread(values: Sequence[float]) -> float:
    """Return a robust standard deviation: 1.4826 × median absolute deviation, at least 1 % of the median."""
    middle = median(values)
    deviation = MAD_TO_SIGMA * median(abs(value - middle) for value in values)
    return max(deviation, MIN_RELATIVE_SPREAD * abs(middle))
