"""Launchers: the same worker, started in different ways."""

from __future__ import annotations

from seatrial.launch.base import Launcher
from seatrial.launch.local import LocalLauncher
from seatrial.launch.slurm import SlurmLauncher
from seatrial.launch.torchrun import TorchrunLauncher
from seatrial.model import UsageError
from seatrial.settings import Config


def by_slurm(settings: Config) -> bool:
    """Whether Slurm starts the jobs: it was asked for, or several nodes were and nothing else can reach them."""
    return settings.launcher == "slurm" or (settings.launcher == "auto" and settings.cluster.nodes > 1)


def elsewhere(settings: Config) -> bool:
    """Whether jobs run on other machines than this one, whose GPUs then say nothing about theirs."""
    return by_slurm(settings) or settings.launcher == "torchrun"


def launcher_for(settings: Config, placement: str) -> Launcher:
    """Who starts jobs of this placement. Raises UsageError when it cannot be used here.

    A ``control`` job runs where we are, whoever starts the others.
    """
    nodes = 1 if placement == "control" else settings.cluster.nodes
    launcher: Launcher = LocalLauncher()
    if placement != "control" and by_slurm(settings):
        launcher = SlurmLauncher(settings)
    elif placement != "control" and settings.launcher == "torchrun":
        launcher = TorchrunLauncher(settings)
    reason = launcher.available(nodes)
    if reason:
        raise UsageError(f"the {launcher.name} launcher cannot be used: {reason}")
    return launcher
