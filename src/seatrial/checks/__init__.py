"""All checks, found by their files: a new check is one new file in a folder of this package."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module

from seatrial.checks.base import Check
from seatrial.model import Phase, SeatrialError


@cache
def catalog() -> dict[str, Check]:
    """Every check by its name, in the report's order. Raises SeatrialError for a file without a check.

    A folder holds one file a check; a file whose name begins with an underscore is shared by the folder's checks.
    """
    folders = [found.name for found in pkgutil.iter_modules(__path__, f"{__name__}.") if found.ispkg]
    files = [found.name for name in folders for found in pkgutil.iter_modules(import_module(name).__path__, f"{name}.")]
    checks = [_check(name) for name in files if not name.rpartition(".")[2].startswith("_")]
    phases = list(Phase)
    return {check.name: check for check in sorted(checks, key=lambda check: (phases.index(check.phase), check.name))}


def _check(module_name: str) -> Check:
    module = import_module(module_name)
    check = getattr(module, "CHECK", None)
    if not isinstance(check, Check):
        raise SeatrialError(f"{module.__file__} is no check: it must end in CHECK = Check(...)")
    return check
