"""Import stack hf as the product does, which is faster than importing its packages directly."""

from __future__ import annotations

from tests.train.hf import imports

__all__ = ["imports"]
