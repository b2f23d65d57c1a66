"""Drills: faults that are injected on purpose, and the proof that a trial reports them. One file per drill."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from seatrial.drill.base import Drill
from seatrial.model import SeatrialError

FOLDERS = ("cpu", "cluster", "gpu")  # the machine that the drills of a folder need


@cache
def catalog() -> dict[str, Drill]:
    """Drill name → drill, ordered by machine, then by file name. Raises SeatrialError for a file without a drill.

    Files whose names begin with an underscore contain code shared by the drills of a folder.
    """
    packages = [import_module(f"{__name__}.{folder}") for folder in FOLDERS]
    names = [
        f"{package.__name__}.{module.name}"
        for package in packages
        for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda module: module.name)
        if not module.name.startswith("_")
    ]
    return {drill.name: drill for drill in map(_load_drill, names)}


def _load_drill(module_name: str) -> Drill:
    module = import_module(module_name)
    drill = getattr(module, "DRILL", None)
    if not isinstance(drill, Drill):
        raise SeatrialError(f"{module.__file__} declares no drill: expected DRILL = Drill(...) at its end")
    return drill
