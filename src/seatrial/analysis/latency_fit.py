"""Linear fit of time over size: latency α and asymptotic bandwidth β for each algorithm and protocol.

T(S) = α + S/β (Hockney, The communication challenge for MPP, 1994). NCCL changes algorithm and protocol with size. A
single line over all sizes has residuals of 8 to 12 %, so each regime (consecutive sizes with the same algorithm and
protocol) has a line of its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

MIN_SIZES = 3  # a line through two points always fits
Point = tuple[float, float, str]  # bytes, us, algorithm and protocol ("" where unknown)


@dataclass(frozen=True)
class FittedLine:
    """The fit of one regime. ``regime``: algorithm and protocol. ``sizes`` are in bytes.

    ``alpha_us``: α in us; None if the fitted α is not positive, since it is too small to measure at these sizes.
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
    regimes = [(name, list(regime)) for name, regime in groupby(points, key=lambda point: point[2])]
    return tuple(_line(name, regime) for name, regime in regimes if len(regime) >= MIN_SIZES)


def _line(regime: str, points: Sequence[Point]) -> FittedLine:
    """The line with the least squares of relative errors: each point has the weight 1/T²."""
    weights = [us**-2 for _, us, _ in points]
    total = sum(weights)
    mean_size = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    mean_us = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    covariance = sum(w * (x - mean_size) * (y - mean_us) for w, (x, y, _) in zip(weights, points, strict=True))
    slope = covariance / sum(w * (x - mean_size) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    alpha = mean_us - slope * mean_size
    residual = max(abs((alpha + slope * x) / us - 1) for x, us, _ in points)
    gbps = 1 / slope / 1e3 if slope > 0 else None  # B/us → GB/s
    return FittedLine(regime, tuple(x for x, _, _ in points), alpha if alpha > 0 else None, gbps, residual)
