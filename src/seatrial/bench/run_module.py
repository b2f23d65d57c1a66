"""Runs a module that needs torch, as ``python -m`` does: ``python -m seatrial.bench.run_module MODULE ARGUMENT…``.

torch is imported first, without garbage collection: collections take a third of the CPU time of that import.
"""

from __future__ import annotations

import contextlib
import runpy
import sys

from seatrial.util.gc_pause import gc_ignores_imports


def main(arguments: list[str]) -> None:
    with gc_ignores_imports(), contextlib.suppress(ImportError):  # the module reports a missing torch
        import torch  # noqa: F401
    sys.argv = arguments
    runpy.run_module(arguments[0], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    main(sys.argv[1:])
