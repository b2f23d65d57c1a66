"""What a handful of readings says of the value behind them. Pure, and without torch: instruments and judge share it."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

# Makes the median absolute deviation estimate the standard deviation of normally distributed values
NORMAL = 1.4826
# Values of one fleet that agree to better than this are not told apart, however small their spread happens to be
FLOOR = 0.01


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """The 95 % confidence interval of the median by order statistics; None under 6 samples, where there is none."""
    ordered, count = sorted(samples), len(samples)
    tail, outside = 1 / 2**count, 0  # tail: the chance that no more than `outside` samples lie under the true median
    while 2 * tail <= 0.05:
        outside += 1
        tail += comb(count, outside) / 2**count
    return (ordered[outside - 1], ordered[count - outside]) if outside else None


def spread(values: Sequence[float]) -> float:
    """A robust standard deviation: the median absolute deviation, scaled, and at least 1 % of the median."""
    middle = median(values)
    deviation = NORMAL * median(abs(value - middle) for value in values)
    return max(deviation, FLOOR * abs(middle))
