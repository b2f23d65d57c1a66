"""The catalog of checks: each file in a folder of this package declares one check."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from seatrial.checks.base import Check
from seatrial.model import Phase, SeatrialError


@cache
def catalog() -> dict[str, Check]:
    """All checks by name, in the order of the report. Raises SeatrialError for a file without a check.

    Files whose names begin with an underscore contain code shared by the checks of a folder.
    """
    folders = [module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.") if module.ispkg]
    modules = [
        module.name
        for folder in folders
        for module in pkgutil.iter_modules(import_module(folder).__path__, f"{folder}.")
    ]
    checks = [_load_check(name) for name in modules if not name.rpartition(".")[2].startswith("_")]
    phases = list(Phase)
    return {check.name: check for check in sorted(checks, key=lambda check: (phases.index(check.phase), check.name))}


def _load_check(module_name: str) -> Check:
    module = import_module(module_name)
    check = getattr(module, "CHECK", None)
    if not isinstance(check, Check):
        raise SeatrialError(f"{module.__file__} declares no check: expected CHECK = Check(...) at its end")
    return check
