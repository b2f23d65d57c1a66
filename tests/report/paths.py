"""SVG paths of curves, as points."""

from __future__ import annotations

import re

_MOVE = re.compile(r"([Ml])(\S+?) ([-+.\de]+)")


def points_of(path: str) -> list[tuple[float, float]]:
    """The corners of a path of one stroke, which begins at a point and goes on by differences."""
    points: list[tuple[float, float]] = []
    for kind, x, y in _MOVE.findall(path):
        last = points[-1] if kind == "l" else (0.0, 0.0)
        points.append((round(last[0] + float(x), 1), round(last[1] + float(y), 1)))
    return points
