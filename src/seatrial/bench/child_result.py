"""The child's side of ``fresh_ranks.ask_anew``: its task is its argument, its answer the last line of standard output.

Without an answer its exit code and the end of its standard error say why. Nothing here imports torch.
"""

from __future__ import annotations

import contextlib
import json
import os
import sys
import traceback
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

from seatrial.model import DiskFullError, SeatrialError, UsageError
from seatrial.util.files import DISK_FULL

# Exit codes that say nothing of what was to be measured: a config that cannot be or a missing library; a full disk
EXIT_USAGE_ERROR, EXIT_DISK_FULL = 2, 28


def child_main(run: Callable[[Mapping[str, Any]], Any]) -> NoReturn:
    """Print what ``run`` returns for the task, as JSON, and end the process: the whole life of a child."""
    code = 0
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries write to standard output too
            answer = run(json.loads(sys.argv[1]))
        print(json.dumps(answer), flush=True)
    except SeatrialError as error:
        code = (
            EXIT_USAGE_ERROR
            if isinstance(error, UsageError)
            else EXIT_DISK_FULL
            if isinstance(error, DiskFullError)
            else 1
        )
        _report(f"{type(error).__name__}: {error}")
    except Exception as error:
        code = EXIT_DISK_FULL if isinstance(error, OSError) and error.errno in DISK_FULL else 1
        _report(traceback.format_exc())
    # Without tearing down: others may wait for us in the group for ever, and torch's threads may abort
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def _report(text: str) -> None:
    with contextlib.suppress(OSError):  # its disk may be full: the exit code still tells
        print(text.rstrip(), file=sys.stderr, flush=True)
