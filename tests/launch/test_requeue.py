"""A job script whose training failed: it waits for a requeue after a lost node, and only then."""

from __future__ import annotations

import itertools

import pytest

from seatrial.discover import slurm
from seatrial.launch import requeue
from tests.fakes.slurm import FakeSlurm, config_with, failure, success

SHOW = "scontrol show job 7"
HOSTS = "scontrol show hostnames 'node[0-1]'"


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-1]")


def install(monkeypatch: pytest.MonkeyPatch, flag: int, lost: list[str]) -> FakeSlurm:
    """``lost``: the lost node at each examination; empty: all answer."""
    replies = {HOSTS: success("node0\nnode1\n"), SHOW: success(f"JobId=7 JobName=x\n   Requeue={flag} Restarts=0\n")}
    fake = FakeSlurm(replies | {"scontrol show config": config_with(SlurmdTimeout="300 sec")}).install(monkeypatch)
    examined = iter(lost)
    monkeypatch.setattr(requeue, "lost_nodes", lambda _: {name: "no answer" for name in [next(examined)] if name})
    clock = itertools.count(step=200)
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setattr("time.monotonic", lambda: next(clock))
    return fake


WAITING = "requeue: node1 is lost (no answer). Waiting until Slurm sets node1 DOWN (SlurmdTimeout=300 s)\n"


@pytest.mark.parametrize(
    ("flag", "lost", "message"),
    [
        (1, ["node1", "node1"], f"{WAITING}requeue: the job ends: Slurm did not requeue it within 360 s\n"),
        (1, ["node1", ""], f"{WAITING}requeue: all nodes of the job answer again: node1. The job ends\n"),
        (0, ["node1"], "requeue: node1 is lost (no answer). The job ends: it was submitted without --requeue\n"),
        (1, [""], ""),
    ],
)
def test_the_script_waits_only_for_a_job_with_a_lost_node_that_slurm_requeues(
    flag: int, lost: list[str], message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, flag, lost)
    assert requeue.main(13) == 13
    assert capsys.readouterr().err == message


def test_without_an_answer_of_slurm_the_exit_code_is_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, 1, ["node1"]).replies[SHOW] = failure("Unable to contact slurm controller (connect failure)")
    assert requeue.main(1) == 1
    assert "could not be examined: the controller does not answer" in capsys.readouterr().err


def test_a_node_is_lost_if_its_slurmd_does_not_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    answers = {"node0": f"port 6818 of node0 accepts connections: {slurm.SLURMD_RUNS}", "node1": "slurmd does not run"}
    monkeypatch.setattr(slurm, "slurmd_answer", answers.__getitem__)
    assert requeue.lost_nodes(["node0", "node1"]) == {"node1": "slurmd does not run"}
