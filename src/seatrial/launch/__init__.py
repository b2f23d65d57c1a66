"""Launchers: the same worker, started in different ways."""

from __future__ import annotations

from seatrial.launch.base import Launcher
from seatrial.launch.local import LocalLauncher
from seatrial.model import UsageError
from seatrial.settings import Config


def launcher_for(settings: Config, placement: str) -> Launcher:
    """Who starts jobs of this placement. Raises UsageError when it cannot be used here.

    A ``control`` job runs where we are, whoever starts the others.
    """
    launcher = LocalLauncher()
    reason = launcher.available(1 if placement == "control" else settings.cluster.nodes)
    if reason:
        raise UsageError(f"the {launcher.name} launcher cannot be used: {reason}")
    return launcher
