"""Time over size as a straight line: latency α and asymptotic bandwidth β, one line for each algorithm and protocol.

T(S) = α + S/β (Hockney, The communication challenge for MPP, 1994). NCCL changes algorithm and protocol with size, and
each has a line of its own: one line over all of them has residuals of 8 to 12 %.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

MIN_SIZES = 3  # sizes: two lie on a line always, so that the third is the first that says anything
Point = tuple[float, float, str]  # bytes, us, algorithm and protocol ("" where unknown)


@dataclass(frozen=True)
class FittedLine:
    """One regime: the sizes in it (bytes), α in us, β in GB/s of algorithm bandwidth, the worst relative residual.

    ``alpha_us`` is None where the line does not meet the axis above zero: too small beside the sizes to be seen.
    ``gbps`` is None where time does not grow with size.
    """

    regime: str
    sizes: tuple[float, ...]
    alpha_us: float | None
    gbps: float | None
    max_relative_error: float


def fit_regimes(points: Sequence[Point]) -> tuple[FittedLine, ...]:
    """A line for each run of sizes of one algorithm and protocol that has enough of them.

    ``points`` are in the order of size, every time above zero.
    """
    runs = [(name, list(run)) for name, run in groupby(points, key=lambda point: point[2])]
    return tuple(_line(name, run) for name, run in runs if len(run) >= MIN_SIZES)


def _line(regime: str, points: Sequence[Point]) -> FittedLine:
    """The line with the least relative errors: each point has the weight 1/T²."""
    weights = [us**-2 for _, us, _ in points]
    total = sum(weights)
    size = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    time = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    across = sum(w * (x - size) * (y - time) for w, (x, y, _) in zip(weights, points, strict=True))
    slope = across / sum(w * (x - size) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    alpha = time - slope * size
    residual = max(abs((alpha + slope * x) / us - 1) for x, us, _ in points)
    gbps = 1 / slope / 1e3 if slope > 0 else None  # B/us → GB/s
    return FittedLine(regime, tuple(x for x, _, _ in points), alpha if alpha > 0 else None, gbps, residual)
