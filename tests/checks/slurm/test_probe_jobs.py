"""Probe jobs: submission, waiting for their end, and cancellation."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.checks.slurm import _probe_jobs
from seatrial.checks.slurm._probe_jobs import ProbeJobs, SubmitOptions, open_probe_jobs
from seatrial.config.schema import JobPlacement
from seatrial.discover import slurm_output
from seatrial.discover.slurm_facts import UNKNOWN, JobRecord
from seatrial.model import SeatrialError
from seatrial.util.processes import CommandResult
from tests.checks.training.check_helpers import make_context
from tests.fakes.slurm import FakeSlurm, failure, recorded, success

PROBE_JOBS = ProbeJobs("seatrial-x", JobPlacement(partition="gpu"), ("--comment=x",), 10, lambda _: None)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr("seatrial.discover.slurm.env_prefix_outside_job", list)
    return FakeSlurm({"sbatch": success("7;cluster\n"), "scancel": success("")}).install(monkeypatch)


def set_job_states(monkeypatch: pytest.MonkeyPatch, *states: str | JobRecord) -> None:
    """Job 7 takes these states, one per query, and stays in the last one; a query takes one second."""
    jobs = [
        state if isinstance(state, JobRecord) else JobRecord(id="7", state=state, nodes="n0", reason="Resources")
        for state in states
    ]
    answers = iter(jobs)
    monkeypatch.setattr("seatrial.discover.slurm.job", lambda _: next(answers, jobs[-1]))
    ticks: Iterator[int] = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)
    monkeypatch.setattr(_probe_jobs, "time", clock)
    nodes = slurm_output.parse_nodes(recorded("scontrol-show-nodes-busy.txt").out)  # node3 is drained
    monkeypatch.setattr("seatrial.discover.slurm.nodes", lambda: nodes)
    monkeypatch.setattr("seatrial.discover.slurm.hostnames", str.split)


def test_command_has_limits_and_user_options_come_last(slurm: FakeSlurm) -> None:
    command = PROBE_JOBS.command("srun", "--ntasks=2", minutes=3)
    assert command[:3] == ["env", "SEATRIAL_PROBE=seatrial-x", "srun"]
    assert {"--time=3", "--job-name=seatrial-x", f"--deadline=now+{10 + 60 * 4}seconds"} <= set(command)
    assert command.index("--ntasks=1") < command.index("--partition=gpu") < command.index("--comment=x")
    assert command[-1] == "--ntasks=2"


@pytest.mark.parametrize("output", ["7;cluster\n", "Your project is at 80 % of its hours.\n7\n"])
def test_submit_returns_the_job_id(slurm: FakeSlurm, output: str) -> None:
    slurm.replies["sbatch"] = success(output)
    assert PROBE_JOBS.submit("true", "--mem=1") == "7"
    assert all(option in slurm.commands[-1] for option in ("--parsable", "--mem=1", "--wrap=true"))


def test_wait_for_end(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_states(monkeypatch, "PENDING", "RUNNING", "COMPLETING", "COMPLETED")
    assert PROBE_JOBS.wait_for_end("7").state == "COMPLETED"


def test_pending_job_is_an_error_with_slurms_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_states(monkeypatch, "PENDING")
    with pytest.raises(SeatrialError, match="job 7 still pending after 10 s: Resources"):
        PROBE_JOBS.wait_for_end("7")


@pytest.mark.parametrize(
    ("job", "reason"),
    [
        (JobRecord(id="7", state="PENDING", reason="PartitionDown"), "PartitionDown"),
        (JobRecord(id="7", state="PENDING", reason="Resources", node_count=4), "node3 is IDLE+DRAIN: fan broken"),
        (JobRecord(id="7", state="PENDING", reason="Resources", requested_nodes="node3"), "0 of 1 nodes"),
    ],
)
def test_a_job_that_never_starts_is_an_error_at_once(
    monkeypatch: pytest.MonkeyPatch, job: JobRecord, reason: str
) -> None:
    set_job_states(monkeypatch, job)
    with pytest.raises(SeatrialError, match=f"job 7 is PENDING: .*{re.escape(reason)}.*; waiting will not help"):
        PROBE_JOBS.wait_until("7", lambda job: job.ended, 0, wait_s=300)


def test_progress_shows_what_a_job_waits_for(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    set_job_states(monkeypatch, JobRecord(id="7", state="PENDING", reason="Priority"), "RUNNING")
    replace(PROBE_JOBS, progress=notes.append).wait_until("7", lambda job: not job.pending, 0)
    assert notes == ["job 7 waits for its start: Priority", "job 7: RUNNING Resources"]


def test_srun_that_never_starts_is_cancelled(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    cancelled = threading.Event()

    def srun(_argv: Sequence[str]) -> CommandResult:
        assert cancelled.wait(60), "the job of srun was not cancelled"
        return failure("srun: error: Job allocation 7 has been revoked\n")

    def scancel(_argv: Sequence[str]) -> CommandResult:
        cancelled.set()
        return success("")

    slurm.replies |= {"srun": srun, "scancel": scancel, "squeue": success("7\n")}
    set_job_states(monkeypatch, JobRecord(id="7", state="PENDING", reason="PartitionDown"))
    with pytest.raises(SeatrialError, match="job 7 is PENDING: PartitionDown; waiting will not help"):
        PROBE_JOBS.run_srun(["srun", "true"], 60)
    assert slurm.commands[-1] == "scancel --name=seatrial-x"


def test_wait_until_has_a_run_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_states(monkeypatch, "RUNNING")
    assert PROBE_JOBS.wait_until("7", lambda job: job.ended, run_s=5).state == "RUNNING"


@pytest.mark.parametrize(
    ("job", "allowed_states", "accepted"),
    [
        (JobRecord(id="7", state="FAILED", nodes="n0"), (), True),
        (JobRecord(id="7", state="TIMEOUT", nodes="n0"), (), False),
        (JobRecord(id="7", state="TIMEOUT", nodes="n0"), ("TIMEOUT",), True),
        (JobRecord(id="7", state="COMPLETED"), (), False),  # without node
    ],
)
def test_accepted_end_states(
    job: JobRecord, allowed_states: tuple[str, ...], accepted: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    set_job_states(monkeypatch, job)
    if accepted:
        assert PROBE_JOBS.wait_for_end("7", *allowed_states) == job
    else:
        with pytest.raises(SeatrialError, match="job 7 did not run"):
            PROBE_JOBS.wait_for_end("7", *allowed_states)


def test_start_idle_job(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_states(monkeypatch, "PENDING", "RUNNING")
    assert PROBE_JOBS.start_idle_job("--nodes=2").state == "RUNNING"
    assert "--nodes=2" in slurm.commands[-1]
    set_job_states(monkeypatch, "PENDING", "CANCELLED")
    with pytest.raises(SeatrialError, match="job 7 did not run"):
        PROBE_JOBS.start_idle_job()


def test_query_reports_progress_and_unknown_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    jobs = replace(PROBE_JOBS, progress=notes.append)
    set_job_states(monkeypatch, "RUNNING", JobRecord(id="7", state=UNKNOWN, reason="Invalid job id"))
    jobs.query("7")
    assert len(notes) == 1
    with pytest.raises(SeatrialError, match="Invalid job id"):
        jobs.query("7")


def test_jobs_are_cancelled_after_an_exception(slurm: FakeSlurm, tmp_path: Path) -> None:
    context = make_context(tmp_path, ranks=1)
    options = SubmitOptions(partition="gpu", extra=("--comment=x",), wait_s=7)
    names: list[str] = []

    def fail() -> None:
        with open_probe_jobs(context, options) as jobs:
            names.append(jobs.job_name)
            assert (jobs.placement.partition, jobs.extra, jobs.wait_s) == ("gpu", ("--comment=x",), 7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert slurm.commands == [f"scancel --name={names[0]}"]


def test_job_names_are_unique(slurm: FakeSlurm, tmp_path: Path) -> None:
    context = make_context(tmp_path, ranks=1)
    with open_probe_jobs(context, SubmitOptions()) as first, open_probe_jobs(context, SubmitOptions()) as second:
        assert first.job_name != second.job_name
