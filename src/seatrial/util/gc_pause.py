"""Python's garbage collector, kept away."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Within, it does not look for garbage by itself.

    For what makes much that stays, through which it would walk again and again (judging a large cluster; importing
    torch and transformers, of which that is a seventh), and for what must not be stopped meanwhile.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
