"""Imported by the process from which ranks are forked: torch as a rank imports it, without garbage collection."""

from __future__ import annotations

from seatrial.util.gc_pause import gc_ignores_imports

with gc_ignores_imports():
    import torch._dynamo

    from seatrial.train import loop

__all__ = ["loop", "torch"]
