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
    """A real one, of a command line and an environment."""
    argv = [sys.executable, "-c", SLEEP, *arguments]
    started = subprocess.Popen(argv, env={**os.environ, **env}, stdout=subprocess.PIPE)
    try:
        assert started.stdout
        assert started.stdout.readline() == b"up\n"
        yield started.pid
    finally:
        started.kill()
        started.wait()


def look(folder: Path) -> Measurement:
    measured = run_check(CHECK, folder / "other", run=str(folder / "run"))
    assert measured.error is None
    return measured


@pytest.mark.parametrize("stopped", [False, True])
def test_a_process_that_names_the_run(tmp_path: Path, stopped: bool) -> None:
    job = f"{tmp_path}/run/jobs/ranks/job.json"
    with process(job) as worker, process(JOB_DIR=job) as child:
        if stopped:
            os.kill(worker, signal.SIGSTOP)
            until(lambda: "stopped" in str(look(tmp_path).facts))
        measured = look(tmp_path)
    (verdict,) = judge(CHECK, measured)
    assert verdict.outcome is Outcome.FAIL
    assert measured.metrics[0].value == 2
    assert all(f"pid {pid}," in verdict.evidence for pid in (worker, child))
    assert job in verdict.evidence


def test_a_process_of_another_run_and_a_zombie(tmp_path: Path) -> None:
    dead = subprocess.Popen([sys.executable, "-c", "", f"{tmp_path}/run/jobs"], stdout=subprocess.DEVNULL)
    until(lambda: Path(f"/proc/{dead.pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z")
    with process(f"{tmp_path}/run-leftovers/jobs/nodes/job.json"):
        (verdict,) = judge(CHECK, look(tmp_path))
    dead.wait()
    assert verdict.outcome is Outcome.PASS
