"""Statistics of small samples, shared by bench and judge. Pure; no torch."""

from __future__ import annotations

from collections.abc import Sequence
from math import comb
from statistics import median

# Scales the median absolute deviation to the standard deviation of a normal distribution
NORMAL = 1.4826
# Smallest relative spread of a peer group: smaller differences are not significant
FLOOR = 0.01


def median_interval(samples: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % confidence interval of the median by order statistics; None for fewer than 6 samples."""
    ordered, count = sorted(samples), len(samples)
    tail, outside = 1 / 2**count, 0  # tail: probability that at most `outside` samples are below the true median
    while 2 * tail <= 0.05:
        outside += 1
        tail += comb(count, outside) / 2**count
    return (ordered[outside - 1], ordered[count - outside]) if outside else None


def spread(values: Sequence[float]) -> float:
    """Return the scaled median absolute deviation, at least 1 % of the median (a robust standard deviation)."""
    middle = median(values)
    deviation = NORMAL * median(abs(value - middle) for value in values)
    return max(deviation, FLOOR * abs(middle))
