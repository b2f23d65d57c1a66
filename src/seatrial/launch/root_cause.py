"""Root cause of a failed job: the rank or node that failed first, not the peers that failed because of it.

torchrun names the failure that it noticed first, with times in whole seconds. It also lists the ranks that it
terminated itself. This module compares exit codes, heartbeats, journals (rankN.jsonl) and torchrun's error files.
"""

from __future__ import annotations

import math
import os
import re
import signal
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from seatrial.discover.file_readers import parse_id_list
from seatrial.discover.rank_stacks import PROCESS_STATES
from seatrial.launch.rank_status import Rank
from seatrial.model import Job, JobFailure, MissingNode, NodeShortage
from seatrial.util.failures import TERMINATED_CODES, Failure, exit_hint, exit_reason, first_failure, killed
from seatrial.util.grouping import grouped
from seatrial.util.input_files import open_file, read_json
from seatrial.util.text import and_more
from seatrial.util.torchrun_logs import rank_of_log

# "rank      : 1 (local_rank: 1)" and "exitcode  : -9 (pid: 4711) (SIGKILL)", as torchrun 2.11 to 2.13 print them
_TORCHRUN_FAILURE = re.compile(
    r"rank\s+: (?P<rank>\d+) \(local_rank: \d+\)\s+exitcode\s+: (?P<code>-?\d+) \(pid: (?P<pid>\d+)\)"
)
# printed by the scripts of jobs and by bench/preflight.py for each requirement that a node does not meet
_PREFLIGHT = re.compile(r"^(?:\d+: )?preflight: (?P<node>[^:]+): (?P<error>.+)$", re.MULTILINE)
# printed by srun if a node's slurmd refuses a step or does not answer (seen with Slurm 22.05 and unequal munge keys)
_LAUNCH_FAILED = re.compile(
    r"^srun: error: Task launch for \S+ failed on node (?P<node>[^:]+): (?P<error>.+)$", re.MULTILINE
)
_LAUNCH_ERROR = "srun cannot start a task on this node: {error}"
_LAUNCH_COMMAND = "Run first: sinfo -R; munge -n | ssh {node} unmunge; ssh {node} systemctl status slurmd"
# printed by srun when tasks exit, and when it starts to terminate them (Slurm 22.05); a job has one task per node
_TASK_END = re.compile(r"^srun: error: (?P<node>[^:\s]+): tasks? (?P<tasks>[\d,-]+): (?P<end>.+)$", re.MULTILINE)
_ENDED_BY_SRUN = re.compile(r"^srun: .*(?:Terminating StepId|Job step aborted|Force Terminated)", re.MULTILINE)
_NODE_FAILURE = re.compile(r"^srun: error: Node failure on (?P<node>\S+)", re.MULTILINE)
# printed by srun for tasks that do not end on its signal and do not respond, for example after a reset of their node
_NO_RESPONSE = re.compile(r"^srun: StepId=\S+ tasks? (?P<tasks>[\d,-]+): running$", re.MULTILINE)
_STEP_TIMEOUT = "Timed out waiting for job step to complete"
_LABEL = re.compile(r"^(?:(?P<task>\d+): )?(?P<line>.*)$")  # srun --label
_SIGNALS = {signal.strsignal(number): number for number in signal.valid_signals()} | {"Out Of Memory": signal.SIGKILL}
_ENDED_BY_TORCHRUN = re.compile(r"Sending process (?P<pid>\d+) closing signal")  # printed by torchrun
_MAX_NAMED = 8  # ranks or nodes listed in a message
SILENT_AT_END_S = 10.0  # a node without a heartbeat for this long when the job ends has failed before the others
# The ranks of a lost node wrote their last heartbeats at different times: if the first of them is silent for the limit
# and all others for this share of it, the node is silent, not that rank
_SILENT_SHARE = 0.75
QueryNodeState = Callable[[str], tuple[str, str]]  # see StartedJob
# Bytes that are read from the end of a log; torchrun's summary of failures has about 300 bytes per rank
_LAUNCHER_LOG_BYTES, _RANK_LOG_BYTES = 1 << 20, 1 << 16


@dataclass(frozen=True)
class RootCause:
    """Why a job failed. ``rank``: the number of the rank if exactly one rank is at fault; else None.

    ``subject``: name of the rank, node or launcher at fault. ``cause``: what happened, and the first command to run.
    ``shortage``: the nodes that the job lost or did not get, if these are the cause. ``preflight``: nodes do not meet
    the requirements of the trial, so that no check started. ``failures``: known causes why the job did not start.
    """

    subject: str
    cause: str
    rank: int | None
    shortage: NodeShortage | None = None
    preflight: bool = False
    failures: tuple[JobFailure, ...] = ()

    @property
    def missing_nodes(self) -> tuple[MissingNode, ...]:
        """The nodes that the job lost or did not get."""
        return self.shortage.missing if self.shortage else ()


class _ReportedError(NamedTuple):
    """The error message of a rank, and its time by the clock of its node."""

    time: float
    text: str


class _Task(NamedTuple):
    """An srun task that has ended. ``code``: exit code, negative for a signal."""

    node: str
    number: int
    code: int


def no_heartbeat(rank: Rank, seconds: float) -> RootCause:
    """Return the cause for a rank whose heartbeat has stopped while the job runs."""
    state = _process_state(rank)
    cause = f"no heartbeat for {seconds:.0f} s; last status: {rank.last_status}{state}"
    return RootCause(rank.name, f"{cause}. Run first, on its node: dmesg -T | tail", rank.number)


def silent_nodes(ranks: Sequence[Rank], job: Job, folder: Path, silent_s: float) -> dict[str, float]:
    """Return host name → seconds since the last heartbeat of any of its ranks, for nodes that are silent.

    A node is silent if one of its ranks is silent for ``silent_s`` and the others nearly as long. It is not silent if
    one of its ranks is done, terminates or reported an error, or if torchrun or srun reported the end of its processes.
    A node that never had a heartbeat does not count. Empty if all nodes are silent: then none of them failed before the
    others.
    """
    now, silence_by_node = time.monotonic(), dict[int, float]()
    size = job.ranks_per_node
    for node in range(job.nodes):
        seen_ranks = [rank for rank in ranks[node * size : (node + 1) * size] if rank.heartbeat]
        silences_s = [now - (rank.last_seen or now) for rank in seen_ranks] or [0.0]
        is_silent = max(silences_s) > silent_s and min(silences_s) > silent_s * _SILENT_SHARE
        if is_silent and all(rank.heartbeat_expected and not rank.exit_expected for rank in seen_ranks):
            silence_by_node[node] = min(silences_s)
    if not silence_by_node or len(silence_by_node) == job.nodes:
        return {}
    ended_nodes = {task.number for task in _ended_tasks(folder)}  # one task per node
    if job.placement == "ranks":
        ended_nodes |= {rank // size for rank in _exit_codes(folder, ranks, job)}
    host_by_node = {rank.number // size: rank.heartbeat.node for rank in ranks if rank.heartbeat}
    return {host_by_node[node]: seconds for node, seconds in silence_by_node.items() if node not in ended_nodes}


def lost_nodes(job: Job, silent: Mapping[str, float], node_state: QueryNodeState, show_node_command: str) -> RootCause:
    """Return the cause for nodes that went silent during ``job``; ``silent``: see ``silent_nodes``.

    ``node_state``, ``show_node_command``: see StartedJob.
    """
    missing = []
    for host, silence_s in silent.items():
        name, state = node_state(host)
        scheduler_state = f"; the scheduler's state is {state}" if state else ""
        text = f"no heartbeat from any of its ranks for {silence_s:.0f} s during job {job.name}{scheduler_state}"
        missing.append(MissingNode(name=name, state=text))
    names = [node.name for node in missing]
    cause = "; ".join(node.state if len(names) == 1 else str(node) for node in missing[:_MAX_NAMED])
    command = f"ping {names[0]}; {show_node_command.format(node=names[0])}; on its console: dmesg -T | tail"
    shortage = NodeShortage(usable=job.nodes - len(names), missing=tuple(missing))
    return RootCause(and_more(names, _MAX_NAMED), f"{cause}. Run first: {command}", None, shortage)


def over_limit(late: Sequence[Rank], name: str, limit_s: float) -> RootCause:
    """Return the cause for ranks that exceeded a time limit. ``name``: the check with this limit, or ``the job``."""
    statuses = and_more([f"{rank.name} in {rank.last_status}" for rank in late], 4, separator="; ")
    rank = late[0] if len(late) == 1 else None
    setting = "" if name == "the job" else f" (checks.{name}.limit_s)"
    cause = f"{name} exceeded its time limit of {limit_s:g} s{setting}; last status: {statuses}"
    return RootCause(rank.name if rank else f"{len(late)} ranks", cause, rank.number if rank else None)


def never_started(ranks: Sequence[Rank], limit_s: float, folder: Path) -> RootCause:
    """Return the cause for ranks that did not start their first check within ``limit_s``."""
    missing = [rank for rank in ranks if not rank.started]
    names = and_more([rank.name for rank in missing], _MAX_NAMED)
    cause = f"{len(missing)} of {len(ranks)} ranks did not start within {limit_s:g} s (limits.startup_s): {names}"
    text = ". ".join(filter(None, [cause, _last_error_line(_stderr_files(folder))]))
    return RootCause(names, text, missing[0].number if len(missing) == 1 else None)


def job_ended(
    job: Job,
    ranks: Sequence[Rank],
    code: int,
    folder: Path,
    scheduler_reason: str = "",
    node_state: QueryNodeState = lambda host: (host, ""),
    show_node_command: str = "scontrol show node {node}",
) -> RootCause:
    """Return the cause for a job that ended with the non-zero exit code ``code``.

    The cause names the nodes at fault if there are any, else the rank that failed first. If there is neither, it is
    ``scheduler_reason`` or ``code``.
    """
    if node_cause := node_error(job, folder, node_state) or _unresponsive_nodes(ranks, job, folder):
        return node_cause
    if silent := silent_nodes(ranks, job, folder, SILENT_AT_END_S):
        return lost_nodes(job, silent, node_state, show_node_command)
    tasks = _ended_tasks(folder)
    if job.placement == "ranks":
        exit_codes = _exit_codes(folder, ranks, job)
        if not exit_codes and tasks and tasks[0].code < 0:
            cause = f"torchrun on this node was {exit_reason(tasks[0].code)}, and its ranks with it"
            return RootCause(tasks[0].node, f"{cause}. Run first, on the node: dmesg; journalctl -u slurmd -n 50", None)
    else:
        exit_codes = {task.number: task.code for task in tasks if task.number < len(ranks)}
        exit_codes = exit_codes or ({0: code} if len(ranks) == 1 and not scheduler_reason else {})
    reported_errors = {**_torchrun_errors(ranks, job, folder), **_last_errors(ranks)}
    failed_ranks = sorted(exit_codes.keys() | reported_errors.keys())
    failures = [_failure(ranks[number], exit_codes.get(number), reported_errors) for number in failed_ranks]
    if not failures:
        reasons = [scheduler_reason or exit_reason(code), _disk_full(folder), _last_error_line(_stderr_files(folder))]
        return RootCause("launcher", ". ".join(filter(None, reasons)), None)
    failure = first_failure(failures)
    rank = ranks[failure.rank]
    if failure.code is None or (failure.reported and not failure.ended_silently):
        return RootCause(rank.name, reported_errors[failure.rank].text, failure.rank)
    early = " before the end of its checks" if failure.code == 0 else ""
    cause = f"{exit_reason(failure.code)}{early}; last status: {rank.last_status}"
    last_error = (
        _last_error_line(_stderr_files(folder, failure.rank, job.ranks_per_node)) if failure.ended_silently else ""
    )
    return RootCause(rank.name, ". ".join(filter(None, [cause, exit_hint(failure.code), last_error])), rank.number)


def _failure(rank: Rank, code: int | None, reported_errors: Mapping[int, _ReportedError]) -> Failure:
    """Return the failure of a rank with this exit code (None: unknown) and its error, if it reported one."""
    error = reported_errors.get(rank.number)
    order = rank.heartbeat.time if rank.heartbeat else 0.0
    if error and (code is None or not killed(code)):
        order = error.time
    elif code in TERMINATED_CODES and not rank.is_terminating:  # torchrun or srun may have ended it because of a peer
        order = math.inf
    return Failure(rank.number, code, error is not None, order)


def _exit_codes(folder: Path, ranks: Sequence[Rank], job: Job) -> dict[int, int]:
    """Return the exit codes of ranks that torchrun did not end because of a peer.

    A rank that exits with code 0 in the middle of a check is included: torchrun does not list it, and sends it no
    signal.
    """
    exit_codes: dict[int, int] = {}
    for node, log in _log_by_node(_tail(folder / "launcher.err", _LAUNCHER_LOG_BYTES)).items():
        terminated_pids = {match["pid"] for match in _ENDED_BY_TORCHRUN.finditer(log)}
        listed_ranks = set()
        for match in _TORCHRUN_FAILURE.finditer(log):
            number = int(match["rank"])
            if number >= len(ranks):
                continue
            listed_ranks.add(number)
            if match["pid"] not in terminated_pids:
                exit_codes[number] = int(match["code"])
        if listed_ranks:
            node_ranks = ranks[node * job.ranks_per_node : (node + 1) * job.ranks_per_node]
            unlisted = [rank for rank in node_ranks if rank.number not in listed_ranks]
            in_check = [rank for rank in unlisted if rank.current_check is not None and rank.heartbeat_expected]
            exit_codes |= {
                rank.number: 0
                for rank in in_check
                if rank.heartbeat is not None and str(rank.heartbeat.pid) not in terminated_pids
            }
    return exit_codes


def _log_by_node(log: str) -> dict[int, str]:
    """Return the output of torchrun by node index: pids are unique on one node only."""
    matches = filter(None, map(_LABEL.match, log.splitlines()))
    lines = grouped((int(match["task"] or 0), match["line"]) for match in matches)
    return {node: "\n".join(node_lines) for node, node_lines in lines.items()}


def _ended_tasks(folder: Path) -> list[_Task]:
    """Return the srun tasks that ended before srun terminated the others, in order of their end."""
    log = _tail(folder / "launcher.err", _LAUNCHER_LOG_BYTES)
    if ended_by_srun := _ENDED_BY_SRUN.search(log):
        log = log[: ended_by_srun.start()]
    tasks = []
    for match in _TASK_END.finditer(log):
        code = _task_code(match["end"])
        if code is not None:
            tasks += [_Task(match["node"], number, code) for number in parse_id_list(match["tasks"])]
    return tasks


def _task_code(end: str) -> int | None:
    """Return the exit code: ``Exited with exit code 3`` → 3, ``Segmentation fault (core dumped)`` → -11, else None."""
    if exited := re.fullmatch(r"Exited with exit code (\d+)", end):
        return int(exited[1])
    number = _SIGNALS.get(end.removesuffix(" (core dumped)"))
    return None if number is None else -number


def _last_errors(ranks: Sequence[Rank]) -> dict[int, _ReportedError]:
    """Return the error of each rank whose last measurement has one, if the rank has started no check after it."""
    errors = {}
    for rank in ranks:
        last = next(reversed(rank.measured.values()), None)
        if last and last.error and rank.current_check is None:
            errors[rank.number] = _ReportedError(last.started + last.seconds, f"{last.check}: {last.error}")
    return errors


def node_error(job: Job, folder: Path, node_state: QueryNodeState = lambda host: (host, "")) -> RootCause | None:
    """Return the cause if a node failed during the job, or had an error before the job's start; else None.

    Nodes with the same error are listed together.
    """
    log = _tail(folder / "launcher.err", _LAUNCHER_LOG_BYTES)
    if failed := list(dict.fromkeys(_NODE_FAILURE.findall(log))):
        cause = f"Slurm reports a node failure during job {job.name}"
        command = f"scontrol show node {failed[0]}; ping {failed[0]}"
        _, state = node_state(failed[0])
        shortage = _shortage(job, dict.fromkeys(failed, f"{cause}; {state}" if state else cause))
        return RootCause(and_more(failed, _MAX_NAMED), f"{cause}. Run first: {command}", None, shortage)
    states = {match["node"]: _LAUNCH_ERROR.format(error=match["error"]) for match in _LAUNCH_FAILED.finditer(log)}
    preflight_errors = [(match["node"], match["error"]) for match in _PREFLIGHT.finditer(log)]
    errors = [(node, f"{state}. {_LAUNCH_COMMAND.format(node=node)}") for node, state in states.items()]
    errors = errors or preflight_errors
    if not errors:
        return None
    # \0 replaces the node's name, so that errors that differ only in this name are equal
    errors_by_node = grouped((node, error.replace(node, "\0")) for node, error in errors)
    nodes_by_text = grouped(("; ".join(dict.fromkeys(errors_by_node[node])), node) for node in sorted(errors_by_node))
    texts = []
    for text, nodes in nodes_by_text.items():
        prefix = "" if len(nodes_by_text) == 1 else f"{and_more(nodes, _MAX_NAMED)}: "
        texts.append(prefix + text.replace("\0", nodes[0]))
    subject = and_more(sorted(errors_by_node), _MAX_NAMED)
    return RootCause(subject, "; ".join(texts), None, _shortage(job, states), preflight=bool(preflight_errors))


def _unresponsive_nodes(ranks: Sequence[Rank], job: Job, folder: Path) -> RootCause | None:
    """Return the cause if srun reports tasks that do not end or respond: errors of other nodes follow from these."""
    log = _tail(folder / "launcher.err", _LAUNCHER_LOG_BYTES)
    task_numbers: list[int] = []
    if _STEP_TIMEOUT in log:
        for id_list in _NO_RESPONSE.findall(log):
            task_numbers += parse_id_list(id_list)
    first_ranks = [ranks[task * job.ranks_per_node] for task in task_numbers if task < job.nodes]
    nodes = sorted({rank.heartbeat.node if rank.heartbeat else rank.name for rank in first_ranks})
    if not nodes:
        return None
    cause = "the task on this node does not respond to srun (node reset or hung?)"
    text = f"{cause}. Run first, on the node: uptime; dmesg; journalctl -u slurmd -n 50"
    hosts = sorted({rank.heartbeat.node for rank in first_ranks if rank.heartbeat})
    return RootCause(and_more(nodes, _MAX_NAMED), text, None, _shortage(job, dict.fromkeys(hosts, cause)))


def _shortage(job: Job, states: Mapping[str, str]) -> NodeShortage | None:
    """Return the shortage that the loss of these nodes causes; ``states``: node → how it was lost. None without any."""
    missing = tuple(MissingNode(name=name, state=state) for name, state in states.items())
    return NodeShortage(usable=job.nodes - len(missing), missing=missing) if missing else None


def _torchrun_errors(ranks: Sequence[Rank], job: Job, folder: Path) -> dict[int, _ReportedError]:
    """Return the errors in torchrun's error files, by rank: failures outside checks, such as at startup."""
    reported_errors = {}
    for path in (folder / "logs").glob("**/error.json"):
        try:
            message = read_json(path)["message"]
            number = ranks[rank_of_log(path, job.ranks_per_node)].number
            reported_errors[number] = _ReportedError(float(message["extraInfo"]["timestamp"]), str(message["message"]))
        except (OSError, ValueError, LookupError, TypeError):  # truncated by the crash
            continue
    return reported_errors


def _process_state(rank: Rank) -> str:
    """Return the kernel's process state of a rank on this host, such as stopped (T); empty for a rank elsewhere."""
    if rank.heartbeat is None or rank.heartbeat.node != socket.gethostname():
        return ""
    try:
        fields = Path(f"/proc/{rank.heartbeat.pid}/stat").read_text(encoding="utf-8").rpartition(")")[2].split()
    except OSError:
        return ""
    meaning = PROCESS_STATES.get(fields[0])
    return f"; process state {fields[0]}" + (f" ({meaning})" if meaning else "")


def _stderr_files(folder: Path, rank: int | None = None, ranks_per_node: int = 0) -> list[Path]:
    """Return the standard error files of the launcher and of all ranks, or of ``rank``."""
    logs = sorted((folder / "logs").glob("**/stderr.log"))
    return [folder / "launcher.err", *(log for log in logs if rank is None or rank_of_log(log, ranks_per_node) == rank)]


def _disk_full(folder: Path) -> str:
    """Return a message if the file system of ``folder`` is full; else empty."""
    try:
        stats = os.statvfs(folder)
    except OSError:
        return ""
    if not ((stats.f_blocks and not stats.f_bavail) or (stats.f_files and not stats.f_favail)):
        return ""
    return (
        f"The file system of {folder} is full; logs in it may be truncated. Run first: df -h {folder}; df -i {folder}"
    )


def _last_error_line(logs: Sequence[Path]) -> str:
    """Return the last line that names an error, as ``Last error in its log: LINE``; empty if none does.

    Only the last 40 lines of each log are read.
    """
    last_line = ""
    for log in logs:
        for match in map(_LABEL.match, _tail(log, _RANK_LOG_BYTES).splitlines()[-40:]):
            line = match[0] if match else ""
            # torchrun's ChildFailedError gives no cause
            if match and line.strip(" =-") and "Error" in line and "ChildFailedError" not in line:
                last_line = match["line"].strip()
    return f"Last error in its log: {last_line[:300]}" if last_line else ""


def _tail(path: Path, size: int) -> str:
    """Return the last ``size`` bytes of a file as text: a log may be larger than the memory."""
    if not path.is_file():
        return ""
    with open_file(path) as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - size))
        return file.read(size).decode("utf-8", errors="replace")
