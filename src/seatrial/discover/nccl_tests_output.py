"""Parses the text output of nccl-tests (all_reduce_perf and the other *_perf programs), versions 2.0 to 2.19.

The text may have the prefixes of mpirun, srun, pdsh or kubectl, colours, NCCL's log in between, and rows that are
broken into several lines. Formats: NVIDIA/nccl-tests src/common.cu (since 2.17.3 src/util.cu).

A number in a pattern has at most the digits that an intact output can have, so that damaged text cannot give huge
integers.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from seatrial.discover import nccl_log
from seatrial.discover.nccl_log import NcclLog

_ELEMENT_BYTES = {
    **dict.fromkeys(("int8", "uint8", "char", "f8e4m3", "f8e5m2", "fp8_e4m3", "fp8_e5m2"), 1),
    **dict.fromkeys(("half", "bfloat16"), 2),
    **dict.fromkeys(("int", "int32", "uint32", "float"), 4),
    **dict.fromkeys(("int64", "uint64", "double"), 8),
}
REDUCTIONS = ("sum", "prod", "max", "min", "avg", "mulsum")
_MAX_NCCL_LOG = 2**23  # characters of NCCL's log that are kept; its first lines have versions, networks, connections
_MAX_LINE = 2**11  # characters of a line that are read; lines of nccl-tests have about 200
_MAX_ROWS = 2**16  # rows of one table; a sweep has fewer than 100
_MAX_DEVICES = 2**17  # GPUs of one run
_TERMINAL = re.compile(r"\x1b\[[0-?]*[ -/]*[@-~]")
_TYPE = "|".join(sorted(_ELEMENT_BYTES, key=len, reverse=True))
# size, count and type, then reduction and root where the version of nccl-tests prints them
_ROW = re.compile(
    rf"(?<![\w.])(\d{{1,19}})\s+(\d{{1,19}})\s+({_TYPE})(?=\s|$|\[)(?:\s+({'|'.join(REDUCTIONS)}|none)(?=\s|$|\[))?"
)
_ROOT = re.compile(r"\s+(-1|\d{1,6}(?!\.?\d))")
# In a table without a header, the first token after the reduction is the root if the reduction is followed by one of
# these numbers of tokens. 9: the root and 2 × 4 columns. 10: these and one token of other text. 17: the root and 2 × 8
# columns (with times of single iterations).
_TOKEN_COUNTS_WITH_ROOT = (9, 10, 17)
_NUMBER = re.compile(r"N/A|[-+]?(?:nan|inf|\d+(?:\.\d*)?(?:[eE][-+]?\d+)?)", re.IGNORECASE)
_HEADER = re.compile(r"\bsize\s.*\b(?:cpu)?time\s.*\balgbw\s.*\bbusbw\b")
_BEFORE_TIME = ("size", "count", "type", "redop", "root")
_VALUES = ("time", "algbw", "busbw", "wrong")  # of a place; before 2.13 the last one is named error
# Out of place and in place: the positions of these values among the numbers of a row, in a table without a header
_PLACES = ((0, 1, 2, 3), (4, 5, 6, 7))
_RUN = re.compile(
    r"nThread\s+\d+\s+nGpus\s+\d+\s+minBytes\s+\d+\s+maxBytes\s+(\d{1,19})\s+step:\s*(\d{1,19})\s*\((\w+)\)"
)
_NOT_CHECKED = re.compile(r"validation:\s*0\b")
_REDUCED = re.compile(r"Reducing maxBytes to (\d{1,19})")
_DEVICE = re.compile(
    r"Rank\s+(\d{1,12})\s+(?:Group\s+(\d{1,12})\s+)?Pid\s+(\d{1,12})\s+on\s+(\S+)\s+device\s+(\d{1,12})\s+"
    r"\[([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})?[^\]]*\]\s*(.*)"
)
_PROGRAMS = "all_reduce all_gather reduce_scatter alltoallv alltoall broadcast reduce gather scatter sendrecv hypercube"
_PROGRAM = re.compile(rf"\b({_PROGRAMS.replace(' ', '|')})_perf(?:_mpi)?\b")
_STARTING = re.compile(r"Collective test starting:\s*(?:\S*/)?(\w+?)_perf")
_CONCLUDED = "Collective test concluded"
_OUT_OF_BOUNDS = re.compile(r"Out of bounds values\s*:\s*(\d{1,15})")
_AVERAGE = re.compile(r"Avg bus bandwidth\s*:")
_OTHER_ALGBW = ("hypercube", "alltoallv")  # programs whose algbw is not size ÷ time
_EXPORT = re.compile(r"^\s*(?:\+ )?export\s")
_SETTING = re.compile(r"\b(NCCL_[A-Z0-9_]{1,60})=['\"]?([\w.,:^/+-]{1,200})")
_NCCL_LINE = re.compile(r"NCCL (?:INFO|WARN|version|TRACE)\b")
_RANKS = re.compile(r"nRanks (\d{1,9}) nNodes (\d{1,9})")
_FAILURES = re.compile(
    r"Test (?:NCCL|CUDA) failure.*|pid \d+: Test failure.*|Test timeout.*|Invalid number of GPUs.*"
    r"|(?:mpirun|prterun|mpiexec) (?:noticed|detected) that.*|srun: error:.*|Segmentation fault.*"
    r"|MPI_ABORT was invoked.*"
)


@dataclass(frozen=True)
class Timing:
    """Measured time in microseconds, bandwidths in GB/s; ``wrong``: number of wrong elements, None if not checked."""

    time_us: float
    algbw: float
    busbw: float
    wrong: float | None


@dataclass(frozen=True)
class Row:
    """The results for one ``size`` in bytes, with ``count`` elements.

    ``redop`` is empty and ``root`` is None where the version of nccl-tests does not print them.
    """

    size: int
    count: int
    type: str
    redop: str
    root: int | None
    out_of_place: Timing | None = None
    in_place: Timing | None = None

    @property
    def timings(self) -> list[Timing]:
        """The measurements: out of place, in place, or both."""
        return [timing for timing in (self.out_of_place, self.in_place) if timing]

    @property
    def data_size(self) -> int:
        """Bytes of ``count`` elements; 0 for an unknown type.

        Depending on the operation, these are the whole buffer or the part of one rank.
        """
        return self.count * _ELEMENT_BYTES.get(self.type, 0)


@dataclass(frozen=True)
class Device:
    """A GPU of the run, as listed above the table.

    ``index``: CUDA's device number. ``name``: the GPU model. ``group``: number of the GPU's communicator if
    NCCL_TESTS_SPLIT makes several, otherwise 0. ``address``: on the PCI bus, empty if only the bus number is listed.
    """

    rank: int
    pid: int
    host: str
    index: int
    name: str
    group: int = 0
    address: str = ""


@dataclass
class Table:
    """The table of one program. ``program``: its name without ``_perf``, empty if the text does not have it.

    ``max_bytes``: the largest requested size, None if the text does not have the line with the parameters.
    ``step_bytes``: the step from size to size, 0 if sizes are multiplied by a factor.
    ``rejected``: messages about rows that are incomplete or contradict themselves.
    ``footer_count``: number of lines "Avg bus bandwidth" below the table.
    ``wrong_is_a_count``: True if the columns ``#wrong`` count wrong elements. Before 2.13 the columns are named
    ``error`` and have the largest deviation.
    ``is_checked``: False with the option -c 0. Some versions then print 0 wrong elements although they check nothing.
    ``out_of_bounds``: sum of the numbers in lines "Out of bounds values", None without such a line.
    ``failure``: the first message that ended the run of the program; empty if there is none.
    ``has_second_header``: a table of another run or process began before the end of this one.
    ``settings``: the variables NCCL_* in the command and in exports above the table.
    """

    program: str = ""
    rows: list[Row] = field(default_factory=list)
    rejected: list[str] = field(default_factory=list)
    max_bytes: int | None = None
    step_bytes: int = 0
    footer_count: int = 0
    out_of_bounds: int | None = None
    wrong_is_a_count: bool = True
    is_checked: bool = True
    failure: str = ""
    has_second_header: bool = False
    devices: list[Device] = field(default_factory=list)
    settings: dict[str, str] = field(default_factory=dict)

    @property
    def is_empty(self) -> bool:
        """Whether no line of the table itself was read."""
        return not (self.rows or self.rejected or self.max_bytes is not None)


def parse(lines: Iterable[str]) -> NcclTestsOutput:
    """The content of all lines. Lines of other programs are ignored."""
    output = NcclTestsOutput()
    for line in lines:
        output.read(line)
    return output.finish()


class NcclTestsOutput:
    """The content of an output, which is read line by line. ``tables``: the complete ones; ``table``: the current one.

    ``comm_sizes``: the different numbers of ranks and of nodes of the communicators in NCCL's log. ``failure``: the
    first message of a failed run, which can come before any table. ``columns``, ``places``: of the last header.
    ``open_rows``: incomplete rows and their numbers by the prefix of their lines, as mpirun writes it, since lines of
    several ranks can alternate. ``command_program``, ``command_settings``: the program and the variables NCCL_* in the
    last command. ``exported_settings``: the variables in ``export`` lines so far.
    """

    def __init__(self) -> None:
        self.tables: list[Table] = []
        self.table = Table()
        self.comm_sizes: set[tuple[int, int]] = set()
        self.failure = ""
        self.columns: list[str] = []
        self.places: list[Sequence[int]] = [*_PLACES]
        self.has_cpu_time = False
        self.open_rows: dict[str, tuple[Row, list[str]]] = {}
        self.command_program = ""
        self.command_settings: dict[str, str] = {}
        self.exported_settings: dict[str, str] = {}
        self.nccl_lines: list[str] = []
        self.nccl_chars = 0

    def read(self, line: str) -> None:
        """Read one line: at most one of a row, a header, a line above or below the table, or numbers of an open row."""
        line = _TERMINAL.sub("", line[:_MAX_LINE]).rstrip("\r\n")
        is_log = self._read_nccl_log(line)
        if match := _ROW.search(line):
            self._start_row(line, match)
        elif is_log or not (self._read_above_table(line) or self._read_below_table(line)):
            self._continue_row(line)

    def finish(self) -> NcclTestsOutput:
        self._close_table()
        return self

    @cached_property
    def nccl(self) -> NcclLog:
        return nccl_log.parse("\n".join(self.nccl_lines))

    @property
    def uses_roce(self) -> bool:
        return any(re.search(r"NET/IB : Using .*/RoCE", line) for line in self.nccl_lines)

    @property
    def is_nccl_tests(self) -> bool:
        """Whether a line is of nccl-tests: a command, a header, a device or a message."""
        found = self.tables or self.command_program or self.columns or self.table.devices
        return bool(found) or self.failure.startswith("Test ")

    def _read_above_table(self, line: str) -> bool:
        """Read the line if it is a command, an export, a parameter, a device or a header; return whether it is."""
        if _HEADER.search(line):
            self._read_header(line)
        elif match := _DEVICE.search(line):
            self._add_device(match)
        elif match := _STARTING.search(line):
            self._start_table()
            self.table.program = match[1]
        elif match := _RUN.search(line):
            self._start_table()
            self.table.max_bytes = int(match[1])
            self.table.step_bytes = int(match[2]) if match[3] == "bytes" else 0
            self.table.is_checked = not _NOT_CHECKED.search(line)
        elif match := _REDUCED.search(line):
            self.table.max_bytes = int(match[1])
        elif _CONCLUDED not in line and (match := _PROGRAM.search(line)) and not _FAILURES.search(line):
            self._start_table()  # the command of a program
            self.command_program, self.command_settings = match[1], dict(_SETTING.findall(line))
        elif _EXPORT.match(line):
            self.exported_settings |= dict(_SETTING.findall(line))
        else:
            return False
        return True

    def _read_below_table(self, line: str) -> bool:
        """Read the line if it is in a table's summary or is a message that ends the run; return whether it is."""
        if match := _OUT_OF_BOUNDS.search(line):
            self.table.out_of_bounds = (self.table.out_of_bounds or 0) + int(match[1])
        elif _AVERAGE.search(line):
            self.table.footer_count += 1
        elif match := _FAILURES.search(line):
            text = match[0].strip()
            self.failure = self.failure or text
            # of the run that it ended: the current table, or if that is empty the previous one
            table = self.tables[-1] if self.table.is_empty and self.tables else self.table
            table.failure = table.failure or text
        else:
            return False
        return True

    def _read_nccl_log(self, line: str) -> bool:
        """Keep the line if it has a message of NCCL, alone or after the start of a row; return whether it has one."""
        if "NCCL" not in line or not _NCCL_LINE.search(line):
            return False
        if self.nccl_chars < _MAX_NCCL_LOG:
            self.nccl_lines.append(line)
            self.nccl_chars += len(line)
        if len(self.comm_sizes) < 100 and (match := _RANKS.search(line)):
            self.comm_sizes.add((int(match[1]), int(match[2])))
        return True

    def _add_device(self, match: re.Match[str]) -> None:
        rank, group, pid, host, index, address, name = match.groups()
        if self.table.rows:
            self._start_table()
        if len(self.table.devices) < _MAX_DEVICES:
            device = Device(int(rank), int(pid), host, int(index), name.strip(), int(group or 0), address or "")
            self.table.devices.append(device)

    def _read_header(self, line: str) -> None:
        if self.table.footer_count:
            self._start_table()
        self.table.has_second_header |= bool(self.table.rows or self.table.rejected or self.open_rows)
        names = line[line.index("size") :].split()
        self.has_cpu_time = "cputime" in names
        self.table.wrong_is_a_count = "error" not in names
        self.columns = [{"error": "wrong"}.get(name, name.lstrip("#").removeprefix("cpu")) for name in names]
        numbers = [name for name in self.columns if name not in _BEFORE_TIME]
        starts = [index for index, name in enumerate(numbers) if name == "time"][: len(_PLACES)]
        self.places = []
        for start, end in itertools.zip_longest(starts, starts[1:]):
            positions = {name: start + index for index, name in enumerate(numbers[start:end])}
            self.places.append([positions[name] for name in _VALUES if name in positions])

    def _start_table(self) -> None:
        """Begin a new table if the current one has rows; without rows, the current one is the table that begins."""
        if self.table.rows or self.table.rejected or self.open_rows:
            self._close_table()

    def _close_table(self) -> None:
        for row, _ in self.open_rows.values():
            self._reject(row, "incomplete")
        self.open_rows.clear()
        if not self.table.program:
            self.table.program = self.command_program
        if self.table.is_empty:
            self.table = Table(devices=self.table.devices)  # they are above the next table
        else:
            self.table.settings = self.exported_settings | self.command_settings
            self.tables.append(self.table)
            self.table = Table()

    def _start_row(self, line: str, match: re.Match[str]) -> None:
        size, count, type_name, redop = match.groups()
        prefix = line[: match.start()].strip()
        text = line[match.end() :]  # after the reduction
        root = _ROOT.match(text) if not self.columns or "root" in self.columns else None
        if root and not (self.columns or root[1] == "-1" or len(text.split()) in _TOKEN_COUNTS_WITH_ROOT):
            root = None
        if prefix in self.open_rows:
            self._reject(self.open_rows[prefix][0], "incomplete")
        row = Row(int(size), int(count), type_name, redop or "", int(root[1]) if root else None)
        self.open_rows[prefix] = row, []
        self._add_numbers(prefix, text[root.end() :] if root else text)

    def _continue_row(self, line: str) -> None:
        """Add the numbers of a line to the row with the same prefix."""
        text = line.strip()
        for prefix in self.open_rows:
            row_text = text[len(prefix) :]
            if text.startswith(prefix) and _starts_with_number(row_text.replace(prefix, " ") if prefix else row_text):
                self._add_numbers(prefix, row_text)
                return

    def _add_numbers(self, prefix: str, text: str) -> None:
        """Add the leading numbers of ``text`` to an open row, and finish the row when it has all columns."""
        row, numbers = self.open_rows[prefix]
        for token in (text.replace(prefix, " ") if prefix else text).split():
            match = _NUMBER.match(token)
            if not match:
                break
            numbers.append(match[0])
            if match[0] != token:  # the text of another rank follows without a blank
                break
        if self.places and len(numbers) > max(map(max, self.places)):
            del self.open_rows[prefix]
            self._finish_row(row, numbers)

    def _finish_row(self, row: Row, numbers: Sequence[str]) -> None:
        """Add the row to the table, or reject it if its numbers are not valid."""
        timings = [_timing([numbers[position] for position in place], self.table.is_checked) for place in self.places]
        if None in timings:
            self._reject(row, "has text where a number is expected")
            return
        row = replace(row, out_of_place=timings[0], in_place=timings[1] if len(timings) > 1 else None)
        # algbw is size ÷ time since 2.13, but not for _OTHER_ALGBW or CPU times (option -C)
        program = self.table.program or self.command_program
        if row.redop and self.table.wrong_is_a_count and not self.has_cpu_time and program not in _OTHER_ALGBW:
            for timing in row.timings:
                if not _is_consistent(row, timing):
                    self._reject(row, f"algbw {timing.algbw:g} GB/s contradicts the time of {timing.time_us:g} us")
                    return
        if len(self.table.rows) < _MAX_ROWS:
            self.table.rows.append(row)

    def _reject(self, row: Row, reason: str) -> None:
        if len(self.table.rejected) < _MAX_ROWS:
            self.table.rejected.append(f"row of {row.size} B: {reason}")


def _starts_with_number(text: str) -> bool:
    tokens = text.split(maxsplit=1)
    return bool(tokens) and _NUMBER.fullmatch(tokens[0]) is not None


def _timing(numbers: Sequence[str], is_checked: bool) -> Timing | None:
    """The values of one place (out of place or in place); None for text such as N/A where a number is expected."""
    try:
        time_us, algbw, busbw = map(float, numbers[:3])
        counts = [float(number) for number in numbers[3:] if number.upper() != "N/A"]
    except ValueError:  # also too few numbers
        return None
    are_valid = all(0 <= value < math.inf for value in (time_us, algbw, busbw, *counts))
    return Timing(time_us, algbw, busbw, counts[0] if counts and is_checked else None) if are_valid else None


def _is_consistent(row: Row, timing: Timing) -> bool:
    """Whether algbw is size ÷ time within rounding; false if a number was cut or mixed with another one."""
    if timing.time_us <= 0:
        return row.size == 0
    algbw = row.size / timing.time_us / 1e3
    # rounding: algbw and time have two decimals, algbw fewer from 1000 on; with a margin of 0.2 %
    tolerance = 0.005 + algbw * (0.002 + 0.006 / timing.time_us)
    return abs(algbw - timing.algbw) <= tolerance + (0.5 if timing.algbw >= 1000 else 0)
