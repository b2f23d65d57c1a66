"""Launchers: the same worker, started in different ways."""

from __future__ import annotations

from seatrial.launch.base import Launcher
from seatrial.launch.local import LocalLauncher
from seatrial.model import UsageError

LAUNCHERS: tuple[Launcher, ...] = (LocalLauncher(),)


def launcher_for(name: str, placement: str = "") -> Launcher:
    """The launcher called ``name``, or for ``auto`` the first that can be used here. Raises UsageError.

    A ``control`` job runs where we are, whoever starts the others.
    """
    if placement == "control":
        return LocalLauncher()
    reasons = []
    for launcher in LAUNCHERS:
        if name in (launcher.name, "auto"):
            reason = launcher.available()
            if reason is None:
                return launcher
            reasons.append(f"{launcher.name}: {reason}")
    raise UsageError(f"launcher {name} cannot be used here: {'; '.join(reasons) or 'there is none of that name'}")
