"""The only caller of subprocess: every child has its own session, a tag in its environment, and an end.

The tag finds a child's descendants even when they have moved to sessions of their own (torchrun gives each rank one)
or lost their parent, so that stopping a job leaves nothing behind.
"""

from __future__ import annotations

import ctypes
import functools
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

from seatrial.util.signals import EXIT_TERMINATED

_TAG = "SEATRIAL_JOB_TAG"
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_KILLING_S = 10.0  # SIGKILL works at once, or not at all while a process waits in the kernel


@dataclass(frozen=True)
class Child:
    """A running command whose output goes to files."""

    process: subprocess.Popen[bytes]
    tag: str

    def poll(self) -> int | None:
        return self.process.poll()


@dataclass(frozen=True)
class CommandResult:
    """What a short command answered. ``code`` is None when it did not answer in time and was ended."""

    code: int | None
    out: str
    err: str


def run_command(argv: Sequence[str], timeout_s: float) -> CommandResult:
    """Run a short command to its end and return what it said. Raises OSError when it cannot start."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = start(argv, env={}, stdout=out, stderr=err)
        try:
            code: int | None = child.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            if child.poll() is None:  # what ended by itself may have left what is to live on: sbatch, a job of our tag
                stop(child, grace_s=1)
        return CommandResult(code, *(path.read_text(encoding="utf-8", errors="replace") for path in (out, err)))


def start(argv: Sequence[str], *, env: Mapping[str, str], stdout: Path, stderr: Path, without: str = "") -> Child:
    """Start ``argv`` in a session of its own. Raises OSError when it cannot start.

    ``env`` is added to our environment, of which variables that begin with ``without`` are not handed on.
    """
    tag = uuid.uuid4().hex
    ours = {name: value for name, value in os.environ.items() if not (without and name.startswith(without))}
    with stdout.open("ab") as out, stderr.open("ab") as err:
        process = subprocess.Popen(
            argv,
            env={**ours, **env, _TAG: tag},
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=err,
            start_new_session=True,
            preexec_fn=functools.partial(
                die_with_parent, os.getpid()
            ),  # safe: we start children from the main thread, before there are others
        )
    return Child(process, tag)


def stop(child: Child, grace_s: float = 5.0) -> str:
    """End a child and all that descends from it: SIGTERM, ``grace_s`` seconds, then SIGKILL for ``_KILLING_S`` seconds.

    Says what could not be ended; empty when nothing is left. A process that waits in the kernel for a device does not
    even hear SIGKILL (state D), and must not hold us too. A stopped (SIGSTOP) one cannot handle SIGTERM: it is woken.
    """
    deadline = time.monotonic() + grace_s
    _signal_all(child, signal.SIGTERM)
    _signal_all(child, signal.SIGCONT)
    while _family(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    while (left := _family(child)) and time.monotonic() < deadline + _KILLING_S:
        _signal_all(child, signal.SIGKILL)
        time.sleep(0.05)
    if not left:
        child.process.wait()
        return ""
    pids = ", ".join(f"{process.pid} (state {_state(process)})" for process in left)
    return f"could not be ended, not even by SIGKILL: {'pid' if len(left) == 1 else 'pids'} {pids}"


def end(child: Child, wait_s: float = 2.0) -> None:
    """End a child that starts no others: SIGTERM, and no more than ``wait_s`` seconds until it is gone."""
    child.process.terminate()
    deadline = time.monotonic() + wait_s
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)


def die_with_parent(parent: int) -> None:
    """Ask the kernel to end this process when ``parent``, which started it, dies, however that happens (Linux only).

    The kernel says nothing of a parent that has died before it was asked: then we leave at once.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        os._exit(EXIT_TERMINATED)


def is_orphan() -> bool:
    """Whether this descendant of a Child has lost its parent, which carried the same tag, to the init process."""
    tag = os.environ.get(_TAG)
    try:
        return tag is not None and psutil.Process(os.getppid()).environ().get(_TAG) != tag
    except psutil.Error:  # somebody else's process is not the one that started us
        return True


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


def _state(process: psutil.Process) -> str:
    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "gone meanwhile"


def _carries(process: psutil.Process, tag: str) -> bool:
    try:
        return process.environ().get(_TAG) == tag and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # gone, or somebody else's: not ours to end
        return False
