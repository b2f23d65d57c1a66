"""host.load: CPU time that other programs use on the node before the trial puts load on the node."""

from __future__ import annotations

import time
from pathlib import Path

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, value, warning
from seatrial.model import Phase, Scope, SeatrialError

WINDOW_S = 1.0
MAX_PROCESSES = 5  # entries of the fact busiest_processes


def measure(context: Context, _options: Options) -> Answers:
    """Yield the busy share of all CPUs during WINDOW_S, and the processes with the highest CPU time.

    Raises SeatrialError if /proc/stat cannot be read, or if its times do not increase.
    """
    from seatrial.discover import settings

    context.progress("reading the load of the CPUs")
    before_s = _cpu_seconds()
    busy_before, total_before = _cpu_time(context.root)
    time.sleep(WINDOW_S)
    busy_after, total_after = _cpu_time(context.root)
    used = [
        (seconds - before_s[pid][0], pid, name) for pid, (seconds, name) in _cpu_seconds().items() if pid in before_s
    ]
    named = [
        {"pid": pid, "name": name, "cpus": round(seconds / WINDOW_S, 2)}
        for seconds, pid, name in sorted(used, reverse=True)[:MAX_PROCESSES]
        if seconds > 0
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


def _cpu_seconds() -> dict[int, tuple[float, str]]:
    """PID → user and system time since the start, and name, of each process whose times this user can read."""
    import psutil

    processes = psutil.process_iter(["name", "cpu_times"])
    infos = {process.pid: process.info for process in processes if process.info["cpu_times"]}
    return {pid: (info["cpu_times"].user + info["cpu_times"].system, info["name"]) for pid, info in infos.items()}


CHECK = Check(
    name="host.load",
    title="CPU load of other programs",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    limit_s=60,
    declared=(
        warning(
            "cpu_busy",
            # On an idle GPU node monitoring and this check use less than 5 %. On a loaded node kernel launches, host
            # copies and data loading are slower.
            "<= 25 %",
            "Other programs use this share of the CPUs: kernel launches, host copies and data loading are slower.",
            "End the processes in busiest_processes, or their jobs, and run the trial again.",
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
