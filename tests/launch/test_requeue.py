"""What a job script does when its training failed: requeue after a lost node, and only then."""

from __future__ import annotations

import pytest

from seatrial.discover import slurm
from seatrial.launch import requeue
from tests.fakes.slurm import FakeSlurm, failure, success

JOB = {"scontrol show hostnames 'node[0-1]'": success("node0\nnode1\n"), "scontrol requeue 7": success("")}
SHOW = "scontrol show job 7"


@pytest.fixture(autouse=True)
def job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[0-1]")


def install(monkeypatch: pytest.MonkeyPatch, requeue_flag: int, lost: str = "") -> FakeSlurm:
    fake = FakeSlurm({**JOB, SHOW: success(f"JobId=7 JobName=x\n   Requeue={requeue_flag} Restarts=0\n")})
    fake.install(monkeypatch)
    answers = {True: "refuses connections: slurmd does not run", False: f"accepts connections: {slurm.SLURMD_RUNS}"}
    monkeypatch.setattr(slurm, "slurmd_answer", lambda name: f"port 6818 of {name} {answers[name == lost]}")
    return fake


@pytest.mark.parametrize(
    ("flag", "lost", "last", "message"),
    [
        (
            1,
            "node1",
            "scontrol requeue 7",
            "node1 is lost (port 6818 of node1 refuses connections: slurmd does not run)",
        ),
        (0, "node1", SHOW, "The job ends: it was submitted without --requeue"),
        (1, "", "scontrol show hostnames 'node[0-1]'", ""),
    ],
)
def test_a_job_is_requeued_if_a_node_is_lost_and_it_may_be(
    flag: int, lost: str, last: str, message: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    fake = install(monkeypatch, flag, lost)
    assert requeue.main(13) == 13
    assert fake.commands[-1] == last
    err = capsys.readouterr().err
    assert message in err
    assert bool(err) == bool(message)


def test_a_refusal_of_slurm_is_printed_and_the_exit_code_kept(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    install(monkeypatch, 1, "node1").replies["scontrol requeue 7"] = failure(
        "Requested operation is presently disabled for job 7"
    )
    assert requeue.main(1) == 1
    assert "could not be examined: Slurm refused the request (Requested operation" in capsys.readouterr().err
