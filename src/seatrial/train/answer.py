"""How a process answers that a check has started (see bench.anew): its last line is JSON, or its exit code says no."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable
from typing import Any, NoReturn

from seatrial.model import SeatrialError, UsageError

REFUSED = 2  # the exit code where nothing was done: a config that cannot be, or a library that is missing


def give(work: Callable[[], Any]) -> NoReturn:
    """Print what ``work`` returns, as JSON, and end. What it raises goes to standard error; REFUSED or 1 is the code.

    Libraries write to standard output too; meanwhile that is standard error.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = work()
    except SeatrialError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        _leave(REFUSED if isinstance(error, UsageError) else 1)
    except Exception:
        traceback.print_exc()
        _leave(1)
    print(json.dumps(found))
    _leave(0)


def _leave(code: int) -> NoReturn:
    """Without tearing down: others may wait for us in the group for ever, and torch's threads may abort."""
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)
