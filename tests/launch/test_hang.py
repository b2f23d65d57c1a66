"""Hangs of real ranks: each one's stack and state is collected, and the rank that did not arrive is named."""

from __future__ import annotations

import os
import signal
import threading
import time
from pathlib import Path

import pytest

from seatrial.checks import catalog
from seatrial.config.schema import Limits
from seatrial.discover.rank_stacks import read_evidence
from seatrial.launch.local import LocalLauncher
from seatrial.launch.watch import run_job
from seatrial.model import JobResult, JobState
from tests.launch.scripted import CLUSTER_CHECK, NO_CHECKS, RecordingListener, job
from tests.processes import heartbeats, until

HANGING = Path(__file__).parent / "hanging"


def run_hanging(case: str, run_dir: Path, limit_s: float = 8) -> tuple[JobResult, RecordingListener]:
    """Run a check that hangs, on three ranks."""
    listener = RecordingListener()
    hanging = job(CLUSTER_CHECK, ranks=3, limits={CLUSTER_CHECK: limit_s}).model_copy(
        update={"env": {"PYTHONPATH": str(HANGING), "SEATRIAL_TEST_HANG": case}}
    )
    limits = Limits(heartbeat_timeout_s=60, startup_s=120)
    (result,) = run_job(LocalLauncher(NO_CHECKS), hanging, run_dir, limits, catalog(), listener)
    return result, listener


def test_rank_that_sleeps_is_named_with_the_stacks_of_all(tmp_path: Path) -> None:
    result, listener = run_hanging("sleep", tmp_path)
    assert result.state is JobState.TIMEOUT
    assert result.failed_subject.startswith("rank 1 (")
    evidence = read_evidence(tmp_path / "jobs" / "ranks" / "attempt1", 3)
    assert evidence is not None
    assert evidence.ranks_at_fault == (1,)
    places = {ranks: place for place, ranks in evidence.ranks_by_place().items()}
    assert "all_reduce, called from reduce_gradients in hanging/sitecustomize.py:" in places[0, 2]
    assert places[1,].startswith("measure in hanging/sitecustomize.py:")
    assert all(place in result.cause for place in places.values())
    (hang,) = evidence.hangs
    assert (hang.ranks_at_fault, hang.name, tuple(hang.waiting)) == ((1,), "all_reduce", (0, 2))
    (error,) = [measurement for measurement in listener.measurements if measurement.error]
    assert {Path(artifact.path).name for artifact in error.artifacts} >= {"rank0.txt", "rank1.txt", "rank2.txt"}


@pytest.mark.training
def test_stopped_rank_and_rank_that_holds_the_lock(tmp_path: Path) -> None:
    """Neither runs Python: the first is found by its process state, the second by faulthandler's own thread."""

    def stop_rank_2() -> None:
        started = until(lambda: [beat for beat in heartbeats(tmp_path, "ranks") if beat["status"] == CLUSTER_CHECK])
        until(lambda: len(list(heartbeats(tmp_path, "ranks"))) == 3 and started)
        time.sleep(1)
        os.kill(list(heartbeats(tmp_path, "ranks"))[2]["pid"], signal.SIGSTOP)

    thread = threading.Thread(target=stop_rank_2)
    thread.start()
    began = time.monotonic()
    result, _ = run_hanging("lock", tmp_path, limit_s=14)
    thread.join()
    evidence = read_evidence(tmp_path / "jobs" / "ranks" / "attempt1", 3)
    assert evidence is not None
    assert (result.state, evidence.ranks_at_fault) == (JobState.TIMEOUT, (2,))
    assert "hold_lock in hanging/sitecustomize.py:" in evidence.snapshots[1].place
    assert (evidence.snapshots[2].state, evidence.snapshots[2].frames) == ("T", ())
    assert "process state T (stopped by a signal)" in result.cause
    assert result.seconds < time.monotonic() - began
