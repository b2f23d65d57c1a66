"""The command line."""

import gc

# Nearly all objects of a command stay until its end: with Python's threshold of 700 new objects, collections take a
# fifth of the CPU time of its imports.
gc.set_threshold(50_000)

from seatrial.cli.app import main  # noqa: E402

__all__ = ["main"]
