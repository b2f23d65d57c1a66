"""The command that shows a running job: watch."""

from __future__ import annotations

import sys
import time
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli.options import AsJson

if TYPE_CHECKING:
    from seatrial.model.job_status import JobStatus
    from seatrial.pipeline.watch import Watcher


def watch(
    target: Annotated[
        str,
        typer.Argument(
            metavar="JOBID|DIR", help="A job ID of Slurm, a run directory, or a directory of seatrial train run."
        ),
    ],
    once: Annotated[bool, typer.Option("--once", help="Print the status once, also on a terminal.")] = False,
    as_json: AsJson = False,
    interval: Annotated[float, typer.Option(min=2, max=3600, metavar="SECONDS", help="Time between two readings.")] = 5,
    lines: Annotated[int, typer.Option(min=0, max=1000, help="Last lines of the log.")] = 10,
) -> None:
    """Show GPU use, speed of the training steps and last log lines of a running job; Ctrl-C ends the view.

    On a terminal the view is refreshed until the job ends; otherwise the status is printed once. The job is not
    changed: GPU use is read by nvidia-smi in an overlapping step of the Slurm job (srun --overlap), or from the
    telemetry of the run directory. docs/watch.md explains the fields.

    Exit codes: 0 the status was shown, 2 unknown job or directory or no slurm.conf, 3 Slurm does not answer.
    """
    from seatrial.pipeline.watch import Watcher

    refreshes = sys.stdout.isatty() and not (once or as_json)
    with Watcher(target, lines, interval if refreshes else 0.0) as watcher:
        status = watcher.status()
        if as_json:
            print(status.model_dump_json(indent=2))
        elif not refreshes or status.ended:
            _print(status)
        else:
            _refresh(watcher, status, interval)


def _print(status: JobStatus) -> None:
    from seatrial.report.watch import status_lines

    for line in status_lines(status):
        print(line)


def _refresh(watcher: Watcher, status: JobStatus, interval_s: float) -> None:
    """Show the status until the job ends, and then once more; an error of Slurm meanwhile is part of the view."""
    from rich.live import Live
    from rich.text import Text

    from seatrial.cli.output import stdout
    from seatrial.model import SeatrialError
    from seatrial.report.watch import status_lines
    from seatrial.util.text import error_text

    with Live(console=stdout(), screen=True, auto_refresh=False) as live:
        while not status.ended:
            error = ""
            shown = "\n".join(status_lines(status))
            while True:
                now = time.strftime("%H:%M:%S")
                header = f"{now}, every {interval_s:g} s; Ctrl-C ends the view, not the job"
                live.update(Text("\n".join(filter(None, [header, error, shown]))), refresh=True)
                time.sleep(interval_s)
                try:
                    status = watcher.status()
                    break
                except SeatrialError as failure:
                    error = f"not updated: {error_text(failure)}"
    _print(status)
