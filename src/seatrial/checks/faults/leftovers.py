"""Does anything of a run that has ended still run on a node? A process left behind holds a GPU, memory, or a port."""

from __future__ import annotations

from collections.abc import Iterator

import psutil
from pydantic import Field

from seatrial.checks.base import Check, Context, Options
from seatrial.model import Fact, Metric, Observation, Phase, Rule, Scope


class LeftoversOptions(Options):
    run: str = Field(description="the run directory of the run that has ended, by its absolute path")


def measure(context: Context, options: LeftoversOptions) -> Iterator[Observation]:
    """Sees the processes of this PID namespace: those of a container with one of its own only from within it."""
    # torchrun and worker name the run's directory on their command line, what they start does in its environment. A
    # zombie does no longer: it holds nothing, and waits for its parent
    found = [
        _described(process)
        for process in psutil.process_iter()
        if any(f"{options.run}/" in text for text in [*_command(process), *_environment(process)])
    ]
    yield Fact(name="left", value=[f"{context.node}: {words}" for words in found])
    yield Metric(name="processes", value=len(found), unit="count", subject=context.node)


def _command(process: psutil.Process) -> list[str]:
    try:
        return process.cmdline()
    except psutil.Error:  # gone, or a zombie
        return []


def _environment(process: psutil.Process) -> list[str]:
    try:
        return list(process.environ().values())
    except psutil.Error:  # gone, or somebody else's: our own are what is looked for
        return []


def _described(process: psutil.Process) -> str:
    try:
        return f"pid {process.pid}, {process.status()}: {' '.join(_command(process))}"
    except psutil.NoSuchProcess:
        return f"pid {process.pid}, gone since"


CHECK = Check(
    name="nodes.leftovers",
    title="No process is left of a run that has ended",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    metrics={"processes": "count"},
    rules=(
        Rule(
            metric="processes",
            expect="== 0",
            evidence_facts=("left",),
            meaning="a process outlived the job that it belonged to: it holds memory, GPUs and ports of the next one",
            fix="On that node: ps -o pid,ppid,stat,wchan,cmd -p PID. State D waits for a driver or a filesystem: "
            "dmesg | tail. Under Slurm: scontrol show config | grep -E 'ProctrackType|UnkillableStep'",
        ),
    ),
    measure=measure,
    limit_s=60,
    options=LeftoversOptions,
)
