"""The only caller of subprocess: every child has its own session, a tag in its environment, and an end.

The tag finds a child's descendants even when they have moved to sessions of their own (torchrun gives each rank one)
or lost their parent, so that stopping a job leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import os
import signal
import subprocess
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import psutil

_TAG = "SEATRIAL_JOB_TAG"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h


@dataclass(frozen=True)
class Child:
    """A running command whose output goes to files."""

    process: subprocess.Popen[bytes]
    tag: str

    def poll(self) -> int | None:
        return self.process.poll()


@dataclass(frozen=True)
class Answer:
    """What a short command answered. ``code`` is None when it did not answer in time and was ended."""

    code: int | None
    out: str
    err: str


def ask(argv: Sequence[str], timeout_s: float) -> Answer:
    """Run a short command to its end and return what it said. Raises OSError when it cannot start."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = start(argv, env={}, stdout=out, stderr=err)
        try:
            code: int | None = child.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            stop(child, grace_s=1)
        return Answer(code, *(path.read_text(encoding="utf-8", errors="replace") for path in (out, err)))


def start(argv: Sequence[str], *, env: Mapping[str, str], stdout: Path, stderr: Path) -> Child:
    """Start ``argv`` in a session of its own. ``env`` is added to ours. Raises OSError when it cannot start."""
    tag = uuid.uuid4().hex
    with stdout.open("ab") as out, stderr.open("ab") as err:
        process = subprocess.Popen(
            argv,
            env={**os.environ, **env, _TAG: tag},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=die_with_parent,  # safe: we start children from the main thread, before there are others
        )
    return Child(process, tag)


def stop(child: Child, grace_s: float = 5.0) -> None:
    """End a child and all that descends from it: SIGTERM, ``grace_s`` seconds, SIGKILL until none is left.

    A stopped (SIGSTOP) process cannot handle SIGTERM, so it is woken first.
    """
    deadline = time.monotonic() + grace_s
    _signal_all(child, signal.SIGTERM)
    _signal_all(child, signal.SIGCONT)
    while _family(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    while _family(child) and time.monotonic() < deadline + 10:
        _signal_all(child, signal.SIGKILL)
        time.sleep(0.05)
    child.process.wait()


def die_with_parent() -> None:
    """Ask the kernel to end this process when the one that started it dies, however that happens (Linux only)."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)


def age_s() -> float:
    """Seconds since this process was started: proc(5), field 22 of stat, in clock ticks since boot."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _signal_all(child: Child, number: signal.Signals) -> None:
    for process in _family(child):
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _family(child: Child) -> list[psutil.Process]:
    """The processes that carry the child's tag and still run (a zombie waits for its parent, not for us)."""
    child.process.poll()
    return [process for process in psutil.process_iter() if _carries(process, child.tag)]


def _carries(process: psutil.Process, tag: str) -> bool:
    try:
        return process.environ().get(_TAG) == tag and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # gone, or somebody else's: not ours to end
        return False
