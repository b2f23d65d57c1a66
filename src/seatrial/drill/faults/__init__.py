"""Faults that a drill injects into the Python processes of its trial, on rank FAULTY_RANK.

Each module has a function ``install`` that patches one function or sets a variable. Only drills call it: a drill writes
a sitecustomize.py that calls ``install``, and adds that folder to PYTHONPATH of the drill's trial
(``Injection.use_fault``). No option or variable enables a fault.
"""

from __future__ import annotations

import importlib.abc
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

FAULTY_RANK = 1


def is_faulty_rank() -> bool:
    """Whether this process is rank FAULTY_RANK of a job."""
    return os.environ.get("RANK") == str(FAULTY_RANK)


def call_after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module ``name`` right after its import, which must not have happened yet."""
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
    """Finds the module ``name`` once, and lets a _Loader import it."""

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
            spec.loader = _Loader(spec.loader, self._change)
        return spec


class _Loader(importlib.abc.Loader):
    """Imports a module by its own loader, then calls ``change`` with it."""

    def __init__(self, loader: importlib.abc.Loader, change: Callable[[ModuleType], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)
