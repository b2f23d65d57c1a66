"""Launchers: the same worker, started in different ways."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seatrial.config.schema import Config
from seatrial.launch.base import Launcher
from seatrial.launch.local import LocalLauncher
from seatrial.launch.slurm import SlurmLauncher
from seatrial.launch.slurm_job import cancel_remaining_jobs
from seatrial.launch.torchrun import TorchrunLauncher
from seatrial.model import UsageError


def uses_slurm(settings: Config) -> bool:
    """Whether Slurm starts the jobs: it was asked for, or several nodes were and nothing else can reach them."""
    return settings.launcher == "slurm" or (settings.launcher == "auto" and settings.cluster.nodes > 1)


def runs_remotely(settings: Config) -> bool:
    """Whether jobs run on other machines than this one, whose GPUs then say nothing about theirs."""
    return uses_slurm(settings) or settings.launcher == "torchrun"


def launcher_for(settings: Config, placement: str) -> Launcher:
    """Who starts jobs of this placement. Raises UsageError when it cannot be used here.

    A ``control`` job runs where we are, whoever starts the others.
    """
    nodes = 1 if placement == "control" else settings.cluster.nodes
    launcher: Launcher = LocalLauncher()
    if placement != "control" and uses_slurm(settings):
        launcher = SlurmLauncher(settings)
    elif placement != "control" and settings.launcher == "torchrun":
        launcher = TorchrunLauncher(settings)
    reason = launcher.available(nodes)
    if reason:
        raise UsageError(f"the {launcher.name} launcher cannot be used: {reason}")
    return launcher


def cancel_earlier_jobs(settings: Config, run_dir: Path) -> Iterator[str]:
    """End what an earlier run in this directory has left running, should it have been killed: a word before each.

    On this machine the kernel has ended it already (``shell.die_with_parent``). Raises SeatrialError where it cannot
    be ended.
    """
    if uses_slurm(settings):
        yield from cancel_remaining_jobs(run_dir, settings)
