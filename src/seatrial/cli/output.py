"""Output of commands: results on standard output, progress on standard error."""

from __future__ import annotations

import json
import os
import textwrap
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from seatrial.model import Trial


def print_json(value: object) -> None:
    """Print a document, in which records are objects."""
    print(json.dumps(value, indent=2, default=lambda record: record.model_dump(mode="json")))


def discard(stream: TextIO) -> None:
    """Redirect a stream to /dev/null: Python would flush it again at its end, fail, and exit with 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def print_lines(lines: Iterable[str]) -> None:
    """Print lines. On a terminal, wrap them between words; a line that ends with a command in backticks stays whole."""
    console = stdout()
    for line in lines:
        indent = " " * (len(line) - len(line.lstrip()) + 2)
        wrapped = textwrap.wrap(
            line, console.width, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False
        )
        print("\n".join(wrapped) if console.is_terminal and not line.endswith("`") else line)


def stdout() -> Console:
    from seatrial.report.console import Stream

    return Stream()


def stderr() -> Console:
    from seatrial.report.console import Stream

    return Stream(stderr=True)


def print_result(trial: Trial, as_json: bool, run_dir: Path | None = None, *, verbose: bool = False) -> None:
    """Print a finished trial: its summary, or the record as JSON. Commands in the summary name ``run_dir``."""
    from seatrial.report.terminal import summary

    if as_json:
        print(trial.model_dump_json(indent=2))
    else:
        summary(trial, stdout(), run_dir, verbose=verbose)
