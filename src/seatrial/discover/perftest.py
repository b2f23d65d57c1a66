"""Parses the output of ib_write_bw and ib_write_lat (linux-rdma/perftest), of all versions with a table of results.

Versions up to 6.21 print MB/sec in the header, but mean MiB/sec (1 MiB = 2^20 B, as `--help` states).
"""

from __future__ import annotations

import math
import re

BANDWIDTH_TOOL, LATENCY_TOOL = "ib_write_bw", "ib_write_lat"
_COLUMN = re.compile(r"#\w+|(?:BW|MsgRate|CPU_Util|t_|tps|\d+(?:\.\d+)?%)[^\[\]]*(?:\[[^\]]+\])?")
_GBIT_S_PER_UNIT = {"Gb/sec": 1.0, "MB/sec": 8 * 2**20 / 1e9, "MiB/sec": 8 * 2**20 / 1e9}
_VERSION = re.compile(r"Version: *(\S+)")
# An RDMA operation completed with an error, such as "transport retry counter exceeded": RDMA is faulty, not the tool
_TRANSPORT_ERROR = re.compile(r"Completion with error at \w+\s*(Failed status.*)?")
# Lines of stderr that do not say why the tool failed
_NOT_A_REASON = re.compile(
    r"\*|-{5}|Conflicting CPU frequency|Failed to exchange data|Parser function exited|scnt=|Usage"
)


def parse_bandwidth(text: str) -> float:
    """Average Gbit/s in the last line of the table. Raises ValueError without a line, or if the value is not > 0."""
    unit, value = _last_value(text, "BW average")
    if unit not in _GBIT_S_PER_UNIT:
        raise ValueError(f"unknown unit of bandwidth: {unit}")
    return value * _GBIT_S_PER_UNIT[unit]


def parse_latency(text: str) -> float:
    """The median one-way latency in us in the last line of the table. Raises ValueError as ``parse_bandwidth``."""
    return _last_value(text, "t_typical")[1]


def parse_version(text: str) -> str | None:
    """The version in the output of ``ib_write_bw --version``; its exit code differs between versions."""
    match = _VERSION.search(text)
    return match[1] if match else None


def transport_error(text: str) -> str:
    """The error of an RDMA operation, such as ``Failed status 12: wr_id 0 syndrom 0x81``; empty without an error."""
    match = _TRANSPORT_ERROR.search(text)
    return " ".join((match[1] or match[0]).split()) if match else ""


def first_error(stderr: str) -> str:
    """The first line of ``stderr`` with a reason; empty if there is none. Later errors follow from the first one."""
    lines = (line.strip() for line in stderr.splitlines())
    return next((line for line in lines if line and not _NOT_A_REASON.match(line)), "")


def _last_value(text: str, column: str) -> tuple[str, float]:
    """Unit and value of a column in the last line of results. Raises ValueError without it, or if it is not > 0."""
    row = _last_row(text)
    for name, value in row.items():
        title, _, unit = name.partition("[")
        if title.strip() == column:
            if not (math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value:g}, expected a positive number")
            return unit.removesuffix("]"), value
    raise ValueError(f"no column {column!r} among {', '.join(row)}")


def _last_row(text: str) -> dict[str, float]:
    """Column → value of the last line of results. Raises ValueError without such a line."""
    lines = text.splitlines()
    header_index = next((index for index, line in enumerate(lines) if line.lstrip().startswith("#bytes")), None)
    if header_index is None:
        raise ValueError("no table of results")
    columns = [column.strip() for column in _COLUMN.findall(lines[header_index])]
    rows = [line.split() for line in lines[header_index + 1 :] if re.match(r" *\d+ +\d+ ", line)]
    if not rows:
        raise ValueError("the table of results is empty")
    try:
        return dict(zip(columns, map(float, rows[-1]), strict=True))
    except ValueError:
        raise ValueError(f"{len(columns)} columns ({', '.join(columns)}), but the line is {rows[-1]}") from None
