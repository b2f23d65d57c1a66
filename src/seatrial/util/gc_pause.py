"""Pauses Python's garbage collector."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def gc_paused() -> Iterator[None]:
    """Disable automatic garbage collection inside the context.

    For code that allocates many long-lived objects, such as the judge on a large cluster or the import of torch and
    transformers (collections take a seventh of its time), and for code that a collection must not interrupt.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@contextmanager
def gc_ignores_imports() -> Iterator[None]:
    """Pause collection inside the context; later collections ignore the objects that exist at its end.

    For the import of torch at the start of a process: collections take a third of the CPU time of this import and of
    the exit. Do not use this later in a process: garbage that exists by then would never be freed.
    """
    with gc_paused():
        yield
        gc.freeze()
