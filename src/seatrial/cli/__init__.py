"""The command line."""

from seatrial.util.gc_pause import gc_ignores_imports

with gc_ignores_imports():  # garbage collections take a fifth of the time of a short command
    from seatrial.cli.app import main

__all__ = ["main"]
