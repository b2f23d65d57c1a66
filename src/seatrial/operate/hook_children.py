"""Runs calls in child processes up to a deadline.

A call that never returns, such as stat on a dead server, is left behind in its process. With threads this would not
work: a process with a thread that hangs in the kernel cannot end, so that the caller of the hook would wait.
"""

from __future__ import annotations

import contextlib
import os
import resource
import selectors
import signal
import time
from collections.abc import Callable, Mapping

from seatrial.util import processes

_MAX_RESULT_BYTES = 2**26
_MAX_DESCRIPTORS = 65_536  # a child closes descriptors up to this number, or up to the limit of the process


def run_all(calls: Mapping[str, Callable[[], bytes]], deadline: float) -> dict[str, bytes | None]:
    """Return the result of each call: empty if the call failed, None if it has not returned at ``deadline``.

    ``deadline``: as of time.monotonic. All calls run at once, each in a process without output and without open files
    of this process, so that no caller waits for a process that is left behind.
    """
    results: dict[str, bytes | None] = dict.fromkeys(calls)
    buffers = {name: bytearray() for name in calls}
    pids: dict[str, int] = {}
    with selectors.DefaultSelector() as selector:
        for name, call in calls.items():
            pids[name], descriptor = _start(call)
            selector.register(descriptor, selectors.EVENT_READ, name)
        while selector.get_map() and (remaining_s := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(remaining_s):
                chunk = os.read(key.fd, 2**20)
                buffers[key.data] += chunk[: _MAX_RESULT_BYTES - len(buffers[key.data])]
                if not chunk:
                    results[key.data] = bytes(buffers[key.data])
                    selector.unregister(key.fd)
                    os.close(key.fd)
        for unfinished in list(selector.get_map().values()):
            os.close(unfinished.fd)
    for pid in pids.values():
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, os.WNOHANG)  # does not wait: a process in uninterruptible sleep does not end
    return results


def _start(call: Callable[[], bytes]) -> tuple[int, int]:
    """Start a process for the call; return its pid and the descriptor from which its result can be read."""
    read_end, write_end = os.pipe()
    parent = os.getpid()
    pid = os.fork()
    if pid:
        os.close(write_end)
        return pid, read_end
    try:
        processes.die_with_parent(parent, signal.SIGKILL)
        _close_others(write_end)
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(call())
    except BaseException:  # the parent sees an empty result; nothing may return into its code
        os._exit(1)
    os._exit(0)


def _close_others(kept: int) -> None:
    """Open /dev/null as the standard streams, and close all other descriptors except ``kept``."""
    null = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(null, standard)
    limit = min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], _MAX_DESCRIPTORS)
    os.closerange(3, kept)
    os.closerange(kept + 1, max(limit, kept + 1))
