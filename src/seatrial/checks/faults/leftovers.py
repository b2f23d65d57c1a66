"""Counts processes of an ended run that still run on a node, where they hold GPUs, memory or ports."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.base import Check, Context, Options
from seatrial.model import Fact, Measurement, Metric, Observation, Phase, Rule, Scope

if TYPE_CHECKING:
    import psutil


class LeftoversOptions(Options):
    """``run``: the ended run, whose processes are counted."""

    run: str = Field(description="absolute path of the ended run's directory")


def measure(context: Context, options: LeftoversOptions) -> Iterator[Observation]:
    """Yield the descriptions and the number of leftover processes.

    Only processes of this PID namespace are visible, not those of other containers.
    """
    import psutil

    # The run directory is in the command line of torchrun and the worker, and in the environment of their children. A
    # zombie has neither, and holds no resources.
    leftovers = [
        _description(process)
        for process in psutil.process_iter()
        if any(f"{options.run}/" in text for text in [*_command(process), *_environment(process)])
    ]
    yield Fact(name="leftovers", value=[f"{context.node}: {description}" for description in leftovers])
    yield Metric(name="leftover_processes", value=len(leftovers), unit="count", subject=context.node)


def measurement(context: Context, run: str) -> Measurement:
    """Run this check in this process, without a worker, and return its measurement of this host."""
    fact, metric = measure(context, LeftoversOptions(run=run))
    assert isinstance(fact, Fact)
    assert isinstance(metric, Metric)
    return Measurement(check=CHECK.name, subject=context.node, metrics=(metric,), facts={fact.name: fact.value})


def _command(process: psutil.Process) -> list[str]:
    import psutil

    try:
        return process.cmdline()
    except psutil.Error:  # ended, or a zombie
        return []


def _environment(process: psutil.Process) -> list[str]:
    import psutil

    try:
        return list(process.environ().values())
    except psutil.Error:  # the process has ended, or belongs to another user, who cannot have started the run
        return []


def _description(process: psutil.Process) -> str:
    import psutil

    try:
        return f"pid {process.pid}, {process.status()}: {' '.join(_command(process))}"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}, ended"


CHECK = Check(
    name="nodes.leftovers",
    title="Leftover processes of an ended run",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics={"leftover_processes": "count"},
    rules=(
        Rule(
            metric="leftover_processes",
            expect="== 0",
            evidence_facts=("leftovers",),
            meaning="processes survived their job and hold memory, GPUs or ports that the next job needs",
            fix="On the node: ps -o pid,ppid,stat,wchan,cmd -p PID. State D: waits for a driver or a filesystem: "
            "dmesg | tail. Under Slurm: scontrol show config | grep -E 'ProctrackType|UnkillableStep'",
        ),
    ),
    measure=measure,
    limit_s=60,
    options=LeftoversOptions,
)
