"""Starting the real program, and waiting for what it does."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, redirect_stderr, redirect_stdout
from pathlib import Path
from typing import Any
from unittest.mock import patch

import psutil
import pytest

from seatrial.cli import app
from seatrial.model import Trial

TAG = "SEATRIAL_TEST_TAG"
HOST_ONLY = "checks: {host.inventory: }\n"


def until(condition: Callable[[], Any], seconds: float = 120) -> Any:
    """The first truthy answer of ``condition``; an AssertionError when the time is up."""
    deadline = time.monotonic() + seconds
    while not (answer := condition()):
        assert time.monotonic() < deadline, "waited too long"
        time.sleep(0.02)
    return answer


def alive(pid: int) -> bool:
    return psutil.pid_exists(pid) and psutil.Process(pid).status() != psutil.STATUS_ZOMBIE


class Program:
    """``seatrial`` as a user runs it: a process of its own, its output captured. It may run other code ``first``."""

    def __init__(
        self, *arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None, first: str = ""
    ) -> None:
        self.tag = os.urandom(8).hex()
        start = ["-c", f"{first}\nfrom seatrial.cli.app import main\nmain()"] if first else ["-m", "seatrial"]
        self.process = subprocess.Popen(
            [sys.executable, *start, *map(str, arguments)],
            env={**os.environ, "COLUMNS": "200", TAG: self.tag, **(env or {})},
            cwd=cwd,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def finish(self, seconds: float = 180) -> tuple[int, str, str]:
        """Exit code, standard output, standard error."""
        try:
            out, err = self.process.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise
        return self.process.returncode, out, err

    def left_behind(self) -> list[int]:
        """Processes of this program that still run."""
        return [process.pid for process in psutil.process_iter() if self._is_ours(process)]

    def _is_ours(self, process: psutil.Process) -> bool:
        try:
            return process.environ().get(TAG) == self.tag and process.status() != psutil.STATUS_ZOMBIE
        except psutil.Error:
            return False


def run(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    """Exit code, standard output, standard error of a process of its own."""
    return Program(*arguments, env=env, cwd=cwd).finish()


def call(*arguments: str | Path, env: dict[str, str] | None = None, cwd: Path | None = None) -> tuple[int, str, str]:
    """What ``run`` gives, by seatrial's main in this process: without what a new one takes to start.

    Its workers are real processes. A trial that is killed, whose encoding or time of the start counts, or that must
    leave no process behind, needs a process of its own.
    """
    out, err = (io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True) for _ in range(2))
    with ExitStack() as stack:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
            stack.callback(signal.signal, number, signal.getsignal(number))
        stack.enter_context(patch.dict(os.environ, {"COLUMNS": "200", **(env or {})}))
        stack.enter_context(patch.object(sys, "argv", ["seatrial", *map(str, arguments)]))
        stack.enter_context(contextlib.chdir(cwd or Path.cwd()))
        stack.enter_context(redirect_stdout(out))
        stack.enter_context(redirect_stderr(err))
        ended = stack.enter_context(pytest.raises(SystemExit))
        app.main()
    said = (stream.buffer.getvalue().decode() for stream in (out, err))
    return (ended.value.code or 0, *said)  # type: ignore[return-value]


def pulses(run_dir: Path, job: str, attempt: int = 1) -> Iterator[dict[str, Any]]:
    """What the ranks of a job say they are doing, by rank."""
    for path in sorted((run_dir / "jobs" / job / f"attempt{attempt}").glob("rank*.heartbeat.json")):
        try:
            yield json.loads(path.read_text())
        except (OSError, ValueError):  # between two versions of it
            continue


def all_doing(run_dir: Path, job: str, check: str, ranks: int) -> list[dict[str, Any]]:
    """The ranks' pulses once all of them are at ``check``."""
    found = list(pulses(run_dir, job))
    return found if len(found) == ranks and all(pulse["doing"] == check for pulse in found) else []


def run_host_only(folder: Path) -> tuple[Path, str]:
    """The directory of a run in which nothing was wrong, and what it printed."""
    (folder / "host.yaml").write_text(HOST_ONLY)
    code, out, err = run("run", folder / "host.yaml", "--out", folder / "run")
    assert code == 0, err
    return folder / "run", out


def load(run_dir: Path) -> Trial:
    return Trial.model_validate_json((run_dir / "trial.json").read_text())
