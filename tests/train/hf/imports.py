"""Importing this module imports stack hf as a training rank does."""

from __future__ import annotations

from seatrial.train import hf

with hf._checked_imports():
    from seatrial.train.hf import run

__all__ = ["run"]
