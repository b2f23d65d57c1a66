"""The command that finds known failures in logs: explain."""

from __future__ import annotations

import gzip
import os
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, BinaryIO, TypeVar, cast

import typer

from seatrial.cli.options import EXIT_NOTHING_KNOWN, EXIT_USAGE, AsJson
from seatrial.cli.output import print_json, stdout
from seatrial.model import UsageError

if TYPE_CHECKING:
    from seatrial.diagnose.signatures import Match

_T = TypeVar("_T")
_STDIN = Path("-")
_POLL_S = 0.5
_GZIP_MAGIC = b"\x1f\x8b"


def explain(
    paths: Annotated[
        list[Path], typer.Argument(metavar="PATH...", help="Logs (also .gz), folders, run directories or - for stdin.")
    ],
    as_json: AsJson = False,
    follow: Annotated[bool, typer.Option("--follow", "-f", help="Wait for new lines of one log.")] = False,
) -> None:
    """Find known failures in logs; print the cause, the first command to run and the fix of each, the earliest first.

    Dumps of torch's flight recorder (comm_lib_trace_rank_0, nccl_trace_rank_0, or JSON) name the rank that did not
    arrive in a collective.

    YAML files in ~/.config/seatrial/signatures, or in the folder $SEATRIAL_SIGNATURES, add signatures of failures or
    change the fields of known ones by their id, such as the action of xid.79.

    Exit codes: 0 a known failure was found, 4 none, 2 if no log could be read.
    """
    from seatrial.diagnose import explain as explain_matches
    from seatrial.diagnose.flight_recorder import recorder_findings
    from seatrial.diagnose.signatures import signatures
    from seatrial.discover.flight_recorder import is_dump
    from seatrial.pipeline.run_directory import log_files
    from seatrial.report.inventory import print_findings

    if follow:
        _follow(paths, as_json)
        return
    errors: list[str] = []
    logs = [log for path in paths for log in _without_errors(partial(log_files, path), errors)]
    unread_folders = len(errors)
    dumps = {log: None for log in logs if log != _STDIN and is_dump(log)}
    hangs, notes = recorder_findings(dumps, errors)
    texts = [log for log in logs if log not in dumps]
    failures = explain_matches(match for log in texts for match in _without_errors(partial(_search, log), errors))
    for message in (*errors, *notes):
        print(f"seatrial: {message}", file=sys.stderr)
    findings = (*hangs, *failures)
    if not findings and len(errors) - unread_folders == len(logs):
        raise typer.Exit(EXIT_USAGE)
    if as_json:
        print_json([finding.model_dump(mode="json") for finding in findings])
    else:
        print_findings(findings, len(signatures()), stdout())
    if not findings:
        raise typer.Exit(EXIT_NOTHING_KNOWN)


def _without_errors(read: Callable[[], Iterable[_T]], errors: list[str]) -> Iterator[_T]:
    """The items of ``read()``; an error ends them and is added to ``errors``, so that the other logs are still read."""
    try:
        yield from read()
    except (UsageError, ValueError) as error:
        errors.append(str(error))


def _search(log: Path) -> Iterator[Match]:
    """The failures in a log, or in standard input. Raises UsageError if it cannot be read to its end."""
    from seatrial.diagnose.log_search import search

    with _open(log) as (file, name):
        yield from search(file, name)


@contextmanager
def _open(log: Path) -> Iterator[tuple[BinaryIO, str]]:
    """The log, unpacked if it is gzipped, and its name. Raises UsageError."""
    from seatrial.util.input_files import LimitedGzip, open_file

    name = "standard input" if log == _STDIN else str(log)
    try:
        if log == _STDIN:
            if sys.stdin is None:  # Python's value for a closed stream
                raise UsageError("standard input is closed")
            yield sys.stdin.buffer, name
            return
        with open_file(log, pipes=True) as file:
            is_gzip = file.seekable() and file.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            if file.seekable():
                file.seek(0)
            yield (cast("BinaryIO", LimitedGzip(file)) if is_gzip else file), name
    except (EOFError, gzip.BadGzipFile, zlib.error) as error:
        raise UsageError(f"{name}: the gzip data is truncated or damaged: {error}") from error
    except OSError as error:
        raise UsageError(f"cannot read {name}: {error.strerror or error}") from error


def _follow(paths: list[Path], as_json: bool) -> None:
    """Print each failure when its line is written. Ends at Ctrl-C, or at the end of standard input."""
    from seatrial.diagnose import explain as explain_matches
    from seatrial.diagnose.log_search import search
    from seatrial.report.inventory import print_findings

    if as_json or len(paths) != 1 or paths[0].is_dir():
        raise UsageError("--follow reads one log, and not with --json")
    with _open(paths[0]) as (file, name):
        has_findings = False
        for match in search(file if paths[0] == _STDIN else _GrowingFile(file), name):
            findings = explain_matches([match])
            has_findings = has_findings or bool(findings)
            print_findings(findings, 0, stdout())
            sys.stdout.flush()
    if not has_findings:
        raise typer.Exit(EXIT_NOTHING_KNOWN)


class _GrowingFile:
    """A log that is still written: ``read`` waits for whole lines, and starts again if the file becomes shorter."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._incomplete = b""

    def read(self, size: int, /) -> bytes:
        while True:
            data = self._incomplete + self._file.read(size)
            end = data.rfind(b"\n") + 1
            self._incomplete = data[end:]
            if end or len(data) >= size:
                return data[:end] if end else self._take()
            if os.fstat(self._file.fileno()).st_size < self._file.tell():
                self._file.seek(0)
            time.sleep(_POLL_S)

    def _take(self) -> bytes:
        data, self._incomplete = self._incomplete, b""
        return data
