"""Which rank ended a job, and why: the first cause, not the peers that failed because of it.

torchrun's own "root cause" is the failure it noticed first, with times in whole seconds, and it lists the ranks that it
ended itself among the failures. Here exit codes, journals and error files are read, and ``first_failure`` decides.
"""

from __future__ import annotations

import json
import math
import os
import re
import signal
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seatrial.discover.file_readers import parse_id_list
from seatrial.launch.rank_status import Rank
from seatrial.model import Job
from seatrial.util.failures import TERMINATED, Failure, exit_hint, exit_reason, first_failure, killed
from seatrial.util.text import and_more

# "rank      : 1 (local_rank: 1)" and "exitcode  : -9 (pid: 4711) (SIGKILL)", as torchrun 2.11 to 2.13 print them
_FAILURE = re.compile(
    r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
# what the sbatch script says of a node that lacks something (sbatch.sh.j2)
_PREFLIGHT = re.compile(r"^(?:\d+: )?preflight: (?P<node>[^:]+): (?P<what>.+)$", re.MULTILINE)
# srun, of a node whose slurmd refuses its step or does not answer (seen with 22.05 and two munge keys)
_REFUSED = re.compile(r"^srun: error: Task launch for \S+ failed on node (?P<node>[^:]+): (?P<what>.+)$", re.MULTILINE)
_REFUSAL = (
    "srun cannot start anything there: {what}. "
    "Run first: sinfo -R; munge -n | ssh {node} unmunge; ssh {node} systemctl status slurmd"
)
# srun, of the end of tasks, and from where on it ends them itself (seen with 22.05; one task a node is ours)
_TASK = re.compile(r"^srun: error: (?P<node>[^:\s]+): tasks? (?P<tasks>[\d,-]+): (?P<how>.+)$", re.MULTILINE)
_ENDED_BY_SRUN = re.compile(r"^srun: .*(?:Terminating StepId|Job step aborted|Force Terminated)", re.MULTILINE)
_NODE_LOST = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.MULTILINE)
# srun, of tasks that it could neither end nor hear of again: their node was reset, say, and is back by now
_UNANSWERED = re.compile(r"^srun: StepId=\S+ tasks? (?P<tasks>[\d,-]+): running$", re.MULTILINE)
_STEP_LOST = "Timed out waiting for job step to complete"
_LABEL = re.compile(r"^(?:(?P<task>\d+): )?(?P<line>.*)$")  # srun --label
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()} | {"Out Of Memory": signal.SIGKILL}
_ENDED_BY_TORCHRUN = re.compile(r"Sending process (?P<pid>\d+) closing signal")
_LAUNCHER_LOG = 1 << 20  # bytes at its end that are read: torchrun's summaries, some 300 bytes a rank
_RANK_LOG = 1 << 16


@dataclass(frozen=True)
class RootCause:
    culprit: str
    cause: str
    rank: int | None


class _Report(NamedTuple):
    """The error that a rank wrote, and when by the clock of its node."""

    time: float
    text: str


class _Task(NamedTuple):
    """How one of srun's tasks ended: its exit code, negative for a signal."""

    node: str
    number: int
    code: int


def no_heartbeat(rank: Rank, seconds: float) -> RootCause:
    """A rank whose pulse has stopped while the job goes on."""
    state = _process_state(rank)
    cause = f"no heartbeat for {seconds:.0f} s; last heard of in {rank.last_status}{state}"
    return RootCause(rank.name, cause, rank.number)


def over_limit(late: Sequence[Rank], what: str, limit_s: float) -> RootCause:
    """Alive, but not done with a check, or with the job, in its time."""
    words = and_more([f"{rank.name} in {rank.last_status}" for rank in late], 4, "; ")
    who = late[0] if len(late) == 1 else None
    cause = f"{what} did not end within its limit of {limit_s:g} s; last heard of: {words}"
    return RootCause(who.name if who else f"{len(late)} ranks", cause, who.number if who else None)


def never_started(ranks: Sequence[Rank], limit_s: float, folder: Path) -> RootCause:
    """Some ranks had not begun their first check when the time for starting was over."""
    missing = [rank for rank in ranks if not rank.started]
    names = ", ".join(rank.name for rank in missing[:8])
    log = _last_line(_logs(folder))
    cause = f"{len(missing)} of {len(ranks)} ranks did not start within {limit_s:g} s: {names}. {log}"
    return RootCause(names, cause.strip(), missing[0].number if len(missing) == 1 else None)


def damaged_journal(rank: Rank) -> RootCause:
    """A rank that writes what no worker of this version writes: what it measured cannot be told from it."""
    return RootCause(rank.name, f"its journal {rank.follower.path.name} is damaged: {rank.damage}", rank.number)


def job_ended(job: Job, ranks: Sequence[Rank], code: int, folder: Path, scheduler_reason: str = "") -> RootCause:
    """The job exited with an error. ``scheduler_reason`` counts where no rank gives a cause."""
    if missing := _missing(folder) or _unanswering(ranks, job, folder):
        return missing
    tasks = _tasks(folder)
    if job.placement == "ranks":
        exits = _exits(folder, ranks, job)
        if not exits and tasks and tasks[0].code < 0:
            cause = f"torchrun there was {exit_reason(tasks[0].code)}: its ranks ended with it"
            return RootCause(tasks[0].node, cause, None)
    else:
        exits = {task.number: task.code for task in tasks if task.number < len(ranks)}
        exits = exits or ({0: code} if len(ranks) == 1 and not scheduler_reason else {})
    reports = {**_from_error_files(ranks, folder), **_errors(ranks)}
    failures = [_failure(ranks[number], exits.get(number), reports) for number in {**exits, **reports}]
    if not failures:
        reasons = [scheduler_reason or exit_reason(code), _full(folder), _last_line(_logs(folder))]
        return RootCause("launcher", ". ".join(filter(None, reasons)), None)
    first = first_failure(failures)
    rank = ranks[first.rank]
    if first.code is None or (first.reported and not first.gives_no_reason):
        return RootCause(rank.name, reports[first.rank].text, first.rank)
    return _died(rank, first.code, _logs(folder, first.rank, len(ranks)) if first.gives_no_reason else ())


def _failure(rank: Rank, code: int | None, reports: Mapping[int, _Report]) -> Failure:
    """The failure of a rank that ended with ``code``, if that is known, or that reported an error."""
    report = reports.get(rank.number)
    order = rank.pulse.time if rank.pulse else 0.0
    if report and (code is None or not killed(code)):
        order = report.time
    elif code in TERMINATED and not rank.is_terminating:  # torchrun or srun may have ended it because of another
        order = math.inf
    return Failure(rank.number, code, report is not None, order)


def _exits(folder: Path, ranks: Sequence[Rank], job: Job) -> dict[int, int]:
    """Exit codes by rank, without those that torchrun ended itself because of another.

    Who ends in the middle of a check with exit code 0 is no failure to torchrun, nor is it told to end.
    """
    found: dict[int, int] = {}
    for node, log in _by_node(_tail(folder / "launcher.err", _LAUNCHER_LOG)).items():
        closed = {match["pid"] for match in _ENDED_BY_TORCHRUN.finditer(log)}
        failures = {int(match["rank"]): match for match in _FAILURE.finditer(log) if int(match["rank"]) < len(ranks)}
        found |= {rank: int(match["code"]) for rank, match in failures.items() if match["pid"] not in closed}
        if failures:
            own = ranks[node * job.ranks_per_node : (node + 1) * job.ranks_per_node]
            found |= {one.number: 0 for one in own if one.number not in failures and _left(one, closed)}
    return found


def _left(rank: Rank, closed: set[str]) -> bool:
    """Whether a rank of which torchrun says nothing is no longer there, though it had not done its check."""
    return rank.current is not None and rank.is_working and rank.pulse is not None and str(rank.pulse.pid) not in closed


def _by_node(log: str) -> dict[int, str]:
    """What each node's torchrun said: pids of several nodes may be the same."""
    lines: dict[int, list[str]] = {}
    for match in map(_LABEL.match, log.splitlines()):
        if match:
            lines.setdefault(int(match["task"] or 0), []).append(match["line"])
    return {node: "\n".join(own) for node, own in lines.items()}


def _tasks(folder: Path) -> list[_Task]:
    """How srun's tasks ended, the first to end first, up to where it ended the others."""
    log = _tail(folder / "launcher.err", _LAUNCHER_LOG)
    end = _ENDED_BY_SRUN.search(log)
    ends = [(match, _task_code(match["how"])) for match in _TASK.finditer(log[: end.start()] if end else log)]
    return [
        _Task(match["node"], number, code)
        for match, code in ends
        for number in parse_id_list(match["tasks"])
        if code is not None
    ]


def _task_code(how: str) -> int | None:
    """``Exited with exit code 3`` → 3, ``Segmentation fault (core dumped)`` → -11."""
    if exited := re.fullmatch(r"Exited with exit code (\d+)", how):
        return int(exited[1])
    number = _SIGNALS.get(how.removesuffix(" (core dumped)"))
    return None if number is None else -number


def _errors(ranks: Sequence[Rank]) -> dict[int, _Report]:
    """The error in which each rank's last check ended. A rank that went on to another did not end because of it."""
    return {
        rank.number: _Report(measured.started + measured.seconds, f"{measured.check}: {measured.error}")
        for rank in ranks
        for measured in list(rank.measured.values())[-1:]
        if measured.error and rank.current is None
    }


def _missing(folder: Path) -> RootCause | None:
    """What nodes lacked before anything of ours ran on them: each thing once, with the nodes that lack it.

    Or a node that Slurm lost while it ran.
    """
    text = _tail(folder / "launcher.err", _LAUNCHER_LOG)
    if lost := _NODE_LOST.search(text):
        first = f"scontrol show node {lost['node']}; ping {lost['node']}"
        return RootCause(lost["node"], f"Slurm lost the node while the job ran. Run first: {first}", None)
    found = [(match["node"], _REFUSAL.format(**match.groupdict())) for match in _REFUSED.finditer(text)]
    found = found or [(match["node"], match["what"]) for match in _PREFLIGHT.finditer(text)]
    lacking: dict[str, list[str]] = {}
    for node, what in found:
        lacking.setdefault(what.replace(node, "\0"), []).append(node)
    if not lacking:
        return None
    nodes = sorted({node for node, _ in found})
    whats = [(sorted(those), what.replace("\0", min(those))) for what, those in lacking.items()]
    cause = "; ".join(what if len(nodes) == 1 else f"{', '.join(those[:8])}: {what}" for those, what in whats)
    return RootCause(", ".join(nodes[:8]), cause, None)


def _unanswering(ranks: Sequence[Rank], job: Job, folder: Path) -> RootCause | None:
    """Nodes whose task did not end when srun ended it, nor tell of its end: what their peers say comes of that."""
    text = _tail(folder / "launcher.err", _LAUNCHER_LOG)
    found = _UNANSWERED.findall(text) if _STEP_LOST in text else []
    first = [ranks[task * job.ranks_per_node] for tasks in found for task in parse_id_list(tasks) if task < job.nodes]
    nodes = ", ".join(sorted({rank.pulse.node if rank.pulse else rank.name for rank in first})[:8])
    cause = "its task neither ended with the others nor answered srun; was it reset? Run first, there: uptime; dmesg"
    return RootCause(nodes, f"{cause}; journalctl -u slurmd -n 50", None) if nodes else None


def _died(rank: Rank, code: int, logs: Sequence[Path] = ()) -> RootCause:
    hint = ", before its end" if code == 0 else exit_hint(code)
    reasons = [f"{exit_reason(code)} in {rank.last_status}{hint}", _last_line(logs)]
    return RootCause(rank.name, ". ".join(filter(None, reasons)), rank.number)


def _from_error_files(ranks: Sequence[Rank], folder: Path) -> dict[int, _Report]:
    """What torchrun's @record left in error files: failures outside of checks, before the first one for example."""
    found = {}
    for path in (folder / "logs").glob("**/error.json"):
        try:
            message = json.loads(path.read_text(encoding="utf-8"))["message"]
            number = ranks[_rank_of(path, len(ranks))].number
            found[number] = _Report(float(message["extraInfo"]["timestamp"]), str(message["message"]))
        except (ValueError, LookupError, TypeError, RecursionError):  # cut off by the crash that it was to describe
            continue
    return found


def _rank_of(log: Path, count: int) -> int:
    """torchrun keeps logs by local rank; where there are several nodes, ours lie in a folder a node."""
    local = int(log.parent.name)
    nodes = {part: path for path in log.parents for part in [path.name] if re.fullmatch(r"node\d+", part)}
    if not nodes:
        return local
    name, folder = next(iter(nodes.items()))
    siblings = sum(1 for _ in folder.parent.glob("node*"))
    return int(name.removeprefix("node")) * (count // siblings) + local


def _process_state(rank: Rank) -> str:
    """What the kernel says of a local process: stopped (T) and uninterruptible (D) explain silence."""
    if rank.pulse is None:
        return ""
    try:
        fields = Path(f"/proc/{rank.pulse.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    meaning = {"T": "stopped by a signal", "t": "stopped by a debugger", "D": "waiting for I/O in the kernel"}
    return f"; process state {fields[0]}" + (f" ({meaning[fields[0]]})" if fields[0] in meaning else "")


def _logs(folder: Path, rank: int | None = None, count: int = 0) -> list[Path]:
    """Standard error of the launcher and of the ranks (of one, where it is named)."""
    logs = sorted((folder / "logs").glob("**/stderr.log"))
    return [folder / "launcher.err", *(log for log in logs if rank is None or _rank_of(log, count) == rank)]


def _full(folder: Path) -> str:
    """Who finds no room to say why it ends leaves half a sentence in each log; where that is not told, ""."""
    try:
        held = os.statvfs(folder)
    except OSError:
        return ""
    if not ((held.f_blocks and not held.f_bavail) or (held.f_files and not held.f_favail)):
        return ""
    return f"No room is left on the file system of {folder}: what is missing in logs did not fit"


def _last_line(logs: Sequence[Path]) -> str:
    """The last line of these logs that says something."""
    tails = [_tail(log, _RANK_LOG).splitlines()[-40:] for log in logs]
    lines = [match["line"].strip() for tail in tails for match in map(_LABEL.match, tail) if match and _tells(match[0])]
    return f"Last line of its log: {lines[-1][:300]}" if lines else ""


def _tells(line: str) -> bool:
    """torchrun's own ChildFailedError only says that a rank failed, which is known."""
    return bool(line.strip(" =-")) and "Error" in line and "ChildFailedError" not in line


def _tail(path: Path, size: int) -> str:
    """The last ``size`` bytes: a rank may have written more than there is memory."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size).decode("utf-8", errors="replace")
