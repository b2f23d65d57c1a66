"""Imports what these tests do the way the product does, which takes less time: before them."""

from __future__ import annotations

from tests.train.hf import imports

__all__ = ["imports"]
