"""Output of commands: results on standard output, progress on standard error."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

    from seatrial.model import Trial


def print_json(value: object) -> None:
    print(json.dumps(value, indent=2))


def stdout() -> Console:
    from seatrial.report.console import Stream

    return Stream()


def stderr() -> Console:
    from seatrial.report.console import Stream

    return Stream(stderr=True)


def print_result(trial: Trial, as_json: bool, report: Path | None = None) -> None:
    """Print a finished trial: its summary and the path of the report, or the record as JSON."""
    from seatrial.report.terminal import summary

    if as_json:
        print(trial.model_dump_json(indent=2))
        return
    summary(trial, stdout())
    if report:
        print(f"Report: {report}")
