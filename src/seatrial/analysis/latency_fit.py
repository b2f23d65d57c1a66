"""Time over size as a straight line: latency α and asymptotic bandwidth β, one line for each regime of sizes.

T(S) = α + S/β (Hockney, The communication challenge for MPP, 1994). NCCL changes algorithm and protocol with size, and
each has a line of its own: one line over all of them has residuals of 8 to 12 %.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from math import log

from seatrial.util.quantiles import FLOOR

ENOUGH = 3  # sizes: two lie on a line always, so that the third is the first that says anything
_BENDS = 8  # sizes that a breakpoint takes
Point = tuple[float, float, str]  # bytes, us, algorithm and protocol ("" where unknown)


@dataclass(frozen=True)
class Line:
    """One regime: the sizes in it (bytes), α in us, β in GB/s of algorithm bandwidth, the worst relative residual.

    ``alpha_us`` is None where the line does not meet the axis above zero: too small beside the sizes to be seen.
    ``gbps`` is None where time does not grow with size.
    """

    regime: str
    sizes: tuple[float, ...]
    alpha_us: float | None
    gbps: float | None
    residual: float


@dataclass(frozen=True)
class TooFew:
    """A regime of fewer sizes than a line needs."""

    regime: str
    sizes: tuple[float, ...]


def regimes(points: Sequence[Point]) -> tuple[Line | TooFew, ...]:
    """A line for each run of sizes of one algorithm and protocol; where these are unknown, one or two lines.

    ``points`` are in the order of size, every time above zero.
    """
    if any(name for _, _, name in points):
        runs = [(name, list(run)) for name, run in groupby(points, key=lambda point: point[2])]
        return tuple(_line(name or "algorithm unknown", run) for name, run in runs)
    return tuple(_line("", part) for part in _parts(points))


def _parts(points: Sequence[Point]) -> Sequence[Sequence[Point]]:
    """The whole, or what lies before and after the best breakpoint, if that is worth its three more parameters.

    Worth by Akaike's criterion as corrected for few points (Hurvich and Tsai, 1989), which takes eight at least.
    Misses of 1 % are as good as none.
    """
    count = len(points)
    splits = [(points[:cut], points[cut:]) for cut in range(ENOUGH, count - ENOUGH + 1)]
    if count < _BENDS or not splits:
        return [points]
    best = min(splits, key=lambda parts: sum(map(_error, parts)))
    return best if _criterion(sum(map(_error, best)), count, 5) < _criterion(_error(points), count, 2) else [points]


def _criterion(error: float, count: int, parameters: int) -> float:
    correction = 2 * parameters * (parameters + 1) / (count - parameters - 1)
    return count * log(max(error / count, FLOOR**2)) + 2 * parameters + correction


def _line(regime: str, points: Sequence[Point]) -> Line | TooFew:
    sizes = tuple(size for size, _, _ in points)
    if len(points) < ENOUGH:
        return TooFew(regime, sizes)
    alpha, slope = _fit(points)
    residual = max(map(abs, _residuals(points, alpha, slope)))
    gbps = 1 / slope / 1e3 if slope > 0 else None  # B/us → GB/s
    return Line(regime, sizes, alpha if alpha > 0 else None, gbps, residual)


def _error(points: Sequence[Point]) -> float:
    return sum(residual**2 for residual in _residuals(points, *_fit(points)))


def _residuals(points: Sequence[Point], alpha: float, slope: float) -> Iterator[float]:
    return ((alpha + slope * size) / us - 1 for size, us, _ in points)


def _fit(points: Sequence[Point]) -> tuple[float, float]:
    """Intercept (us) and slope (us/B) with the least relative errors: each point has the weight 1/T²."""
    weights = [us**-2 for _, us, _ in points]
    total = sum(weights)
    size = sum(w * x for w, (x, _, _) in zip(weights, points, strict=True)) / total
    time = sum(w * y for w, (_, y, _) in zip(weights, points, strict=True)) / total
    across = sum(w * (x - size) * (y - time) for w, (x, y, _) in zip(weights, points, strict=True))
    along = sum(w * (x - size) ** 2 for w, (x, _, _) in zip(weights, points, strict=True))
    slope = across / along
    return time - slope * size, slope
