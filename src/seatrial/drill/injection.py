"""The changes that a drill may make: environment and limits of its trial, its own files, mounts and processes."""

from __future__ import annotations

import contextlib
import importlib
import os
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

import psutil
import yaml
from pydantic import JsonValue

from seatrial.config.layers import ENV_PREFIX
from seatrial.drill.base import Drill
from seatrial.drill.faults import install
from seatrial.model import SeatrialError
from seatrial.util import processes
from seatrial.util.input_files import read_json
from seatrial.worker import Heartbeat

POLL_S = 0.1  # seconds between two reads of the trial's state
_PROGRESS_S = 10.0  # seconds between two progress messages about the same wait
_CANCEL_TIMEOUT_S = 60.0  # from SIGTERM to SIGKILL: a trial writes its reports, or cancels its Slurm job
_NEW_MOUNTS = ("unshare", "--mount", "--propagation", "private")


class TrialEndedEarly(SeatrialError):
    """The fault was not injected: the trial ended first, or the point of the injection was not reached in time."""


class Injection:
    """The trial of one drill, and all changes that the drill makes. ``close`` undoes them.

    If this process is killed, the kernel ends the drill's processes, and with them the mount namespace of the trial.
    Changes that only an ``at_end`` function undoes remain, such as a drained node.

    ``folder``: for the files of the drill. ``environment``: variables of the trial. ``setup``: shell commands that run
    before the trial, in its process, such as ``ulimit -l 64``. ``new_mounts``: give the trial its own mount namespace
    (needs root), so that only the trial sees the filesystems that ``setup`` mounts. ``options``: check → options that
    are added to those of the drill. ``progress``: is called with a text about each step of the drill.
    """

    def __init__(self, drill: Drill, folder: Path, progress: Callable[[str], None] = lambda _text: None) -> None:
        self.drill = drill
        self.folder = folder
        self.run_dir = folder / "run"
        self.environment: dict[str, str] = {}
        self.setup: list[str] = []
        self.new_mounts = False
        self.options: dict[str, dict[str, JsonValue]] = {}
        self.started = 0.0  # time.monotonic() of the injection, or of the start of the trial
        self.progress = progress
        self._trial: processes.Child | None = None
        self._at_end = ExitStack()

    def at_end(self, function: Callable[..., object], *arguments: object) -> None:
        """Call ``function`` in ``close``. The function that was added last is called first."""
        self._at_end.callback(function, *arguments)

    def use_fault(self, name: str) -> None:
        """Run ``install`` for the module ``faults/NAME.py`` at the start of every Python process of the trial.

        Only the sitecustomize.py that this function writes calls ``install``: no option or variable of seatrial does.
        """
        importlib.import_module(f"{install.__module__}.{name}")  # a wrong name fails here, not silently in the trial
        folder = self.folder / "python"
        folder.mkdir()
        (folder / "sitecustomize.py").write_text(
            f"from {install.__module__} import install\n\ninstall({name!r})\n", encoding="utf-8"
        )
        inherited = os.environ.get("PYTHONPATH")
        self.environment["PYTHONPATH"] = f"{folder}{os.pathsep}{inherited}" if inherited else str(folder)

    def start_trial(self) -> None:
        """Start ``seatrial run`` as a user would. Its output goes to ``trial.out`` and ``trial.err``."""
        drill, file = self.drill, self.folder / "trial.yaml"
        trial: dict[str, object] = {
            "name": f"drill-{drill.name}",
            "launcher": drill.launcher,
            "cluster": {"nodes": drill.needs.nodes, "gpus_per_node": drill.needs.gpus},
            "retry": False,
            "checks": {
                name: {
                    "options": {**options, **self.options.get(name, {})},
                    "expect": dict(drill.thresholds.get(name, {})),
                }
                for name, options in drill.checks.items()
            },
            **drill.settings,
        }
        file.write_text(yaml.safe_dump(trial, sort_keys=False), encoding="utf-8")
        argv = [sys.executable, "-m", "seatrial", "run", str(file), "--out", str(self.run_dir)]
        if self.setup:
            argv = ["bash", "-c", "\n".join(["set -e", *self.setup, 'exec "$@"']), "bash", *argv]
        self.started = time.monotonic()
        self.progress(f"starting a trial with {', '.join(drill.checks)}")
        self._trial = self.start_process(
            [*(_NEW_MOUNTS if self.new_mounts else ()), *argv], "trial", self.environment, without=ENV_PREFIX
        )

    def start_process(
        self, argv: Sequence[str], name: str, env: Mapping[str, str] | None = None, *, without: str = ""
    ) -> processes.Child:
        """Start a process that ends with the drill; its output goes to ``NAME.out`` and ``NAME.err``."""
        out, err = self.folder / f"{name}.out", self.folder / f"{name}.err"
        child = processes.start(argv, env=env or {}, stdout=out, stderr=err, without=without)
        self.at_end(processes.stop, child, _CANCEL_TIMEOUT_S)
        return child

    def run_command(self, argv: Sequence[str], timeout_s: float = 30.0) -> str:
        """Run a command and return its output. Raises SeatrialError if it fails or takes longer than ``timeout_s``."""
        result = processes.run_command(argv, timeout_s)
        if result.code is None:
            raise SeatrialError(f"{shlex.join(argv)} did not end within {timeout_s:g} s")
        if result.code != 0:
            raise SeatrialError(f"{shlex.join(argv)}: exit code {result.code}: {result.err.strip()[-300:]}")
        return result.out

    def run_in_trial_mounts(self, command: str) -> str:
        """Run a shell command in the mount namespace of the running trial, which ``new_mounts`` gave it."""
        if not self.new_mounts:
            raise SeatrialError(f"drill {self.drill.name}: set new_mounts before the trial starts")
        return self.run_command(["nsenter", "--target", str(self.trial.process.pid), "--mount", "sh", "-c", command])

    @property
    def trial(self) -> processes.Child:
        """The process of ``seatrial run``."""
        if self._trial is None:
            raise SeatrialError(f"drill {self.drill.name}: the trial has not started")
        return self._trial

    def mark_injected(self) -> None:
        """Record that the fault starts now. Without this call ``started`` is the start of the trial."""
        self.started = time.monotonic()
        self.progress("injecting the fault")

    def wait_for(self, condition: Callable[[], bool], goal: str, limit_s: float = 120.0) -> None:
        """Wait for ``condition()``, which ``goal`` states as a clause: ``the run directory exists``.

        Raises TrialEndedEarly, with ``goal``, if the trial ends first, or after ``limit_s``.
        """
        for _ in self._polls(f"waiting until {goal}", limit_s):
            if condition():
                return
            if self.trial.poll() is not None:
                raise TrialEndedEarly(f"the trial ended before: {goal}; {self.last_error()}")
        raise TrialEndedEarly(f"not reached within {limit_s:g} s: {goal}; ranks: {self._statuses()}")

    def wait_for_ranks(self, check: str, ranks: int, progress: str = "") -> dict[int, Heartbeat]:
        """Wait until ``ranks`` ranks are in ``check`` and their progress text contains ``progress``.

        Returns the heartbeats of the ranks for which this holds, by rank. Raises TrialEndedEarly.
        """
        in_check: dict[int, Heartbeat] = {}

        def all_arrived() -> bool:
            beats = self.heartbeats().items()
            in_check.clear()
            in_check.update({rank: beat for rank, beat in beats if beat.status == check and progress in beat.progress})
            return len(in_check) >= ranks

        self.wait_for(all_arrived, f"{ranks} ranks are in {check}{f' ({progress})' if progress else ''}")
        return in_check

    def heartbeats(self) -> dict[int, Heartbeat]:
        """The heartbeat of each rank in the newest attempt of all jobs, by rank; without unreadable heartbeats."""
        attempts = sorted(self.run_dir.glob("jobs/*/attempt*"), key=_change_time)
        beats = {}
        for path in attempts[-1].glob("rank*.heartbeat.json") if attempts else ():
            with contextlib.suppress(OSError, ValueError):  # replaced or removed meanwhile
                rank = int(path.name.removeprefix("rank").partition(".")[0])
                beats[rank] = Heartbeat.model_validate(read_json(path))
        return beats

    def signal_rank(self, beat: Heartbeat, signal_number: signal.Signals) -> None:
        """Send a signal to a rank on this host. Raises SeatrialError if the pid is not that of a rank of this trial."""
        try:
            command = psutil.Process(beat.pid).cmdline()
        except psutil.Error as error:
            raise SeatrialError(f"pid {beat.pid} of {beat.node}: {error}") from error
        jobs = str(self.run_dir / "jobs")
        if "seatrial.worker" not in command or not any(argument.startswith(jobs) for argument in command):
            raise SeatrialError(f"pid {beat.pid} is not a rank of this drill on this host: {shlex.join(command)[:200]}")
        self.mark_injected()
        os.kill(beat.pid, signal_number)

    def wait_for_end(self, limit_s: float) -> int:
        """Wait for the end of the trial and return its exit code. Raises SeatrialError after ``limit_s``."""
        for _ in self._polls("waiting for the end of the trial", limit_s):
            if (code := self.trial.poll()) is not None:
                self.progress(f"the trial ended with exit code {code}")
                return code
        raise SeatrialError(f"the trial did not end within {limit_s:g} s; ranks: {self._statuses()}")

    def error_output(self) -> str:
        """Standard error of the trial; empty if it did not start."""
        path = self.folder / "trial.err"
        return path.read_text(encoding="utf-8", errors="replace") if path.exists() else ""

    def last_error(self) -> str:
        """The last line of the trial's standard error, as a clause of a message."""
        return f"last line of its stderr: {(self.error_output().strip().splitlines() or ['empty'])[-1]}"

    def close(self) -> None:
        """Undo all changes and end all processes, the trial included, in the reverse order of their start."""
        self._at_end.close()

    def _polls(self, activity: str, limit_s: float) -> Iterator[None]:
        """Yield every POLL_S until ``limit_s`` has passed; report ``activity`` at once, then every _PROGRESS_S."""
        started = last_message = time.monotonic()
        self.progress(f"{activity}, at most {limit_s:g} s")
        while (waited_s := time.monotonic() - started) <= limit_s:
            if time.monotonic() >= last_message + _PROGRESS_S:
                last_message = time.monotonic()
                self.progress(f"{activity}: {waited_s:.0f} s so far; ranks: {self._statuses()}")
            yield
            time.sleep(POLL_S)

    def _statuses(self) -> str:
        texts = [f"{rank}: {beat.status} {beat.progress}".strip() for rank, beat in sorted(self.heartbeats().items())]
        return "; ".join(texts) or "none"


def _change_time(path: Path) -> float:
    """The time of the last change in a folder; 0 if it was removed meanwhile."""
    try:
        return path.stat().st_ctime
    except OSError:
        return 0.0
