"""Main function of a child process: reads its task from the command line, prints the result as the last line of stdout.

On failure the exit code and the end of stderr give the reason. See ``child_ranks.run_child_ranks``. Imports no torch.
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

# Exit codes: invalid config or missing library (2), full disk (28, ENOSPC); other failures exit with 1
EXIT_USAGE_ERROR, EXIT_DISK_FULL = 2, 28
VISIBLE_DEVICES = "CUDA_VISIBLE_DEVICES"


def child_main(run: Callable[[Mapping[str, Any]], Any]) -> NoReturn:
    """Call ``run`` with the task (the first command line argument), print its result as JSON and end the process."""
    code = 0
    try:
        with contextlib.redirect_stdout(sys.stderr):  # libraries write to standard output too
            result = run(json.loads(sys.argv[1]))
        print(json.dumps(result), flush=True)
    except Exception as error:
        is_disk_full = isinstance(error, DiskFullError) or (isinstance(error, OSError) and error.errno in DISK_FULL)
        code = EXIT_DISK_FULL if is_disk_full else EXIT_USAGE_ERROR if isinstance(error, UsageError) else 1
        text = f"{type(error).__name__}: {error}" if isinstance(error, SeatrialError) else traceback.format_exc()
        with contextlib.suppress(OSError):  # on a full disk the message is lost, but the exit code is kept
            print(text.rstrip(), file=sys.stderr, flush=True)
    # Without interpreter teardown: closing the process group may wait forever for peers, and torch's threads may abort
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(code)


def visible_device(device: str) -> str:
    """Return the value of CUDA_VISIBLE_DEVICES with which a process sees only ``device``, such as ``cuda:3``."""
    index, visible = int(device.partition(":")[2]), os.environ.get(VISIBLE_DEVICES)
    return visible.split(",")[index] if visible else str(index)
