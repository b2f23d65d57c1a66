"""Probe jobs: submission, waiting for their end, and cancellation."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.checks.slurm import _probe_jobs
from seatrial.checks.slurm._probe_jobs import ProbeJobs, SubmitOptions, condition_fact, open_probe_jobs
from seatrial.discover.slurm_facts import UNKNOWN, JobRecord
from seatrial.model import SeatrialError
from tests.checks.training.check_helpers import make_context
from tests.fakes.slurm import FakeSlurm, success

PROBE_JOBS = ProbeJobs("seatrial-x", ("--partition=gpu",), 10, lambda _: None)


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


def test_command_has_limits_and_user_options_come_last(slurm: FakeSlurm) -> None:
    command = PROBE_JOBS.command("srun", "--ntasks=2", minutes=3)
    assert command[:3] == ["env", "SEATRIAL_PROBE=seatrial-x", "srun"]
    assert {"--time=3", "--job-name=seatrial-x", f"--deadline=now+{10 + 60 * 4}seconds"} <= set(command)
    assert command.index("--ntasks=1") < command.index("--partition=gpu") < command.index("--ntasks=2")


def test_submit_returns_the_job_id(slurm: FakeSlurm) -> None:
    assert PROBE_JOBS.submit("true", "--mem=1") == "7"
    assert all(option in slurm.commands[-1] for option in ("--parsable", "--mem=1", "--wrap=true"))


def test_wait_for_end(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_states(monkeypatch, "PENDING", "RUNNING", "COMPLETING", "COMPLETED")
    assert PROBE_JOBS.wait_for_end("7").state == "COMPLETED"


def test_pending_job_is_an_error_with_slurms_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    set_job_states(monkeypatch, "PENDING")
    with pytest.raises(SeatrialError, match="job 7 still pending after 10 s: Resources"):
        PROBE_JOBS.wait_for_end("7")


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
    options = SubmitOptions(partition="gpu", extra=("--qos=test",), wait_s=7)
    names: list[str] = []

    def fail() -> None:
        with open_probe_jobs(context, options) as jobs:
            names.append(jobs.job_name)
            assert (jobs.submit_options, jobs.wait_s) == (("--partition=gpu", "--qos=test"), 7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert slurm.commands == [f"scancel --name={names[0]}"]


def test_job_names_are_unique(slurm: FakeSlurm, tmp_path: Path) -> None:
    context = make_context(tmp_path, ranks=1)
    with open_probe_jobs(context, SubmitOptions()) as first, open_probe_jobs(context, SubmitOptions()) as second:
        assert first.job_name != second.job_name


@pytest.mark.parametrize(("reason", "value"), [("", "yes"), ("no accounting", "no: no accounting")])
def test_condition_fact(reason: str, value: str) -> None:
    fact = condition_fact("enforced", reason)
    assert (fact.name, fact.value) == ("enforced", value)
