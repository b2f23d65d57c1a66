"""Counts processes of an ended run that still run on a node, where they hold GPUs, memory or ports."""

from __future__ import annotations

from pydantic import Field, JsonValue

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answers, metric, value
from seatrial.model import Measurement, Metric, Phase, Scope


class LeftoversOptions(Options):
    """``run``: the ended run, whose processes are counted."""

    run: str = Field(description="absolute path of the ended run's directory")


def measure(context: Context, options: LeftoversOptions) -> Answers:
    """Yield the number of leftover processes, with their descriptions as evidence.

    Only processes of this PID namespace are visible, not those of other containers.
    """
    import psutil

    # The run directory is in the command line of torchrun and the worker, and in the environment of their children. A
    # zombie has neither, and holds no resources. A process of another user, who cannot have started the run, shows none
    leftovers: list[JsonValue] = []
    for process in psutil.process_iter(["cmdline", "environ", "status"]):
        command, environment = process.info["cmdline"] or [], process.info["environ"] or {}
        if any(f"{options.run}/" in text for text in (*command, *environment.values())):
            leftovers.append(f"{context.node}: pid {process.pid}, {process.info['status']}: {' '.join(command)}")
    yield value("leftover_processes", len(leftovers), evidence=leftovers or None)


def measurement(context: Context, run: str) -> Measurement:
    """Run this check in this process, without a worker, and return its measurement of this host."""
    (count,) = CHECK.observe(context, LeftoversOptions(run=run))
    assert isinstance(count, Metric)
    return Measurement(check=CHECK.name, subject=context.node, metrics=(count,))


CHECK = Check(
    name="nodes.leftovers",
    title="Leftover processes of an ended run",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    declared=(
        metric(
            "leftover_processes",
            "== 0",
            "processes survived their job and hold memory, GPUs or ports that the next job needs",
            "On the node: ps -o pid,ppid,stat,wchan,cmd -p PID; end the processes. State D: waits for a driver or a "
            "filesystem: dmesg | tail. Under Slurm, ProctrackType=proctrack/cgroup prevents them: scontrol show config "
            "| grep -E 'ProctrackType|UnkillableStep'",
            unit="count",
            cause=Cause(
                id="leftover_processes",
                title="processes of an ended run are left on the node",
                place="node",
                explains=("device.*", "transfer.*", "collectives.*", "train.*"),
                wrong_results=True,
                first_command="ps -eo pid,ppid,etime,user,args --sort=start_time | grep seatrial",
                action="fix-environment",
            ),
        ),
    ),
    limit_s=60,
    options=LeftoversOptions,
)
