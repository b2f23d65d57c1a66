"""Faults inside the Python processes of a drill's trial; ``install`` of each replaces a function of one module.

They disturb rank RANK only. Nothing in seatrial calls ``install``: a drill does it with a file sitecustomize.py in its
own folder, which it puts on PYTHONPATH of its trial only (``Injection.use_fault``). There is no option and no variable
that a user could set by accident.
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

RANK = 1  # the rank that faults disturb


def is_disturbed_rank() -> bool:
    """Whether this process is rank RANK of a job."""
    return os.environ.get("RANK") == str(RANK)


def after_import(name: str, change: Callable[[Any], None]) -> None:
    """Call ``change`` with the module ``name`` when it has been imported."""
    sys.meta_path.insert(0, _Finder(name, change))


class _Finder(importlib.abc.MetaPathFinder):
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
    def __init__(self, loader: importlib.abc.Loader, change: Callable[[ModuleType], None]) -> None:
        self._loader, self._change = loader, change

    def create_module(self, spec: ModuleSpec) -> ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: ModuleType) -> None:
        self._loader.exec_module(module)
        self._change(module)
