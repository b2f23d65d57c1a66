"""The terminal, or what stands in its place."""

from __future__ import annotations

from rich.console import Console


class Stream(Console):
    """A console that leaves it to us what a reader who has gone means: rich ends the program, with exit code 1."""

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
