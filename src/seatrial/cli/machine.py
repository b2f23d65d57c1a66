"""Commands that read this machine, the list of checks, or logs: discover, checks, explain."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from seatrial.cli.options import AsJson
from seatrial.cli.output import print_json, stdout
from seatrial.model import UsageError

if TYPE_CHECKING:
    from seatrial.model import Finding


def discover(as_json: AsJson = False) -> None:
    """Print hardware and software of this machine. Reads only; causes no load."""
    from seatrial.pipeline.survey import discover as discover_machine
    from seatrial.report.inventory import print_inventory

    facts = discover_machine().facts
    if as_json:
        print_json(facts)
    else:
        print_inventory(facts, stdout())


def checks(as_json: AsJson = False) -> None:
    """List all checks with scope, needs and rules."""
    from seatrial.checks import catalog
    from seatrial.report.inventory import checks_as_json, print_checks

    if as_json:
        print_json(checks_as_json(catalog()))
    else:
        print_checks(catalog(), stdout())


def explain(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Log files, run directories or - for standard input.")
    ],
    as_json: AsJson = False,
) -> None:
    """Find known failures in logs: cause, first command, fix."""
    from seatrial.diagnose.signatures import signatures
    from seatrial.pipeline.run_directory import logs
    from seatrial.report.inventory import print_findings

    findings = [finding for path in paths for log in logs(path) for finding in _explained(log)]
    if as_json:
        print_json([finding.model_dump(mode="json") for finding in findings])
    else:
        print_findings(findings, len(signatures()), stdout())


_STDIN = Path("-")


def _explained(log: Path) -> tuple[Finding, ...]:
    """The findings of a log or of standard input. Raises UsageError for an unreadable file."""
    from seatrial.diagnose import explain as explain_log
    from seatrial.util.input_files import open_file

    try:
        if log == _STDIN:
            if sys.stdin is None:  # Python's value for a closed stream
                raise UsageError("standard input is closed")
            return explain_log(sys.stdin.buffer, "standard input")
        with open_file(log, pipes=True) as file:
            return explain_log(file, str(log))
    except OSError as error:
        raise UsageError(f"cannot read {log}: {error.strerror or error}") from error
