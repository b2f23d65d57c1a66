"""The command line."""

from seatrial.cli.app import main

__all__ = ["main"]
