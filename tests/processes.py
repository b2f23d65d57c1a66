"""Runs seatrial as a process, and waits for conditions."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any, ClassVar, TypeVar
from unittest.mock import patch

import psutil
import pytest

from seatrial.cli import app
from seatrial.model import Trial

T = TypeVar("T")
TAG = "SEATRIAL_TEST_TAG"
CPU_ONLY = "cluster: {gpus_per_node: 0}\n"  # in trials of tests, which may be accepted without a GPU
# no sampler: its start takes half the CPU time of that of the worker
HOST_ONLY = CPU_ONLY + "telemetry: {enabled: false}\nchecks: {host.inventory: }\n"


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """Return the first truthy result of ``condition``. Raises AssertionError after ``seconds``."""
    deadline = time.monotonic() + seconds
    while not (result := condition()):
        assert time.monotonic() < deadline, "timeout"
        time.sleep(0.02)
    return result


def with_enough_time(call: Callable[[float], T], enough: Callable[[T], Any], seconds: float) -> T:
    """Return ``call(seconds)``; with 5, 25 and 125 times as many seconds until the result is ``enough``.

    For calls that a hanging part always takes to the end of its time, in which the others must have ended.
    """
    result = call(seconds)
    for factor in (5, 25, 125):
        if enough(result):
            break
        result = call(factor * seconds)
    return result


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Program:
    """A ``seatrial`` process with captured output; ``first`` is Python code that runs before it."""

    started: ClassVar[list[Program]] = []  # in the current test

    def __init__(
        self, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, first: str = ""
    ) -> None:
        self.tag = os.urandom(8).hex()
        start = ["-c", f"{first}\nfrom seatrial.cli.app import main\nmain()"] if first else ["-m", "seatrial"]
        self.command = [sys.executable, *start, *map(str, arguments)]
        self.process = subprocess.Popen(
            self.command,
            env={**os.environ, **(env or {}), "COLUMNS": "200", TAG: self.tag},  # env may be a copy of os.environ
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self.output: tuple[str, str] | None = None
        self.started.append(self)

    def finish(self, seconds: float = 180) -> tuple[int, str, str]:
        """Wait for the end; return exit code, standard output and standard error."""
        self.output = out, err = self.process.communicate(timeout=seconds)
        return self.process.returncode, out, err

    def report(self) -> str:
        """Return how the process ended and what it printed; it is killed if it still runs."""
        running = self.process.poll() is None
        if self.output is None:
            self.process.kill()
            try:
                self.finish(seconds=10)
            except (subprocess.TimeoutExpired, ValueError) as error:  # another process has it open, or the test read it
                self.output = (f"cannot be read: {error}", "")
        out, err = self.output or ("", "")
        end = "killed after the failure of the test" if running else f"exit code {self.process.returncode}"
        return f"{shlex.join(self.command)}\n{end}\n--- stdout\n{out}\n--- stderr\n{err}"

    def left_behind(self) -> list[int]:
        """Return the pids of its processes that still run."""
        return [process.pid for process in psutil.process_iter() if self._has_tag(process)]

    def _has_tag(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(TAG) == self.tag and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def run(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    """Run seatrial in a new process; return exit code, standard output and standard error."""
    return Program(*arguments, env=env, cwd=cwd).finish()


def call(
    *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, columns: int = 200
) -> tuple[int, str, str]:
    """Run seatrial's main in this process, which saves the start of a new one; return the same as ``run``.

    Its workers are real processes. Use ``Program`` for trials that are killed, that test the encoding or start time, or
    that must not leave processes.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.getsignal(number))
        stack.enter_context(patch.dict(os.environ, {**(env or {}), "COLUMNS": str(columns)}))
        stack.enter_context(patch.object(sys, "argv", ["seatrial", *map(str, arguments)]))
        stack.enter_context(contextlib.chdir(cwd or Path.cwd()))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        exit_ = stack.enter_context(pytest.raises(SystemExit))
        app.main()
    outputs = (stream.buffer.getvalue().decode() for stream in (out, err))
    return (exit_.value.code or 0, *outputs)  # type: ignore[return-value]


def heartbeats(run_dir: Path, job: str, attempt: int = 1) -> Iterator[dict[str, Any]]:
    """Yield the heartbeat of each rank of a job, by rank."""
    for path in sorted((run_dir / "jobs" / job / f"attempt{attempt}").glob("rank*.heartbeat.json")):
        try:
            yield json.loads(path.read_text())
        except (OSError, ValueError):  # removed or truncated meanwhile
            continue


def ranks_in_check(run_dir: Path, job: str, check: str, ranks: int) -> list[dict[str, Any]]:
    """Return the heartbeats of all ranks if all are in ``check``, else an empty list."""
    current = list(heartbeats(run_dir, job))
    return current if len(current) == ranks and all(rank["status"] == check for rank in current) else []


def run_host_only(folder: Path, trial: str = HOST_ONLY) -> tuple[Path, str]:
    """Run a passing trial of host.inventory; return its run directory and output."""
    (folder / "host.yaml").write_text(trial)
    code, out, err = run("run", folder / "host.yaml", "--out", folder / "run")
    assert code == 0, err
    return folder / "run", out


def load(run_dir: Path) -> Trial:
    return Trial.model_validate_json((run_dir / "trial.json").read_text())
