"""The terminal, or what stands in its place."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text


class Stream(Console):
    """A console that leaves it to us what a reader who has gone means: rich ends the program, with exit code 1.

    In a file, lines end where their text does: rich fills the last column of a table with blanks.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as padded:
            super().print(*objects, **options)
        lines = (line.rstrip(" ") for line in padded.get().split("\n"))
        super().print(Text("\n".join(lines)), end="", soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
