"""Once imported, what a rank of the stack hf imports is, and the way it does."""

from __future__ import annotations

from seatrial.train import hf

with hf._checked_imports():
    from seatrial.train.hf import run

__all__ = ["run"]
