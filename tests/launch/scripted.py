"""Jobs whose ranks are simulated by a script in a real process, for events that are rare in a real worker.

The clock of the watch is that of the script, which goes on only after the watch has read its files: on a busy machine
both are slow, and no rank seems silent.
"""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from unittest.mock import patch

from seatrial import __version__
from seatrial.checks import catalog
from seatrial.config.schema import Config, Limits
from seatrial.launch import rank_status, root_cause, watch
from seatrial.launch.base import Launcher, RenderedJob
from seatrial.launch.local import LocalJob, LocalLauncher
from seatrial.launch.watch import run_job
from seatrial.model import Job, JobResult, Measurement, Preflight
from seatrial.util import processes

NO_CHECKS = Config(name="t", checks={})
GPU_CHECK, CLUSTER_CHECK = "train.cnn", "nodes.reachable"  # a check of GPU scope, and one of CLUSTER scope
HEAD = """
import json, os, signal, sys, time
from seatrial.util.journal import record_line
folder, clock_file = sys.argv[1:]
clock = float(open(clock_file).read()) if os.path.exists(clock_file) else 0.0
NODES = {}  # rank → node
def raw(rank, line):
    with open(f"{folder}/rank{rank}.jsonl", "ab") as journal: journal.write(line + b"\\n")
def write(rank, **record): raw(rank, record_line(record).strip().encode())
def start(rank, check): heartbeat(rank, check); write(rank, start=check, subject=f"n0/rank{rank}", time=time.time())
def measured(rank, check, error=None, at=None):
    fields = {"check": check, "subject": f"n0/rank{rank}", "rank": rank, "error": error, "started": at or time.time()}
    write(rank, measurement=fields)
def done(rank): write(rank, done=time.time())
def heartbeat(rank, status, progress=""):
    node = NODES.get(rank, "n0")
    record = {"pid": os.getpid(), "node": node, "status": status, "progress": progress, "time": time.time()}
    open(f"{folder}/rank{rank}.tmp", "w").write(json.dumps(record))
    os.replace(f"{folder}/rank{rank}.tmp", f"{folder}/rank{rank}.heartbeat.json")
def tick(seconds):
    global clock
    clock += seconds
    with open(clock_file + ".tmp", "w") as file: file.write(str(clock))
    os.replace(clock_file + ".tmp", clock_file)
    while not os.path.exists(f"{clock_file}.{clock}"): time.sleep(0.002)
def beat(seconds, *ranks, status="train.cnn"):
    for _ in range(round(10 * seconds)):
        for rank in ranks: heartbeat(rank, status)
        tick(0.1)
def idle(seconds): beat(seconds)
GPU_CHECK, CLUSTER_CHECK = "train.cnn", "nodes.reachable"
"""


def clock_file(run_dir: Path) -> Path:
    """The seconds of a script's clock; not in the run directory, whose disk may be full."""
    return run_dir.with_name(f"{run_dir.name}.clock")


class ScriptClock:
    """The clock of a script, in place of the module ``time``. It stands still while the watch reads files."""

    def __init__(self, file: Path) -> None:
        self.file, self.now = file, 0.0

    def monotonic(self) -> float:
        return 1000 + self.now

    def time(self) -> float:
        return time.time()

    def sleep(self, _seconds: float) -> None:
        self.file.with_name(f"{self.file.name}.{self.now}").touch()  # the script may go on
        time.sleep(0.005)
        if self.file.exists():
            self.now = float(self.file.read_text())


@contextmanager
def script_clock(run_dir: Path) -> Iterator[ScriptClock]:
    """Context manager: the clock of a watch is that of the script."""
    clock = ScriptClock(clock_file(run_dir))
    with ExitStack() as stack:
        for module in (watch, rank_status, root_cause):
            stack.enter_context(patch.object(module, "time", clock))
        yield clock


@dataclass
class RecordingListener:
    """A listener that records all events."""

    measurements: list[Measurement] = field(default_factory=list)
    statuses: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)

    def job_started(self, job: Job, attempt: int) -> None: ...

    def show_status(self, text: str) -> None:
        self.statuses.append(text)

    def show_waiting(self, state: str, seconds: float) -> None:
        self.statuses.append(f"waiting: {state}")

    def warn(self, text: str) -> None:
        self.warnings.append(text)

    def add_measurement(self, measurement: Measurement) -> None:
        self.measurements.append(measurement)

    @property
    def errors(self) -> list[tuple[str, str, str]]:
        return [
            (measurement.check, measurement.subject, measurement.error)
            for measurement in self.measurements
            if measurement.error
        ]


@dataclass(frozen=True)
class ScriptedJob(LocalJob):
    unreadable_nodes: tuple[int, ...] = ()


class Scripted(Launcher):
    """Starts one process per attempt; its script simulates all ranks."""

    name = "scripted"

    clock: ScriptClock

    def __init__(self, *scripts: str, unreadable_nodes: tuple[int, ...] = ()) -> None:
        self._scripts, self._unreadable_nodes = scripts, unreadable_nodes

    def unavailable_reason(self) -> str | None:
        return None

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        folder = run_dir / "jobs" / job.name / f"attempt{attempt}"
        argv = (sys.executable, "-c", HEAD + self._scripts[attempt - 1], str(folder), str(clock_file(run_dir)))
        return RenderedJob(argv=argv, text="")

    def start(self, rendered: RenderedJob, folder: Path) -> LocalJob:
        child = processes.start(rendered.argv, env={}, stdout=folder / "launcher.out", stderr=folder / "launcher.err")
        return ScriptedJob(child, unreadable_nodes=self._unreadable_nodes)


class TorchrunScript(LocalLauncher):
    """The real torchrun with a script as worker; the script has the variable ``rank``."""

    def __init__(self, script: str) -> None:
        super().__init__(NO_CHECKS)
        self._script = script

    def render(self, job: Job, run_dir: Path, attempt: int = 1) -> RenderedJob:
        real = super().render(job, run_dir, attempt)
        folder = run_dir / "jobs" / job.name / f"attempt{attempt}"
        program = run_dir / "worker.py"
        program.write_text(f"{HEAD}\nrank = int(os.environ['RANK'])\n{self._script}")
        text, count = re.subn(
            r"^worker=.*$", f"worker=({program} {folder} {folder}/clock)", real.text, flags=re.MULTILINE
        )
        assert count == 1
        return real.model_copy(update={"text": text})


def job(
    *checks: str,
    ranks: int = 2,
    placement: str = "ranks",
    limits: Mapping[str, float] | None = None,
    limit_s: float = 60,
) -> Job:
    return Job.model_validate(
        {
            "name": placement,
            "placement": placement,
            "device": "cpu",
            "nodes": 1,
            "ranks_per_node": ranks,
            "checks": checks,
            "options": {},
            "expected_gpus": None,
            "limits": {**dict.fromkeys(checks, 60.0), **(limits or {})},
            "limit_s": limit_s,
        }
    )


def run_scripted(
    launcher: Scripted | TorchrunScript,
    job: Job,
    run_dir: Path,
    heartbeat_timeout_s: float = 30,
    min_nodes: int | None = None,
    startup_s: float = 30,
) -> tuple[list[JobResult], RecordingListener]:
    """Run the job; return the result of each attempt and the recorded events."""
    listener = RecordingListener()
    limits = Limits(heartbeat_timeout_s=heartbeat_timeout_s, startup_s=startup_s)
    if isinstance(launcher, TorchrunScript):  # as in a trial: the preflight starts torchrun in its process
        preflight = Preflight(version=__version__, torch=True, gpus=0, hf_cache=False)
        job = job.model_copy(update={"preflight": preflight})
        return list(run_job(launcher, job, run_dir, limits, catalog(), listener, min_nodes)), listener
    with script_clock(run_dir) as launcher.clock:
        return list(run_job(launcher, job, run_dir, limits, catalog(), listener, min_nodes)), listener
