"""The rank and node of a log line, from prefixes of launchers, torchrun's failures, NCCL's lines and file names.

torchrun's prefixes and log directories have the local rank of a process on its node, srun's labels the number of a
task. Both are named as such unless the log or the run directory tells the global rank.
"""

from __future__ import annotations

import re
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

from seatrial.model import Job
from seatrial.util.input_files import GZIP_MAGIC, open_file, read_json, tail_lines
from seatrial.util.log_time import log_time
from seatrial.util.torchrun_logs import rank_of_log
from seatrial.worker import Heartbeat

T = TypeVar("T")
_PREFIX_CHARS = 200
# The label of srun, and the pod of kubectl logs --prefix
_SENDER = re.compile(r" {0,6}(?P<task>\d{1,6}): |\[pod/(?P<pod>[\w.-]{1,200})/")
# torchrun --tee: [ROLE + local rank]: without a space. torch writes "[rank11]: " before exceptions, "[rank11]:[E1126 "
# before its C++ messages. axolotl's RANK is LOCAL_RANK
_LOCAL_RANK = re.compile(
    r"(?:^|(?<=[\s:]))\[(?:default(?P<default>\d{1,6})\]:|rank(?P<role>\d{1,6})\]:(?! |$|\[[EWIF]\d{3,4} ))"
    r"|\[RANK:(?P<axolotl>\d{1,6})\]|\bLOCAL_RANK[=:] ?(?P<variable>\d{1,6})\b|\blocal_rank: (?P<agent>\d{1,6})\b"
)
_RANK = re.compile(
    r"\[rank(?P<torch>\d{1,6})\]:(?= |$|\[[EWIF]\d{3,4} )|\[Rank (?P<old_torch>\d{1,6})\]"
    r"|\[PG (?:(?:ID )?0\b|ID \d{1,5} PG GUID 0\b|\d{1,5} \(default_pg\))[^\]\n]{0,60} Rank (?P<group>\d{1,6})\]"
    r"|\bRANK=(?P<variable>\d{1,6})\b|\brank {1,6}: (?P<failure>\d{1,6}) \(local_rank: "
)
_MPI_RANK = re.compile(r"\[\d{1,6},(\d{1,6})\]<std(?:out|err)>:")
_NCCL = re.compile(r"(?:^|(?<=[\s:>]))(?P<host>[A-Za-z0-9][\w.-]{0,62}):\d{1,9}:\d{1,9} \[(?P<gpu>\d{1,3})\] NCCL ")
_PID = re.compile(r"\(pid: (\d{1,9})\)")
_NAME_KINDS = {"directory": "local_rank"}  # group of _IN_NAME → field of Origin; others have the name of the field
# attempt_0/3/stderr.log of torchrun, local_rank3.log, rank_3.err, slurm-JOB_TASK.out
_IN_NAME = re.compile(
    r"attempt_\d{1,4}/(?P<directory>\d{1,6})/std(?:out|err)\.log$"
    r"|(?:^|/)slurm-\d{1,12}[._](?P<task>\d{1,6})\.(?:out|err)$"
    r"|local_?rank[-_.]?(?P<local_rank>\d{1,6})(?!\d)[^/]{0,40}$"
    r"|(?<!node)(?<!node[-_])(?<!machine[-_])rank[-_.]?(?P<rank>\d{1,6})(?!\d)[^/]{0,40}$"
)
# A failure in torchrun's table. All its lines have the same prefix, such as the label of srun
_FAILURE = re.compile(
    rb"^(?P<prefix>[^\n]{0,100}?) *host {1,6}: (?P<host>\S{1,255})\n(?P=prefix) *rank {1,6}: (?P<rank>\d{1,6}) "
    rb"\(local_rank: (?P<local>\d{1,6})\)(?:\n(?P=prefix) *exitcode {1,6}: -?\d{1,6} \(pid: (?P<pid>\d{1,9})\))?",
    re.MULTILINE,
)
_TASK_ENDED = re.compile(rb"^srun: error: (?P<host>[^:\s]{1,255}): tasks? (?P<task>\d{1,6}): ", re.MULTILINE)
_RANK_VARIABLE = re.compile(rb"(?<![A-Z_])RANK=\d")
_NCCL_INFO = b"] NCCL INFO "  # all processes print it, or none; warnings come from some of them
# Lines of NCCL and of variables that are read of a log: at its start, since NCCL may write gigabytes
_MAX_LINES = 10_000
_END_BYTES = 2**18  # of each log, for the last lines of its ranks
_LINE_CHARS = 400


@dataclass(frozen=True)
class Origin:
    """The process that wrote a line; unknown values are None or empty. ``gpu``: CUDA's number in the process."""

    rank: int | None = None
    local_rank: int | None = None
    mpi_rank: int | None = None
    task: int | None = None
    node: str = ""
    gpu: int | None = None

    @property
    def name(self) -> str:
        """The process and its node, such as ``rank 11 on node3`` or ``local rank 3 of task 1``; empty if unknown."""
        kinds = ("rank", "MPI rank", "local rank", "task", "CUDA device")
        numbers = zip(kinds, (*self._numbers, self.gpu), strict=True)
        process = next((f"{kind} {number}" for kind, number in numbers if number is not None), "")
        if process.startswith("local rank") and self.task is not None and not self.node:
            process += f" of task {self.task}"
        return " on ".join(filter(None, (process, self.node)))

    @property
    def order(self) -> float:
        """The first known number of the process, by which findings of the same time are ordered."""
        return next((number for number in self._numbers if number is not None), float("inf"))

    @property
    def _numbers(self) -> tuple[int | None, ...]:
        return self.rank, self.mpi_rank, self.local_rank, self.task


class _Process(NamedTuple):
    """A process of a log: ``sender`` is its srun task or pod; ``log`` the directory, for torchrun's logs of a rank."""

    log: str
    sender: str
    local_rank: int | None = None
    pid: int | None = None


@dataclass
class LogOrigins:
    """What logs tell about the ranks and nodes of their processes.

    If a log tells several values of one process, such as that of a merged log of several nodes, the value is unknown.
    """

    _ranks: dict[Hashable, set[int]] = field(default_factory=dict)  # process, or (log, node) of local rank 0 → ranks
    _nodes: dict[Hashable, set[str]] = field(default_factory=dict)  # process, or (log, rank) → nodes
    _lines_left: dict[str, int] = field(default_factory=dict)
    _prefixes: set[tuple[str, bytes]] = field(default_factory=set)  # (log, prefix of NCCL) that were read

    def read(self, text: bytes, log: str) -> None:
        """Read a block of whole lines of ``log``."""
        if b"(local_rank: " in text:
            for match in _FAILURE.finditer(text):
                self._add_failure(match, log)
        if b"srun: error: " in text:
            for match in _TASK_ENDED.finditer(text):
                self._nodes.setdefault(_Process(log, match["task"].decode()), set()).add(_text(match["host"]))
        for position in self._positions(text, log):
            begin, end = text.rfind(b"\n", 0, position) + 1, text.find(b"\n", position)
            origin, process = _line_origin(_text(text[begin : min(end, begin + _PREFIX_CHARS)]), log)
            if process.local_rank is not None and origin.rank is not None:
                self._ranks.setdefault(process, set()).add(origin.rank)
            if origin.node:
                self._nodes.setdefault(process, set()).add(origin.node)

    def origin(self, line: str, source: str) -> Origin:
        """The origin of ``line``; ``source``: path of the log and line number."""
        log = source.rpartition(":")[0]
        origin, process = _line_origin(line, log)
        if run := _run_origin(origin, log):
            return run
        if origin.rank is None and process.pid is not None:
            origin = replace(origin, rank=_only(self._ranks, process._replace(local_rank=None)))
        process = process._replace(pid=None)
        if origin.rank is None and origin.local_rank is not None:
            origin = replace(origin, rank=_only(self._ranks, process))
        if not origin.node:
            task = [process._replace(local_rank=None)] if process.sender else []
            node = _only(self._nodes, (log, origin.rank)) or _only(self._nodes, process, *task)
            origin = replace(origin, node=node or "")
        first = _only(self._ranks, (log, _short(origin.node)))
        if origin.rank is None and origin.local_rank is not None and first is not None:
            origin = replace(origin, rank=first + origin.local_rank)
        return origin

    def _add_failure(self, match: re.Match[bytes], log: str) -> None:
        node, rank, local_rank = _text(match["host"]), int(match["rank"]), int(match["local"])
        _, agent = _line_origin(_text(match[0].partition(b"\n")[0]), log)
        self._ranks.setdefault(agent._replace(local_rank=local_rank), set()).add(rank)
        self._nodes.setdefault(agent._replace(local_rank=None if agent.sender else local_rank), set()).add(node)
        self._nodes.setdefault((log, rank), set()).add(node)
        self._ranks.setdefault((log, _short(node)), set()).add(rank - local_rank)
        if match["pid"]:
            self._ranks.setdefault(agent._replace(pid=int(match["pid"])), set()).add(rank)

    def _positions(self, text: bytes, log: str) -> list[int]:
        """The positions of NCCL's prefix and of the variable RANK, at most _MAX_LINES in a log."""
        left = self._lines_left.get(log, _MAX_LINES)
        positions = []
        position = text.find(_NCCL_INFO)
        while position >= 0 and left > 0:
            left -= 1
            prefix = text[text.rfind(b"\n", 0, position) + 1 : position]
            if (log, prefix) not in self._prefixes:
                self._prefixes.add((log, prefix))
                positions.append(position)
            position = text.find(_NCCL_INFO, text.find(b"\n", position))
        variables = [match.start() for match in islice(_RANK_VARIABLE.finditer(text), left)] if b"RANK=" in text else []
        self._lines_left[log] = left - len(variables)
        return positions + variables


def last_lines(logs: Iterable[Path], origins: LogOrigins) -> list[tuple[str, str, str]]:
    """(log, rank, line) of the last line of each rank that the ends of the logs name; the earliest rank first.

    A pipe, a packed file and a log of one rank have none.
    """
    ends = {}  # rank → time or number of its last line, log, line
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
            is_packed = file.read(len(GZIP_MAGIC)) == GZIP_MAGIC
        lines = [] if is_packed else tail_lines(log, _END_BYTES, _END_BYTES)
    except OSError:
        return []
    return [line[:_LINE_CHARS].strip() for line in lines if line.strip()]


def _line_origin(line: str, log: str) -> tuple[Origin, _Process]:
    """The origin according to the line and the name of its log, and the process as other lines of the log name it."""
    prefix = line[:_PREFIX_CHARS]
    numbers = {"rank": _number(_RANK.search(prefix)), "local_rank": _number(_LOCAL_RANK.search(prefix))}
    numbers["mpi_rank"] = _number(_MPI_RANK.match(prefix))
    sender, nccl = _SENDER.match(prefix), _NCCL.search(prefix)
    numbers["task"] = int(sender["task"]) if sender and sender["task"] else None
    name = _IN_NAME.search(log)
    if name and (name["directory"] or all(number is None for number in numbers.values())):
        kind = str(name.lastgroup)
        numbers[_NAME_KINDS.get(kind, kind)] = _number(name)
    node = nccl["host"] if nccl else f"pod {sender['pod']}" if sender and sender["pod"] else ""
    folder = str(Path(log).parent) if name and name["directory"] else log
    process = _Process(folder, sender[sender.lastgroup or 0] if sender else "", numbers["local_rank"])
    origin = Origin(**numbers, node=node, gpu=int(nccl["gpu"]) if nccl else None)
    return origin, process._replace(pid=_number(_PID.search(line)))


def _run_origin(origin: Origin, log: str) -> Origin | None:
    """The rank and node of a log of a seatrial job; None for any other log, or if its job cannot be read."""
    attempt = next((folder for folder in Path(log).parents if re.fullmatch(r"attempt\d+", folder.name)), None)
    if attempt is None:
        return None
    try:
        job = Job.model_validate(read_json(attempt.parent / "job.json"))
        if Path(log).name in ("stderr.log", "stdout.log"):
            rank = rank_of_log(Path(log), job.ranks_per_node)
        elif origin.task is not None:  # one task on each node, which starts the ranks of the node
            rank = origin.task * job.ranks_per_node
        else:
            return None
        heartbeat = Heartbeat.model_validate(read_json(attempt / f"rank{rank}.heartbeat.json"))
    except (OSError, ValueError):
        return None
    is_rank = origin.task is None or job.ranks_per_node == 1
    return replace(origin, rank=rank if is_rank else origin.rank, node=heartbeat.node)


def _number(match: re.Match[str] | None) -> int | None:
    return next((int(number) for number in match.groups() if number), None) if match else None


def _only(table: Mapping[Hashable, set[T]], *keys: Hashable) -> T | None:
    """The only value of the keys; None without one, or with several."""
    values = set[T]().union(*(table.get(key, ()) for key in keys))
    return next(iter(values)) if len(values) == 1 else None


def _short(node: str) -> str:
    """The host name without its domain: NCCL shortens it, torchrun does not."""
    return node.partition(".")[0]


def _text(data: bytes) -> str:
    return data.decode("utf-8", errors="replace")
