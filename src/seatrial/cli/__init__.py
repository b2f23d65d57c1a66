"""The command line."""

from seatrial.util.gc_pause import gc_paused

with gc_paused():  # collection takes a fifth of the time of these imports
    from seatrial.cli.app import main

__all__ = ["main"]
