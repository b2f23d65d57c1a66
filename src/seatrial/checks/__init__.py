"""The catalog of checks: each file in a folder of this package declares one check, or several with one engine."""

from __future__ import annotations

import pkgutil
from collections.abc import Iterator, Mapping
from functools import cache, cached_property
from importlib import import_module
from pathlib import Path

from seatrial.checks.check import Check, Checks
from seatrial.model import Phase, SeatrialError


@cache
def catalog() -> Checks:
    """All checks by name, in the order of the report; the file of a check is imported when the check is looked up.

    Iteration imports all files, and so does the lookup of an unknown name, which raises KeyError. A file without a
    check raises SeatrialError. Files whose names begin with an underscore contain code shared by the checks of a
    folder.
    """
    return _Catalog()


class _Catalog(Mapping[str, Check]):
    def __init__(self) -> None:
        self._loaded: dict[str, Check] = {}

    def __getitem__(self, name: str) -> Check:
        if name not in self._loaded:
            self._loaded[name] = _check_in_file_of_its_name(name) or self._all[name]
        return self._loaded[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._all)

    def __len__(self) -> int:
        return len(self._all)

    @cached_property
    def _all(self) -> dict[str, Check]:
        phases = list(Phase)
        checks = [check for module in _modules() for check in _load_checks(module)]
        checks.sort(key=lambda check: (phases.index(check.phase), check.name))
        self._loaded = {check.name: check for check in checks}
        return self._loaded


def _check_in_file_of_its_name(name: str) -> Check | None:
    """The check ``name``, such as ``host.cpu`` from ``cpu.py``, ``host_cpu.py`` or ``host.py``; None if it is in none.

    Imports only files whose names are a part of the check's name.
    """
    words = f"_{name.replace('.', '_')}_"
    candidates = (module for module in _modules() if f"_{module.rpartition('.')[2]}_" in words)
    return next((check for module in candidates for check in _load_checks(module) if check.name == name), None)


@cache
def _modules() -> list[str]:
    """The modules of all checks, without importing them."""
    folders = [module.name for module in pkgutil.iter_modules(__path__) if module.ispkg]
    return [
        f"{__name__}.{folder}.{module.name}"
        for folder in folders
        for module in pkgutil.iter_modules([str(Path(__path__[0]) / folder)])
        if not module.name.startswith("_")
    ]


def _load_checks(module_name: str) -> tuple[Check, ...]:
    module = import_module(module_name)
    checks = getattr(module, "CHECKS", None) or (getattr(module, "CHECK", None),)
    if not all(isinstance(check, Check) for check in checks):
        raise SeatrialError(f"{module.__file__} declares no check: expected CHECK = Check(...) at its end")
    return tuple(checks)
