"""Linear fit of time over size: latency α and asymptotic bandwidth β for each algorithm and protocol.

T(S) = α + S/β (Hockney, The communication challenge for MPP, 1994). NCCL changes algorithm and protocol with size. A
single line over all sizes has residuals of 8 to 12 %, so each regime (consecutive sizes with the same algorithm and
protocol) has a line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import NamedTuple

MIN_SIZES = 3  # a line through two points has no residual, so that a poor fit would not show


class Point(NamedTuple):
    """The measured time of one size."""

    size: float  # bytes
    us: float
    regime: str  # algorithm and protocol; empty if unknown


@dataclass(frozen=True)
class FittedLine:
    """The fit of one regime. ``regime``: algorithm and protocol. ``sizes`` are in bytes.

    ``alpha_us``: α in us; None if the fit is not positive: α is too small to measure at these sizes.
    ``gbps``: β in GB/s of algorithm bandwidth; None if time does not grow with size.
    ``max_relative_error``: the largest relative residual.
    """

    regime: str
    sizes: tuple[float, ...]
    alpha_us: float | None
    gbps: float | None
    max_relative_error: float


def fit_regimes(points: Sequence[Point]) -> tuple[FittedLine, ...]:
    """A line for each regime with at least MIN_SIZES sizes.

    ``points`` are sorted by size, with times above zero.
    """
    regimes = [(name, list(regime)) for name, regime in groupby(points, key=lambda point: point.regime)]
    return tuple(_line(name, regime) for name, regime in regimes if len(regime) >= MIN_SIZES)


def _line(regime: str, points: Sequence[Point]) -> FittedLine:
    """The line with the least squares of relative errors: each point has the weight 1/T²."""
    weighted = [(point.us**-2, point) for point in points]
    total = sum(weight for weight, _ in weighted)
    mean_size = sum(weight * point.size for weight, point in weighted) / total
    mean_us = sum(weight * point.us for weight, point in weighted) / total
    covariance = sum(weight * (point.size - mean_size) * (point.us - mean_us) for weight, point in weighted)
    slope = covariance / sum(weight * (point.size - mean_size) ** 2 for weight, point in weighted)  # us per byte
    alpha = mean_us - slope * mean_size
    residual = max(abs((alpha + slope * point.size) / point.us - 1) for point in points)
    return FittedLine(
        regime=regime,
        sizes=tuple(point.size for point in points),
        alpha_us=alpha if alpha > 0 else None,
        gbps=1 / slope / 1e3 if slope > 0 else None,  # B/us → GB/s
        max_relative_error=residual,
    )
