"""The console that writes text to an output stream."""

from __future__ import annotations

import os
from typing import Any

from rich.console import Console
from rich.text import Text

UNLIMITED = 10_000  # columns


class Stream(Console):
    """A rich console that raises BrokenPipeError for a closed pipe, while rich itself exits with code 1.

    If the output is not a terminal, lines are not wrapped (rich would assume 80 columns), and trailing blanks are
    removed: rich pads the last column of a table with blanks. Rich's emoji codes are off, since ``:cd:`` in a MAC
    address is an emoji code.
    """

    def __init__(self, **options: Any) -> None:
        super().__init__(emoji=False, **options)
        if not self.is_terminal and "width" not in options and "COLUMNS" not in os.environ:
            self.width = UNLIMITED

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
