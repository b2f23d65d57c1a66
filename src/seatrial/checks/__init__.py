"""The catalog of checks: each file in a folder of this package declares one check."""

from __future__ import annotations

import pkgutil
from functools import cache
from importlib import import_module
from importlib.util import find_spec

from seatrial.checks.base import Check
from seatrial.model import Phase, SeatrialError


@cache
def catalog() -> dict[str, Check]:
    """All checks by name, in the order of the report. Raises SeatrialError for a file without a check.

    Files whose names begin with an underscore contain code shared by the checks of a folder.
    """
    modules = [
        module.name
        for folder in _folders()
        for module in pkgutil.iter_modules(import_module(folder).__path__, f"{folder}.")
    ]
    checks = [_load_check(name) for name in modules if not name.rpartition(".")[2].startswith("_")]
    phases = list(Phase)
    return {check.name: check for check in sorted(checks, key=lambda check: (phases.index(check.phase), check.name))}


def check_named(name: str) -> Check:
    """The check ``name``. Raises KeyError if there is none.

    Only one file is imported if it is named after the part of ``name`` behind the dot; otherwise all files are.
    """
    for folder in _folders():
        module_name = f"{folder}.{name.rpartition('.')[2]}"
        if find_spec(module_name) and (check := _load_check(module_name)).name == name:
            return check
    return catalog()[name]


def _folders() -> list[str]:
    return [module.name for module in pkgutil.iter_modules(__path__, f"{__name__}.") if module.ispkg]


def _load_check(module_name: str) -> Check:
    module = import_module(module_name)
    check = getattr(module, "CHECK", None)
    if not isinstance(check, Check):
        raise SeatrialError(f"{module.__file__} declares no check: expected CHECK = Check(...) at its end")
    return check
