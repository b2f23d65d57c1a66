"""The command that finds known failures in logs: explain."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, TextIO

import typer

from seatrial.cli.options import EXIT_NOTHING_KNOWN, EXIT_USAGE, AsJson
from seatrial.cli.output import print_json, stdout
from seatrial.config.argument_paths import is_folder
from seatrial.model import UsageError
from seatrial.util.input_files import open_file

if TYPE_CHECKING:
    from seatrial.diagnose.signature import Match

_POLL_S = 0.5
_MAX_ERROR_LINES = 20
_MAX_TEXT = 300  # characters of a line that are printed


def explain(
    paths: Annotated[
        list[Path],
        typer.Argument(metavar="PATH...", help="Logs (also .gz), directories, run directories or - for stdin."),
    ],
    as_json: AsJson = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new lines of one log.")] = False,
) -> None:
    """Find known failures in logs; print cause, first command to run and fix of each, the earliest failure first.

    Reads plain text and the output of journalctl (also -o json), dmesg, kubectl logs and docker, gzipped or not. In
    directories it reads all text files except source code.
    Dumps of torch's flight recorder (comm_lib_trace_rank_0, nccl_trace_rank_0, or JSON) show which rank did not arrive
    in a collective.

    YAML files in ~/.config/seatrial/signatures, or in the directory $SEATRIAL_SIGNATURES, add signatures of failures or
    change the fields of known ones by their id, such as the action of xid.79 (docs/explain.md).

    Exit codes: 0 a known failure was found, 4 none was found, 2 no log could be read.
    """
    from seatrial.diagnose import explain as explain_matches
    from seatrial.diagnose.flight_recorder import recorder_findings
    from seatrial.diagnose.signatures import signature_errors, signatures
    from seatrial.report.inventory import print_findings
    from seatrial.report.text import clean

    for error in signature_errors():
        print(f"seatrial: {clean(error)}; this signature is not used", file=sys.stderr)
    if follow:
        _follow(paths, as_json)
        return
    logs = _Logs()
    matches = [match for path in paths for match in logs.matches(path)]
    failures = explain_matches(matches, logs.origins)
    hangs, notes = recorder_findings(logs.dumps, logs.errors)
    if logs.binary_files:
        logs.errors.append(f"binary files that are not read: {len(logs.binary_files)}, such as {logs.binary_files[0]}")
    for message in (*logs.errors, *notes):
        print(f"seatrial: {clean(message)}", file=sys.stderr)
    findings = (*hangs, *failures)
    if not findings and not notes and not logs.searched:
        raise typer.Exit(EXIT_USAGE)
    if as_json:
        print_json(findings)
    elif findings:
        print_findings(findings, stdout())
    if not findings:
        _print_unknown(matches, logs, len(signatures()), sys.stderr if as_json else sys.stdout)
        raise typer.Exit(EXIT_NOTHING_KNOWN)


def _print_unknown(matches: Sequence[Match], logs: _Logs, pattern_count: int, file: TextIO) -> None:
    """Print the first lines that look like errors, and the last line of each rank: first that of the earliest rank."""
    from seatrial.diagnose import error_lines, unknown_network
    from seatrial.diagnose.log_origin import last_lines
    from seatrial.report.text import clean
    from seatrial.util.secrets import redacted

    errors = [(match.source, match.line) for match in error_lines(matches, logs.origins)]
    if accepted := [path for path in logs.runs if _is_accepted(path)]:
        lines = [f"No failure: {clean(', '.join(map(str, accepted)))} was ACCEPTED, and no known pattern matches."]
    elif errors:
        lines = [f"No known failure: none of {pattern_count} patterns matches. An unknown failure is possible."]
    else:
        lines = [f"No failure found: none of {pattern_count} patterns matches, and no line looks like an error."]
    if network := unknown_network(matches):
        lines.append(f"{clean(network)}.")
    places = [(clean(source), text) for source, text in errors]
    ends = last_lines(logs.searched, logs.origins) if errors else []
    ranks = [(f"{rank} ({clean(source)})", text) for source, rank, text in ends]
    for heading, rows in (("Not known; the first errors are:", places), ("The last line of each rank:", ranks)):
        lines += [heading] if rows else []
        lines += [f"  {place}: {clean(redacted(text)[:_MAX_TEXT])}" for place, text in rows[:_MAX_ERROR_LINES]]
    print(*lines, sep="\n", file=file)


def _is_accepted(path: Path) -> bool:
    """Whether the record of a run directory has the decision ACCEPTED."""
    from seatrial.model import DecisionValue
    from seatrial.util.input_files import MAX_RECORD_BYTES, read_json

    try:
        record = read_json(path / "trial.json", MAX_RECORD_BYTES)
        return bool(record["decision"]["value"] == DecisionValue.ACCEPTED)
    except (OSError, ValueError, TypeError, KeyError):  # no record, or none that can be read
        return False


class _Logs:
    """Searches logs one by one. Errors are collected, so that the other logs are still read."""

    def __init__(self) -> None:
        from seatrial.diagnose.log_origin import LogOrigins

        self.origins = LogOrigins()
        self.errors: list[str] = []
        self.binary_files: list[str] = []
        self.dumps: dict[Path, None] = {}  # dumps of torch's flight recorder, in the order in which they were found
        self.searched: list[Path] = []
        self.runs: list[Path] = []  # the folders that the user gave

    def matches(self, path: Path) -> Iterator[Match]:
        """Yield the known failures in a log, or in the logs of a folder."""
        from seatrial.diagnose.log_files import BinaryFileError, log_files, open_log
        from seatrial.diagnose.log_search import search
        from seatrial.discover.flight_recorder import is_dump

        try:
            in_folder = is_folder(path)
        except UsageError as error:
            self.errors.append(str(error))
            return
        self.runs += [path] if in_folder else []
        for log in log_files(path, self.errors):
            if is_dump(log):
                self.dumps[log] = None
                continue
            try:
                with open_log(log, in_folder) as (stream, name):
                    yield from search(stream, name, origins=self.origins)
                self.searched.append(log)
            except BinaryFileError as error:
                self.binary_files.append(str(error))  # the text of the error is the log's name
            except (UsageError, ValueError) as error:
                self.errors.append(str(error))


def _follow(paths: list[Path], as_json: bool) -> None:
    """Print each failure when its line is written. Ends at Ctrl-C, or at the end of standard input."""
    from seatrial.diagnose import explain as explain_matches
    from seatrial.diagnose.log_files import STDIN, open_log
    from seatrial.diagnose.log_origin import LogOrigins
    from seatrial.diagnose.log_search import search
    from seatrial.report.inventory import print_findings

    if as_json or len(paths) != 1 or is_folder(paths[0]):
        raise UsageError("--follow reads exactly one log, not a directory; --json cannot be used with it")
    has_findings = False
    try:
        with ExitStack() as stack:
            if paths[0] == STDIN:
                stream, name = stack.enter_context(open_log(STDIN))
            else:
                stream, name = stack.enter_context(closing(_GrowingFile(paths[0]))), str(paths[0])
            origins = LogOrigins()
            for match in search(stream, name, origins=origins):
                findings = explain_matches([match], origins)
                has_findings = has_findings or bool(findings)
                print_findings(findings, stdout())
                sys.stdout.flush()
    except OSError as error:
        raise UsageError(f"cannot read {paths[0]}: {error.strerror or error}") from error
    if not has_findings:
        raise typer.Exit(EXIT_NOTHING_KNOWN)


class _GrowingFile:
    """A log to which lines are still appended: ``read`` waits for whole lines.

    If the file becomes shorter, reading starts again at its beginning. If a log rotation replaces the file, the new
    file is read.
    """

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, open_file(path, pipes=True)
        self._incomplete = b""

    def close(self) -> None:
        self._file.close()

    def read(self, size: int, /) -> bytes:
        while True:
            data = self._incomplete + self._file.read(size)
            end = data.rfind(b"\n") + 1
            self._incomplete = data[end:]
            if end:
                return data[:end]
            if len(data) >= size:  # a line longer than a block
                self._incomplete = b""
                return data
            self._reopen()
            time.sleep(_POLL_S)

    def _reopen(self) -> None:
        opened = os.fstat(self._file.fileno())
        try:
            current = os.stat(self._path)
        except OSError:
            return  # between the removal of the old log and the first line of the new one
        if (current.st_dev, current.st_ino) != (opened.st_dev, opened.st_ino):
            new = open_file(self._path, pipes=True)
            self._file.close()
            self._file = new
        elif self._file.seekable() and opened.st_size < self._file.tell():
            self._file.seek(0)
