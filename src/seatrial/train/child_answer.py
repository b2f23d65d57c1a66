"""How a process answers that a check has started (see bench.anew): its last line is JSON, or its exit code says no."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from seatrial.model import SeatrialError, UsageError
from seatrial.train import disk

# Exit codes that say nothing of who trains: a config that cannot be, or a library that is missing; and a full disk
REFUSED, NO_ROOM = 2, 28


def give(work: Callable[[], Any], place: Path) -> NoReturn:
    """Print what ``work`` returns, as JSON, and end. What it raises goes to standard error; the code is 1, or of these.

    ``place`` is where it writes. Libraries write to standard output too; meanwhile that is standard error.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = work()
    except SeatrialError as error:
        _say(f"{type(error).__name__}: {error}")
        _leave(REFUSED if isinstance(error, UsageError) else NO_ROOM if isinstance(error, disk.NoRoom) else 1)
    except Exception as error:
        _say(traceback.format_exc())
        _fail(error, place)
    try:
        print(json.dumps(found), flush=True)
    except OSError as error:
        _say(f"OSError: {error}")
        _fail(error, place)
    _leave(0)


def _fail(error: Exception, place: Path) -> NoReturn:
    full = disk.no_room(error, place)
    if full:
        _say(f"NoRoom: {full}")
    _leave(NO_ROOM if full else 1)


def _say(text: str) -> None:
    """As far as the disk takes it that standard error goes to: the code says the rest."""
    with contextlib.suppress(OSError):
        print(text.rstrip(), file=sys.stderr, flush=True)


def _leave(code: int) -> NoReturn:
    """Without tearing down: others may wait for us in the group for ever, and torch's threads may abort."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)
