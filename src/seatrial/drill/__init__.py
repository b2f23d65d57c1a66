"""Drills: injected faults, and the proof that a trial reports them. One file per kind of machine."""

from __future__ import annotations

from functools import cache

from seatrial.drill.base import Drill


@cache
def catalog() -> dict[str, Drill]:
    """Drill name → drill, ordered by machine, then by name."""
    from seatrial.drill import cluster, cpu, gpu

    return {drill.name: drill for module in (cpu, cluster, gpu) for drill in module.DRILLS}
