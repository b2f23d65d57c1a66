"""host.load: CPU time that other programs use on the node before the trial puts load on the node."""

from __future__ import annotations

import time

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options, facts
from seatrial.checks.declare import Answers, value, warning
from seatrial.model import Phase, Scope, SeatrialError

WINDOW_S = 1.0
MAX_PROCESSES = 5  # entries of the fact busiest_processes


def measure(context: Context, _options: Options) -> Answers:
    """Yield the busy share of all CPUs during WINDOW_S, and the processes with the highest CPU time.

    Raises SeatrialError if the times of the CPUs do not increase.
    """
    from seatrial.discover import settings

    context.progress("reading the load of the CPUs")
    before_s = _cpu_seconds()
    busy_before, total_before = _cpu_time()
    time.sleep(WINDOW_S)
    busy_after, total_after = _cpu_time()
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
            f"/proc/stat: total CPU time went from {total_before:g} to {total_after:g} s in {WINDOW_S:g} s, expected "
            "an increase. Next: head -1 /proc/stat, twice"
        )
    busy_share = (busy_after - busy_before) / (total_after - total_before)
    yield value("cpu_busy", 100 * busy_share, evidence={"busiest_processes": named})


def _cpu_time() -> tuple[float, float]:
    """Busy and total time of all CPUs in seconds."""
    import psutil

    times = psutil.cpu_times()[:8]  # those of guests follow; user and nice include them
    return sum(times) - sum(times[3:5]), sum(times)  # idle and iowait are not busy


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
