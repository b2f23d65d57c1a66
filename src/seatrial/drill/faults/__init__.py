"""Faults that a drill injects into the Python processes of its trial, on rank FAULTY_RANK.

Each module has a function ``change``, which patches a function of the module MODULE or sets a variable. Only drills use
it: a drill writes a sitecustomize.py that calls ``install``, and adds that folder to PYTHONPATH of the drill's trial
(``Injection.use_fault``). No option or variable enables a fault.
"""

from __future__ import annotations

import importlib
import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType

FAULTY_RANK = 1


def install(name: str) -> None:
    """Inject the fault in the module ``name`` of this package if this process is rank FAULTY_RANK of a job.

    ``change`` is called right after the import of MODULE, which must not have happened yet.
    """
    if os.environ.get("RANK") == str(FAULTY_RANK):
        fault = importlib.import_module(f"{__name__}.{name}")
        sys.meta_path.insert(0, _Importer(fault.MODULE, fault.change))


class _Importer(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    """Imports the module ``name`` once, by its own loader, then calls ``change`` with it."""

    def __init__(self, name: str, change: Callable[[ModuleType], None]) -> None:
        self._name, self._change = name, change

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != self._name:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        if spec and spec.loader:
            self._loader, spec.loader = spec.loader, self
        return spec

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)
