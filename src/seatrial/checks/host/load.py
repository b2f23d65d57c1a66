"""host.load: CPU time that other programs use on the node before the trial puts load on the node."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from pydantic import JsonValue

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answer, metric, value
from seatrial.model import Outcome, Phase, Scope, SeatrialError

if TYPE_CHECKING:
    import psutil

WINDOW_S = 1.0
MAX_PROCESSES = 5  # entries of the fact busiest_processes


def measure(context: Context, _options: Options) -> Iterator[Answer]:
    """Yield the busy share of all CPUs during WINDOW_S, and the processes with the highest CPU time.

    Raises SeatrialError if /proc/stat cannot be read, or if its times do not increase.
    """
    import psutil

    from seatrial.discover import settings

    context.progress("reading the load of the CPUs")
    processes = {process.pid: process for process in psutil.process_iter()}
    cpu_s_before = {pid: _cpu_seconds(process) for pid, process in processes.items()}
    busy_before, total_before = _cpu_time(context.root)
    time.sleep(WINDOW_S)
    busy_after, total_after = _cpu_time(context.root)
    cpu_s_by_pid = {pid: _cpu_seconds(process) - cpu_s_before[pid] for pid, process in processes.items()}
    active = [pid for pid, cpu_s in cpu_s_by_pid.items() if cpu_s > 0]
    busiest = sorted(active, key=lambda pid: -cpu_s_by_pid[pid])[:MAX_PROCESSES]
    named: list[JsonValue] = [
        {"pid": pid, "name": _name(processes[pid]), "cpus": round(cpu_s_by_pid[pid] / WINDOW_S, 2)} for pid in busiest
    ]
    gpu_node = "yes" if settings.is_gpu_node(context.root) else "no"
    yield from facts({"gpu_node": gpu_node, "busiest_processes": named})
    if total_after <= total_before:
        raise SeatrialError(
            f"{context.root / 'proc/stat'}: total CPU time went from {total_before} to {total_after} ticks in "
            f"{WINDOW_S:g} s, expected an increase. Next: head -1 /proc/stat, twice"
        )
    busy_share = (busy_after - busy_before) / (total_after - total_before)
    yield value("cpu_busy", 100 * busy_share, evidence={"busiest_processes": named})


def _cpu_time(root: Path) -> tuple[int, int]:
    """Busy and total time of all CPUs in clock ticks: proc(5), /proc/stat."""
    path = root / "proc" / "stat"
    try:
        name, *fields = path.read_text().splitlines()[0].split()
        ticks = [int(field) for field in fields[:8]]  # user, nice, system, idle, iowait, irq, softirq, steal
    except (OSError, ValueError, IndexError) as error:
        raise SeatrialError(f"cannot read {path}: {error}") from error
    if name != "cpu" or len(ticks) < 4:
        raise SeatrialError(f"{path}: the first line is {name!r}, expected cpu with at least 4 times")
    return sum(ticks) - sum(ticks[3:5]), sum(ticks)


def _cpu_seconds(process: psutil.Process) -> float:
    """User and system time of a process since its start; 0 if the process ended or this user cannot read its times."""
    import psutil

    try:
        times = process.cpu_times()
    except psutil.Error:  # ended, or not readable by this user
        return 0.0
    return float(times.user + times.system)


def _name(process: psutil.Process) -> str:
    import psutil

    try:
        return process.name()
    except psutil.Error:
        return "ended"


CHECK = Check(
    name="host.load",
    title="CPU load of other programs",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    limit_s=60,
    declared=(
        metric(
            "cpu_busy",
            # On an idle GPU node monitoring and this check use less than 5 %. On a loaded node kernel launches, host
            # copies and data loading are slower.
            "<= 25 %",
            "Other programs use this share of the CPUs: kernel launches, host copies and data loading are slower.",
            "End the processes in busiest_processes, or their jobs, and run the trial again.",
            outcome=Outcome.WARN,
            when="gpu_node == yes",
            cause=Cause(
                id="busy_cpus",
                title="other programs use the CPUs of the node",
                place="node",
                explains=("transfer.host", "host.speed", "collectives.*", "train.*"),
                processes_fact="busiest_processes",
                first_command="top -b -n 1 -o %CPU | head -17",
                process_command="ps -o pid,user,psr,pcpu,lstart,args -p {pids}",
                action="fix-environment",
            ),
        ),
    ),
)
