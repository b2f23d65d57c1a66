"""Child processes: no other module calls subprocess. Each child gets its own session and a tag in its environment.

``stop`` finds all descendants of a child by the tag, including those in other sessions (torchrun starts each rank in a
session of its own) and those whose parent has ended.
"""

from __future__ import annotations

import contextlib
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
from typing import TYPE_CHECKING

from seatrial.util.signals import EXIT_TERMINATED

# psutil is imported when processes are searched: most commands search none, and its import takes 6 ms
if TYPE_CHECKING:
    import psutil

TAG = "SEATRIAL_JOB_TAG"  # in the environment of a child and of its descendants
_PR_SET_PDEATHSIG = 1  # linux/prctl.h
_SIGKILL_WAIT_S = 10.0  # SIGKILL acts at once, or not at all while a process is in uninterruptible sleep


@dataclass(frozen=True)
class Child:
    """A running command whose output goes to files."""

    process: subprocess.Popen[bytes]
    tag: str

    def poll(self) -> int | None:
        return self.process.poll()


@dataclass(frozen=True)
class CommandResult:
    """The result of a short command. ``code`` is None if it exceeded its timeout and was ended."""

    code: int | None
    out: str
    err: str


def run_command(argv: Sequence[str], timeout_s: float, *, stdin: int = subprocess.DEVNULL) -> CommandResult:
    """Run a short command and return its exit code and output. Raises OSError if it cannot start."""
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "out", Path(folder) / "err"
        child = start(argv, env={}, stdout=out, stderr=err, stdin=stdin)
        try:
            code: int | None = child.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            # do not stop it after a normal end: a job that sbatch started on this host has the tag, and must continue
            if child.poll() is None:
                stop(child, grace_s=1)
        return CommandResult(code, *(path.read_text(encoding="utf-8", errors="replace") for path in (out, err)))


def start(
    argv: Sequence[str],
    *,
    env: Mapping[str, str],
    stdout: Path,
    stderr: Path,
    stdin: int = subprocess.DEVNULL,
    without: str = "",
    death_signal: signal.Signals = signal.SIGTERM,
) -> Child:
    """Start ``argv`` in its own session. Raises OSError if it cannot start.

    ``stdout``, ``stderr``: files to which the output is appended. The child gets this process's environment, without
    variables with the prefix ``without``, plus ``env``. When this process dies, the kernel sends ``death_signal`` to
    the child; a child in the state stopped (SIGSTOP) acts on SIGKILL only.
    """
    tag = uuid.uuid4().hex
    with stdout.open("ab") as out, stderr.open("ab") as err:
        process = subprocess.Popen(
            argv,
            env={**inherited(without), **env, TAG: tag},
            stdin=stdin,
            stdout=out,
            stderr=err,
            start_new_session=True,
            # the kernel sends PDEATHSIG when the thread that started the child ends: call this in the main thread only
            preexec_fn=functools.partial(die_with_parent, os.getpid(), death_signal),
        )
    return Child(process, tag)


def inherited(without: str = "") -> dict[str, str]:
    """Return the variables that a child gets from this process: not its tag, and none with the prefix ``without``."""
    prefixes = (without, TAG) if without else (TAG,)
    return {name: value for name, value in os.environ.items() if not name.startswith(prefixes)}


def stop(child: Child, grace_s: float = 5.0) -> str:
    """End a child and its descendants by SIGTERM and, after ``grace_s`` seconds, SIGKILL.

    Return a message with the pids that still run; empty if all have ended. Processes also get SIGCONT, since one that
    SIGSTOP stopped cannot handle SIGTERM. A process in uninterruptible sleep (state D) ignores SIGKILL, so that this
    function gives up after ``_SIGKILL_WAIT_S``.
    """
    deadline = time.monotonic() + grace_s
    _signal_all(child, signal.SIGTERM)
    _signal_all(child, signal.SIGCONT)
    while _descendants(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    while (remaining := _descendants(child)) and time.monotonic() < deadline + _SIGKILL_WAIT_S:
        _signal_all(child, signal.SIGKILL)
        time.sleep(0.05)
    if not remaining:
        child.process.wait()
        return ""
    pids = ", ".join(f"{process.pid} (state {_state(process)})" for process in remaining)
    return f"still running after SIGKILL: {'pid' if len(remaining) == 1 else 'pids'} {pids}"


def terminate(child: Child, wait_s: float = 2.0) -> None:
    """End a child that has no descendants, by SIGTERM and, after ``wait_s`` seconds, SIGKILL."""
    child.process.terminate()
    deadline = time.monotonic() + wait_s
    while child.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    child.process.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # a process in uninterruptible sleep does not end
        child.process.wait(wait_s)


def die_with_parent(parent: int, death_signal: signal.Signals = signal.SIGTERM) -> None:
    """Make the kernel send ``death_signal`` to this process when ``parent`` dies (Linux only).

    Exits at once if ``parent`` has died already: the kernel sends no signal for an earlier death.
    """
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, death_signal)
    if os.getppid() != parent:
        os._exit(EXIT_TERMINATED)


def is_orphan() -> bool:
    """Return whether the parent of this process has ended; False if this process is not a descendant of a Child.

    If the parent has ended, another process adopts this one. That process does not have the tag.
    """
    import psutil

    tag = os.environ.get(TAG)
    try:
        return tag is not None and psutil.Process(os.getppid()).environ().get(TAG) != tag
    except psutil.Error:  # the parent belongs to another user: it did not start this process, but adopted it
        return True


def age_s() -> float:
    """Return the seconds since this process started (proc(5): field 22 of stat, in clock ticks since boot)."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    return time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")


def _signal_all(child: Child, number: signal.Signals) -> None:
    import psutil

    for process in _descendants(child):
        try:
            process.send_signal(number)
        except psutil.NoSuchProcess:
            continue


def _descendants(child: Child) -> list[psutil.Process]:
    """Return the running processes with the child's tag, without zombies."""
    import psutil

    child.process.poll()
    return [process for process in psutil.process_iter() if _has_tag(process, child.tag)]


def _state(process: psutil.Process) -> str:
    import psutil

    try:
        return str(process.status())
    except psutil.NoSuchProcess:
        return "ended meanwhile"


def _has_tag(process: psutil.Process, tag: str) -> bool:
    import psutil

    try:
        return process.environ().get(TAG) == tag and process.status() != psutil.STATUS_ZOMBIE
    except psutil.Error:  # ended, or a process of another user
        return False
