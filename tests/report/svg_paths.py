"""Parses the SVG paths of curves."""

from __future__ import annotations

import re

_MOVE = re.compile(r"([Ml])(\S+?) ([-+.\de]+)")


def points_of(path: str) -> list[tuple[float, float]]:
    """The points of a path that has one absolute start (M) and relative moves (l)."""
    points: list[tuple[float, float]] = []
    for kind, x, y in _MOVE.findall(path):
        last = points[-1] if kind == "l" else (0.0, 0.0)
        points.append((round(last[0] + float(x), 1), round(last[1] + float(y), 1)))
    return points
