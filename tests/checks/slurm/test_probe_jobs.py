"""Probe jobs: how they are submitted, followed to their end, and cancelled."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from seatrial.checks.slurm import _probe_jobs
from seatrial.checks.slurm._probe_jobs import ProbeJobs, SubmitOptions, condition_fact, open_probe_jobs
from seatrial.discover.slurm_facts import UNKNOWN, Job
from seatrial.model import SeatrialError
from tests.checks.training.check_helpers import make_context
from tests.fakes.slurm import FakeSlurm, success

DESK = ProbeJobs("seatrial-x", ("--partition=gpu",), 10, lambda _: None)


@pytest.fixture
def slurm(monkeypatch: pytest.MonkeyPatch) -> FakeSlurm:
    monkeypatch.setattr("seatrial.discover.slurm.env_prefix_outside_job", list)
    return FakeSlurm({"sbatch": success("7;cluster\n"), "scancel": success("")}).install(monkeypatch)


def following(monkeypatch: pytest.MonkeyPatch, *states: str | Job) -> None:
    """Job 7 is in these states, one after the other at every look, and stays in the last; a look takes a second."""
    jobs = [one if isinstance(one, Job) else Job(id="7", state=one, nodes="n0", reason="Resources") for one in states]
    every = iter(jobs)
    monkeypatch.setattr("seatrial.discover.slurm.job", lambda _: next(every, jobs[-1]))
    ticks: Iterator[int] = iter(range(10**6))
    clock = SimpleNamespace(monotonic=lambda: float(next(ticks)), sleep=lambda _: None)
    monkeypatch.setattr(_probe_jobs, "time", clock)


def test_a_command_has_limits_and_a_persons_words_come_after_ours(slurm: FakeSlurm) -> None:
    command = DESK.command("srun", "--ntasks=2", minutes=3)
    assert command[:3] == ["env", "SEATRIAL_PROBE=seatrial-x", "srun"]
    assert {"--time=3", "--job-name=seatrial-x", f"--deadline=now+{10 + 60 * 4}seconds"} <= set(command)
    assert command.index("--ntasks=1") < command.index("--partition=gpu") < command.index("--ntasks=2")


def test_submit_returns_the_id_without_the_cluster(slurm: FakeSlurm) -> None:
    assert DESK.submit("true", "--mem=1") == "7"
    assert all(word in slurm.commands[-1] for word in ("--parsable", "--mem=1", "--wrap=true"))


def test_a_job_is_followed_until_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    following(monkeypatch, "PENDING", "RUNNING", "COMPLETING", "COMPLETED")
    assert DESK.wait_for_end("7").state == "COMPLETED"


def test_a_job_that_never_starts_is_an_error_with_slurms_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    following(monkeypatch, "PENDING")
    with pytest.raises(SeatrialError, match="waited 10 s in vain: Resources"):
        DESK.wait_for_end("7")


def test_a_job_is_not_followed_longer_than_it_may_run(monkeypatch: pytest.MonkeyPatch) -> None:
    following(monkeypatch, "RUNNING")
    assert DESK.wait_until("7", lambda job: job.ended, run_s=5).state == "RUNNING"


@pytest.mark.parametrize(
    ("job", "fine", "good"),
    [
        (Job(id="7", state="FAILED", nodes="n0"), (), True),
        (Job(id="7", state="TIMEOUT", nodes="n0"), (), False),
        (Job(id="7", state="TIMEOUT", nodes="n0"), ("TIMEOUT",), True),
        (Job(id="7", state="COMPLETED"), (), False),  # on no node
    ],
)
def test_a_job_counts_only_where_it_ran_to_its_end(
    job: Job, fine: tuple[str, ...], good: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    following(monkeypatch, job)
    if good:
        assert DESK.wait_for_end("7", *fine) == job
    else:
        with pytest.raises(SeatrialError, match="was not left to run"):
            DESK.wait_for_end("7", *fine)


def test_a_held_job_runs(slurm: FakeSlurm, monkeypatch: pytest.MonkeyPatch) -> None:
    following(monkeypatch, "PENDING", "RUNNING")
    assert DESK.start_idle_job("--nodes=2").state == "RUNNING"
    assert "--nodes=2" in slurm.commands[-1]
    following(monkeypatch, "PENDING", "CANCELLED")
    with pytest.raises(SeatrialError, match="was not left to run"):
        DESK.start_idle_job()


def test_a_look_is_noted_and_a_forgotten_job_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    notes: list[str] = []
    desk = replace(DESK, progress=notes.append)
    following(monkeypatch, "RUNNING", Job(id="7", state=UNKNOWN, reason="Invalid job id"))
    desk.query("7")
    assert len(notes) == 1
    with pytest.raises(SeatrialError, match="Invalid job id"):
        desk.query("7")


def test_jobs_are_cancelled_by_name_in_every_way_out(slurm: FakeSlurm, tmp_path: Path) -> None:
    place = make_context(tmp_path, ranks=1)
    options = SubmitOptions(partition="gpu", extra=("--qos=test",), wait_s=7)
    names: list[str] = []

    def fail() -> None:
        with open_probe_jobs(place, options) as desk:
            names.append(desk.job_name)
            assert (desk.submit_options, desk.wait_s) == (("--partition=gpu", "--qos=test"), 7)
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert slurm.commands == [f"scancel --name={names[0]}"]


def test_every_desk_has_a_name_of_its_own(slurm: FakeSlurm, tmp_path: Path) -> None:
    place = make_context(tmp_path, ranks=1)
    with open_probe_jobs(place, SubmitOptions()) as one, open_probe_jobs(place, SubmitOptions()) as other:
        assert one.job_name != other.job_name


@pytest.mark.parametrize(("why_not", "value"), [("", "yes"), ("no accounting", "no: no accounting")])
def test_a_fact_says_whether_rules_apply(why_not: str, value: str) -> None:
    fact = condition_fact("kept", why_not)
    assert (fact.name, fact.value) == ("kept", value)
