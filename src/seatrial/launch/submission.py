"""Starts a job, again while the scheduler may still accept it."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

from seatrial.launch.base import JobRefused, Launcher, RenderedJob, StartedJob

_RETRY_S, _POLL_S = 60.0, 5.0  # how long a job is submitted again after a transient refusal, and the time in between


def start_job(launcher: Launcher, rendered: RenderedJob, folder: Path, warn: Callable[[str], None]) -> StartedJob:
    """Start the job in the folder of an attempt. Raises SeatrialError, or OSError on a full disk.

    ``warn`` gets one line when the scheduler refuses the job for the first time, but may accept it within _RETRY_S.
    """
    deadline, is_first = time.monotonic() + _RETRY_S, True
    while True:
        try:
            return launcher.start(rendered, folder)
        except JobRefused as error:
            if not error.transient:
                raise
            if time.monotonic() > deadline:
                raise JobRefused(f"refused for {_RETRY_S:g} s: {error}", error.failures) from None
            if is_first:
                warn(f"{launcher.name} does not accept the job at the moment; trying again for {_RETRY_S:g} s: {error}")
        is_first = False
        time.sleep(_POLL_S)
