"""Commands, help texts and exit codes. A command imports its packages when called, so that help is fast."""

from __future__ import annotations

import contextlib
import copy
import inspect
import io
import os
import sys
import traceback
from collections.abc import Callable
from typing import Annotated, Any

import typer

from seatrial import __version__
from seatrial.cli import handover, machine, site, training, trial
from seatrial.cli.drill import drill
from seatrial.cli.examples import EXAMPLES
from seatrial.cli.explain import explain
from seatrial.cli.hook import hook
from seatrial.cli.options import EXIT_BROKEN_PIPE, EXIT_INCOMPLETE, EXIT_INTERRUPTED, EXIT_USAGE
from seatrial.cli.output import discard
from seatrial.cli.readmit import readmit
from seatrial.cli.watch import watch
from seatrial.model import SeatrialError, UsageError
from seatrial.util import signals
from seatrial.util.secrets import redacted, secret_values
from seatrial.util.text import printable

app = typer.Typer(
    help="Acceptance test for GPU clusters: measures nodes, fabric and training, and decides ACCEPTED, REJECTED or "
    "INCOMPLETE.\n\n"
    "Exit codes: 0 accepted, 1 rejected, 2 usage or config error, 3 incomplete, 130 interrupted.",
    epilog=EXAMPLES["seatrial"],
    context_settings={"help_option_names": ["-h", "--help"]},
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)


def _print_version(requested: bool) -> None:
    if requested:
        print(f"seatrial {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    del version


def _command(group: typer.Typer, command: Callable[..., None], name: str, panel: str | None = None) -> None:
    """Add a command. Its help is its docstring with one line per paragraph: typer would print the source's line breaks.

    ``name``: the words of the command line, such as ``train run``.
    """
    text = "\n\n".join(" ".join(paragraph.split()) for paragraph in (inspect.getdoc(command) or "").split("\n\n"))
    # `train run` also accepts the flags of training scripts, such as --max_steps 10: they set keys of the config
    settings = {"allow_extra_args": True, "ignore_unknown_options": True} if name == "train run" else None
    options: Any = {"hidden": name == "schema", "rich_help_panel": panel, "context_settings": settings}
    group.command(name.split()[-1], help=text, epilog=EXAMPLES[name], **options)(command)


COMMANDS: dict[str, tuple[Callable[..., None], ...]] = {  # by heading in the help
    "Run": (trial.run, trial.judge, explain, drill),
    "Look": (machine.discover, trial.render, watch, trial.ticket, trial.schema),
    "Hand over": (handover.bundle, handover.verify, handover.compare, handover.history),
    "Operate": (site.init, readmit),
}
GROUPS: dict[str, tuple[str, str, tuple[Callable[..., None], ...]]] = {  # name → heading, help, commands
    "show": ("Look", "Print the checks with their rules, or the reference values of GPU models.", machine.SHOW),
    "baseline": ("Operate", "Reference values of this site, learned from accepted runs.", (trial.learn,)),
    "train": ("Train", "Train a model by hand: prepare rows, train, and compare scores.", training.TRAIN),
}

for heading, commands in COMMANDS.items():
    for command in commands:
        _command(app, command, command.__name__, heading)
for name, (heading, text, commands) in GROUPS.items():
    group = typer.Typer(no_args_is_help=True, help=text)
    group.callback()(lambda: None)  # otherwise typer would merge a group into its only command
    for command in commands:
        _command(group, command, f"{name} {command.__name__}")
    app.add_typer(group, name=name, rich_help_panel=heading)
app.add_typer(hook, name="hook", epilog=EXAMPLES["hook"], rich_help_panel="Operate")


def _add_rejected_value(error: Any) -> None:
    """Add the rejected value to a usage error of typer, if its message does not name the value."""
    from pydantic import ValidationError

    if isinstance(error.__cause__, ValidationError):
        value = repr(error.__cause__.errors()[0]["input"])
        if value not in error.message:
            error.message = f"{error.message} (got {value})"


def _print_error(text: str, code: int) -> int:
    """Print ``text`` on standard error, without secrets and with control characters as escapes; return ``code``."""
    lines = "\n".join(map(printable, redacted(text, secret_values()).split("\n")))
    with contextlib.suppress(OSError):  # standard error is closed: the exit code still reports the error
        print(f"seatrial: {lines}", file=sys.stderr)
    return code


def _prepare() -> None:
    """Set up signal handlers, open closed standard streams, and escape characters that a stream cannot encode."""
    signals.interrupt_once()
    _open_closed_streams()
    for stream in (sys.stdout, sys.stderr):  # a path may contain any bytes, a terminal may accept only ASCII
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="backslashreplace")


def _open_closed_streams() -> None:
    """Open /dev/null for standard descriptors that are closed: otherwise a pipe or a file would get their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(descriptor, True)
    os.close(descriptor)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", closefd=False)


def _app_with_only(name: str | None) -> typer.Typer:
    """Return ``app`` with only this command or group, since typer takes 25 ms for the options of all commands.

    Return ``app`` unchanged if ``name`` is neither: an option, an unknown word or None.
    """
    single = copy.copy(app)
    single.registered_commands = [info for info in app.registered_commands if info.name == name]
    single.registered_groups = [info for info in app.registered_groups if info.name == name]
    return single if single.registered_commands or single.registered_groups else app


def main() -> None:
    _prepare()
    try:
        code = _app_with_only(next(iter(sys.argv[1:]), None))(standalone_mode=False)
        sys.stdout.flush()
    except UsageError as error:
        code = _print_error(str(error), EXIT_USAGE)
    except SeatrialError as error:
        code = _print_error(str(error), EXIT_INCOMPLETE)
    except (BrokenPipeError, SystemExit) as error:
        # The reader of the output has exited, as in `| head`. typer would exit with code 1, which means REJECTED
        if isinstance(error, SystemExit) and not isinstance(error.__context__, BrokenPipeError):
            raise
        discard(sys.stdout)
        code = EXIT_BROKEN_PIPE
    except (KeyboardInterrupt, typer.Abort) as error:
        if isinstance(error.__cause__, EOFError):  # the end of a truncated file; typer takes it for Ctrl-D
            code = _print_error(traceback.format_exc(), EXIT_INCOMPLETE)
        else:
            code = _print_error("interrupted", EXIT_INTERRUPTED)
    except Exception as error:  # typer's usage errors; the module of the class depends on the version
        if hasattr(error, "show"):
            _add_rejected_value(error)
            error.show()
            code = EXIT_USAGE
        else:  # a defect of seatrial, or a full disk behind stdout: Python's exit code 1 would mean REJECTED
            code = _print_error(traceback.format_exc(), EXIT_INCOMPLETE)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except OSError:
            discard(stream)
    sys.exit(code)
