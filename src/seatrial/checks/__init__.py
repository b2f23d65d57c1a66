"""All checks, found by their files: a new check is one new file in this folder."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from seatrial.checks.base import Check
from seatrial.model import Phase, SeatrialError

# what checks share
_NO_CHECKS = {
    "base",
    "collective",
    "collective_choices",
    "collective_figures",
    "nccl_told",
    "slurm_desk",
    "workload",
    "workload_figures",
}


@cache
def catalog() -> dict[str, Check]:
    """Every check by its name, in the report's order. Raises SeatrialError, naming a file that is none."""
    checks = [_check(found.name) for found in pkgutil.iter_modules(__path__) if found.name not in _NO_CHECKS]
    phases = list(Phase)
    return {check.name: check for check in sorted(checks, key=lambda check: (phases.index(check.phase), check.name))}


def _check(module_name: str) -> Check:
    module = import_module(f"{__name__}.{module_name}")
    check = getattr(module, "CHECK", None)
    if not isinstance(check, Check):
        raise SeatrialError(f"{module.__file__} is no check: it must end in CHECK = Check(...)")
    return check
