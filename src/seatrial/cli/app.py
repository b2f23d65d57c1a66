"""The commands and their exit codes. A command imports what it needs when it is called, so that help is instant."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import traceback
from typing import Annotated

import typer

from seatrial import __version__
from seatrial.cli import machine, training, trial
from seatrial.cli.options import EXIT_BROKEN_PIPE, EXIT_CODES, EXIT_INTERRUPTED, EXIT_USAGE
from seatrial.model import DecisionValue, SeatrialError, UsageError
from seatrial.util import signals

app = typer.Typer(
    help="Acceptance test for GPU clusters: from powered on to accepted, or what stands in the way.\n\n"
    "Exit codes: 0 accepted, 1 rejected, 2 usage or config error, 3 incomplete, 130 interrupted.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
)
baseline = typer.Typer(no_args_is_help=True, help="What this site's good runs look like.")


def _print_version(wanted: bool) -> None:
    if wanted:
        print(f"seatrial {__version__}")
        raise typer.Exit


@app.callback()
def _all_words(
    version: Annotated[bool, typer.Option("--version", callback=_print_version, is_eager=True)] = False,
) -> None:
    del version


@baseline.callback()
def _baseline() -> None:
    """Keeps ``learn`` a command of its own: typer would merge a group that has only one."""


for command in (
    trial.run,
    machine.discover,
    machine.checks,
    trial.render,
    training.train,
    training.evaluate,
    trial.judge,
    trial.report,
    machine.explain,
    trial.schema,
):
    app.command()(command)
baseline.command()(trial.learn)
app.add_typer(baseline, name="baseline")


def _say(text: str, code: int) -> int:
    with contextlib.suppress(OSError):  # nowhere to say it: the exit code still tells
        print(f"seatrial: {text}", file=sys.stderr)
    return code


def _prepare() -> None:
    """Signals and streams, as we need them."""
    signals.interrupt_once()
    for stream in (sys.stdout, sys.stderr):  # a path may hold any bytes, and a terminal may know only ASCII
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def main() -> None:
    _prepare()
    try:
        code = app(standalone_mode=False)
    except UsageError as error:
        code = _say(str(error), EXIT_USAGE)
    except SeatrialError as error:
        code = _say(str(error), EXIT_CODES[DecisionValue.INCOMPLETE])
    except BrokenPipeError:  # who reads our output has gone, as `| head` does; that says nothing of the cluster
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort):
        code = _say("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # typer's usage errors, a class that its versions keep in different places
        if hasattr(error, "show"):
            error.show()
            code = EXIT_USAGE
        else:  # a defect of ours, or a full disk behind stdout: Python's own exit code 1 would read as REJECTED
            code = _say(traceback.format_exc(), EXIT_CODES[DecisionValue.INCOMPLETE])
    sys.exit(code)
