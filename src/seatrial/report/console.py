"""Output streams."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.text import Text


class Stream(Console):
    """A rich console that raises BrokenPipeError, where rich exits with code 1.

    Lines in a file have no trailing blanks: rich pads the last column of a table. Rich's emoji codes are off, since
    ``:cd:`` in a MAC address is one of them.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)

    def print(self, *objects: Any, **options: Any) -> None:
        if self.is_terminal:
            super().print(*objects, **options)
            return
        with self.capture() as capture:
            super().print(*objects, **options)
        lines = (line.rstrip(" ") for line in capture.get().split("\n"))
        super().print(Text("\n".join(lines)), end="", soft_wrap=True)

    def on_broken_pipe(self) -> None:
        raise BrokenPipeError
