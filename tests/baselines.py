"""Runs that a baseline was learned from."""

from __future__ import annotations

from seatrial.model import LearnedRun


def learned_runs(count: int = 3) -> tuple[LearnedRun, ...]:
    """``count`` different runs, as a baseline records them."""
    return tuple(
        LearnedRun(path=f"runs/{number}", host="lab", started=float(number), digest=f"digest {number}")
        for number in range(count)
    )
