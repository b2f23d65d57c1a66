"""Parses the output of nvbandwidth 0.1 to 0.10: text, or JSON (option -j).

Formats: NVIDIA/nvbandwidth output.cpp, json_output.cpp and inline_common.h (the matrix).
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

_MAX_LINE = 2**12  # characters of a line that are read; a row of 72 GPUs has 730
_MAX_MATRICES = 2**12
_MAX_TITLE, _MAX_MESSAGE = 200, 300  # characters that are kept
_TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_RUNNING = re.compile(r"\bRunning (\w+)\.")
_DEVICE = re.compile(r"\bDevice (\d{1,6}): (.+?)(?: \([0-9a-fA-F:.]+\))?\s*$")
_PROCESS_DEVICE = re.compile(r"\bProcess\s+(\d{1,6}) \(([^)]+)\): device\s+(\d+): (.+?)(?: \([0-9a-fA-F:.]+\))?\s*$")
_JSON_DEVICE = re.compile(r"(\d+): (.+?)(?: \([0-9a-fA-F:.]+\))?(?:: \((.*)\))?")
_VERSION = re.compile(r"nvbandwidth Version: (\S{1,40})")
_UNITS = ("(GB/s)", "(ns)", "(us)")
_SUM = re.compile(r"\b(?:SUM|&&&& PERF) (\w+) ([\d.]+)")
_STATUS = re.compile(r"\b(WAIVED|Waived|ERROR|Error|NOT FOUND|Not Found)\b:?\s*(.*)")
_FAILURE = re.compile(
    r"ASSERT in expression.*|Invalid value when checking the pattern.*|(?:\[CUDA_ERROR_\w+\]|CUDA_ERROR_\w+).*"
)
_CELL = re.compile(r"N/A|\d+(?:\.\d+)?(?:e[+-]?\d+)?")
_PART = re.compile(r"_(read1|read2|write1|write2|total)$")


@dataclass
class Matrix:
    """One result: rows of values. A value is None where a pair of GPUs has none, such as a GPU and itself.

    ``name``: the testcase; the total of a bidirectional testcase has the suffix ``_total``. ``title`` names unit and
    direction, such as ``memcpy CE GPU(row) -> GPU(column) bandwidth (GB/s)``. ``is_complete``: whether all rows of the
    matrix were read.
    """

    name: str
    title: str
    rows: list[list[float | None]] = field(default_factory=list)
    is_complete: bool = False


def is_report(document: Any) -> bool:
    return isinstance(document, dict) and isinstance(document.get("nvbandwidth"), dict)


def parse_json(document: dict[str, Any]) -> NvbandwidthOutput:
    """The results of a report; values of another type than nvbandwidth writes are omitted."""
    report, output = document["nvbandwidth"], NvbandwidthOutput()
    output.version = str(report.get("version", ""))[:_MAX_MESSAGE]
    output.failure = str(report.get("error") or "")[:_MAX_MESSAGE]
    devices, testcases = report.get("GPU Device list"), report.get("testcases")
    for device in devices if isinstance(devices, list) else []:
        if match := _JSON_DEVICE.fullmatch(str(device)[:_MAX_MESSAGE]):
            output.device_by_index[len(output.device_by_index)] = match[2]
            output.hosts |= {match[3]: None} if match[3] else {}
    for testcase in testcases if isinstance(testcases, list) else []:
        if not isinstance(testcase, dict) or not isinstance(testcase.get("name"), str):
            continue
        output.testcase, rows = testcase["name"], testcase.get("bandwidth_matrix")
        status, title = str(testcase.get("status", "")), str(testcase.get("bandwidth_description", ""))
        if isinstance(rows, list) and rows and status not in ("Error", "ERROR"):
            values = [[_cell(cell) for cell in row] for row in rows if isinstance(row, list)]
            name, width = output.testcase, max(map(len, values), default=0)
            # a bidirectional copy writes three square matrices, one below the other: both directions and their total
            if "Total" in title and len(values) == 3 * width:
                name, values = f"{name}_total", values[2 * width :]
            output.matrices.append(Matrix(name, title, values, is_complete=True))
        elif status not in ("Waived", "Passed"):
            output.failures[output.testcase] = str(testcase.get("error") or f"status {status or 'unknown'}")[
                :_MAX_MESSAGE
            ]
    return output


def parse(lines: Iterable[str]) -> NvbandwidthOutput:
    """The results in text output. Lines of other programs are ignored."""
    output = NvbandwidthOutput()
    for line in lines:
        output.read(line)
    return output.finish()


class NvbandwidthOutput:
    """The content of an output. Text is read line by line.

    ``failures``: testcase → message of a testcase that failed or has no result. ``device_by_index``: models of the
    GPUs; in a run on several nodes, by the number of the process. ``hosts``: names of the nodes, empty if the output
    has none. ``failure``: the first error message outside of a testcase. ``testcase``, ``matrix``: the current ones;
    ``matrices`` includes ``matrix``. ``column_count``: 0 before the line with the numbers of the columns.
    """

    def __init__(self) -> None:
        self.version, self.testcase, self.failure = "", "", ""
        self.device_by_index: dict[int, str] = {}
        self.hosts: dict[str, None] = {}  # a set in the order of the lines
        self.matrices: list[Matrix] = []
        self.matrix: Matrix | None = None
        self.column_count = 0
        self.failures: dict[str, str] = {}

    @property
    def devices(self) -> tuple[str, ...]:
        """The models of the GPUs, in the order of their indices."""
        return tuple(device for _, device in sorted(self.device_by_index.items()))

    @property
    def is_nvbandwidth(self) -> bool:
        return bool(self.version or self.matrices)

    def read(self, line: str) -> None:
        line = _TERMINAL.sub("", line[:_MAX_LINE]).rstrip()
        if match := _RUNNING.search(line):
            self._end_matrix()
            self.testcase = match[1]
        elif title := _title(line):
            self._end_matrix()
            self._start_matrix(title)
        elif match := _SUM.search(line):
            self._end_matrix(match[1])
        elif match := _PROCESS_DEVICE.search(line):
            self.device_by_index[int(match[1])] = match[4]
            self.hosts[match[2]] = None
        elif match := _DEVICE.search(line):
            self.device_by_index[int(match[1])] = match[2]
        elif match := _VERSION.search(line):
            self.version = match[1]
        elif match := _FAILURE.search(line):
            self._fail(match[0])
        elif self.matrix:
            self._add_row(self.matrix, line)
        elif self.testcase and (match := _STATUS.match(line.strip())) and not match[1].lower().startswith("waived"):
            self._fail(f"{match[1]} {match[2]}".strip())

    def finish(self) -> NvbandwidthOutput:
        self._end_matrix()
        return self

    def _fail(self, text: str) -> None:
        if self.testcase:
            self.failures.setdefault(self.testcase, text[:_MAX_MESSAGE])
        else:
            self.failure = self.failure or text[:_MAX_MESSAGE]

    def _start_matrix(self, title: str) -> None:
        self.column_count = 0
        self.matrix = Matrix(self.testcase, title)
        if len(self.matrices) < _MAX_MATRICES:
            self.matrices.append(self.matrix)

    def _add_row(self, matrix: Matrix, line: str) -> None:
        """Read one line of a matrix: the column numbers, or a row (the row number, then one value per column)."""
        cells = line.split()
        if not self.column_count:
            self.column_count = sum(cell.isdecimal() for cell in cells)
            return
        values = cells[-self.column_count :]
        is_row = len(cells) > self.column_count and cells[-self.column_count - 1].isdecimal()
        if is_row and all(_CELL.fullmatch(cell) for cell in values):
            matrix.rows.append([_cell(cell) for cell in values])

    def _end_matrix(self, name: str = "") -> None:
        """Finish the current matrix, if there is one. ``name``: the name in its summary line; empty without this line.

        A bidirectional testcase has one matrix per direction and their total. The matrix of one direction is dropped.
        """
        matrix, self.matrix = self.matrix, None
        if matrix is None:
            return
        matrix.name = name or matrix.name
        is_square = "GPU(row)" in matrix.title and "GPU(column)" in matrix.title
        matrix.is_complete = 0 < len(matrix.rows) == (self.column_count if is_square else 1)
        if (match := _PART.search(matrix.name)) and match[1] != "total":
            self.matrices = [other for other in self.matrices if other is not matrix]


def _title(line: str) -> str:
    """The title of a matrix (with direction and unit) if ``line`` is the line above a matrix; empty for other lines."""
    text = line.strip()
    is_title = text.endswith(_UNITS) and ("(row)" in text or "(column)" in text)
    return text[-_MAX_TITLE:] if is_title else ""


def _cell(value: Any) -> float | None:
    """The number in a cell, whose value can be a text; None for N/A and for all but finite numbers >= 0."""
    try:
        number = float(value) if isinstance(value, str | int | float) and not isinstance(value, bool) else math.nan
    except (ValueError, OverflowError):
        return None
    return number if 0 <= number < math.inf else None
