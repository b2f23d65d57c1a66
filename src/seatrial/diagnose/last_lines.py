"""The last line of each rank of a log: what a rank did before it went silent."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from seatrial.diagnose.log_origin import LogOrigins
from seatrial.util.input_files import GZIP_MAGIC, open_file
from seatrial.util.log_time import log_time

_END_BYTES = 2**18  # of each log
_LINE_BYTES = 400


def last_lines(logs: Iterable[Path], origins: LogOrigins) -> list[tuple[str, str, str]]:
    """(log, rank, line) of the last line of each rank that the ends of the logs name; the earliest rank first.

    A pipe, a packed file and a log of one rank have none.
    """
    ends: dict[str, tuple[float, str, str]] = {}  # rank → time or number of its last line, log, line
    number = 0
    for log in logs:
        for line in _end(log):
            number += 1
            if rank := origins.origin(line, f"{log}:0").name:
                ends[rank] = (log_time(line) or float(number), str(log), line)
    rows = sorted((order, log, rank, line) for rank, (order, log, line) in ends.items())
    return [(log, rank, line) for _, log, rank, line in rows] if len(rows) > 1 else []


def _end(log: Path) -> list[str]:
    """The last lines of a log; none of a pipe or packed file."""
    try:
        with open_file(log) as file:
            if file.read(len(GZIP_MAGIC)) == GZIP_MAGIC:
                return []
            file.seek(-min(_END_BYTES, file.seek(0, 2)), 2)
            data = file.read(_END_BYTES)
    except OSError:
        return []
    lines = data.replace(b"\r", b"\n").splitlines()
    return [line[:_LINE_BYTES].decode("utf-8", errors="replace").strip() for line in lines if line.strip()]
