from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from seatrial.checks.faults.leftovers import CHECK
from seatrial.model import Measurement, Outcome
from tests.fakes.slurm import judge, run_check
from tests.processes import until

SLEEP = "import time; print('up', flush=True); time.sleep(60)"


@contextmanager
def process(*arguments: str, **env: str) -> Iterator[int]:
    """Starts a process with these arguments and environment variables."""
    argv = [sys.executable, "-c", SLEEP, *arguments]
    started = subprocess.Popen(argv, env={**os.environ, **env}, stdout=subprocess.PIPE)
    try:
        assert started.stdout
        assert started.stdout.readline() == b"up\n"
        yield started.pid
    finally:
        started.kill()
        started.wait()


def measure_leftovers(folder: Path) -> Measurement:
    measurement = run_check(CHECK, folder / "other", run=str(folder / "run"))
    assert measurement.error is None
    return measurement


@pytest.mark.parametrize("stopped", [False, True])
def test_processes_with_the_run_directory(tmp_path: Path, stopped: bool) -> None:
    job = f"{tmp_path}/run/jobs/ranks/job.json"
    with process(job) as worker, process(JOB_DIR=job) as child:
        if stopped:
            os.kill(worker, signal.SIGSTOP)
            until(lambda: "stopped" in str(measure_leftovers(tmp_path).metrics[0].evidence))
        measurement = measure_leftovers(tmp_path)
    (verdict,) = judge(CHECK, measurement)
    assert verdict.outcome is Outcome.FAIL
    assert measurement.metrics[0].value == 2
    assert all(f"pid {pid}," in verdict.evidence for pid in (worker, child))
    assert job in verdict.evidence


def test_other_run_and_zombie(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "", f"{tmp_path}/run/jobs"], stdout=subprocess.DEVNULL)
    until(lambda: Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    with process(f"{tmp_path}/run-leftovers/jobs/nodes/job.json"):
        (verdict,) = judge(CHECK, measure_leftovers(tmp_path))
    dead.wait()
    assert verdict.outcome is Outcome.PASS
