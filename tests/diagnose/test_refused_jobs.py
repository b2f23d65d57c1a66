"""Findings of jobs that nodes or the scheduler refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.diagnose import diagnose
from seatrial.diagnose.causes import Run
from seatrial.diagnose.job_failures import JOB_REJECTED, NODE_UNFIT, RENDEZVOUS_FAILS
from seatrial.model import CLUSTER, JobResult, JobState, MissingNode, Outcome, Reason, Verdict

UNMEASURED = Verdict("train.cnn", CLUSTER, Outcome.ERROR, reasons=(Reason.NOT_MEASURED,))
FAILED = Verdict("train.ddp", CLUSTER, Outcome.ERROR, reasons=(Reason.MEASUREMENT_FAILED,), detail="no heartbeat")


def refused(state: JobState, subject: str, cause: str) -> JobResult:
    return JobResult(
        job="nodes",
        attempt=1,
        launcher="slurm",
        state=state,
        started=0,
        seconds=1,
        startup_s=0,
        failed_subject=subject,
        cause=cause,
    )


def test_job_refused_by_nodes_has_one_finding(tmp_path: Path) -> None:
    """Its logs name the same fault again."""
    folder = tmp_path / "jobs" / "nodes" / "attempt1"
    folder.mkdir(parents=True)
    (folder / "launcher.err").write_text("ModuleNotFoundError: No module named 'torch'\n")
    cause = "no torch. Run first: srun --nodelist=n1 pip list; no image. Run first: ls"
    result = refused(JobState.REFUSED, "n1", cause)
    (finding,) = diagnose(Run([UNMEASURED, FAILED], [], {}), [result], [], tmp_path)
    assert (finding.subject, finding.evidence, finding.confidence) == ("n1", cause, "high")
    assert finding.first_command == "srun --nodelist=n1 pip list"
    assert (finding.cause, finding.explains) == (NODE_UNFIT, (UNMEASURED.key,))
    quoted = "srun --nodelist=n1 sh -c 'ping -c 3 n0; ip route get n0'"
    network = result.model_copy(update={"cause": f"cannot connect to the rendezvous. Run first: {quoted}; no image"})
    (finding,) = diagnose(Run((), [], {}), [network], [], tmp_path)
    assert (finding.first_command, finding.cause) == (quoted, RENDEZVOUS_FAILS)


@pytest.mark.parametrize(
    ("cause", "signature"),
    [
        ("no such partition (sbatch: error: Invalid partition name specified)", "slurm.not_allowed"),
        ("Slurm job 7 is PENDING: PartitionConfig; waiting will not help", ""),
    ],
)
def test_rejected_job_has_one_finding_on_the_cluster(cause: str, signature: str, tmp_path: Path) -> None:
    result = refused(JobState.REJECTED, CLUSTER, f"{cause}. Run first: sinfo -s")
    (finding,) = diagnose(Run([UNMEASURED, FAILED], [], {}), [result], [], tmp_path)
    assert (finding.subject, finding.cause, finding.signature) == (CLUSTER, JOB_REJECTED, signature)
    assert (finding.evidence, finding.first_command) == (cause, "sinfo -s")
    assert finding.explains == (UNMEASURED.key,)


@pytest.mark.parametrize("state", [JobState.REFUSED, JobState.REJECTED])
def test_a_refused_job_that_ran_later_has_no_finding(state: JobState, tmp_path: Path) -> None:
    first = refused(state, "n1", "no torch. Run first: ls")
    completed = first.model_copy(update={"state": JobState.COMPLETED, "attempt": 2})
    assert diagnose(Run((), [], {}), [first, completed], [], tmp_path) == ()


@pytest.mark.parametrize("state", [JobState.REFUSED, JobState.REJECTED])
def test_missing_nodes_are_the_only_findings_of_a_refused_job(state: JobState, tmp_path: Path) -> None:
    missing = (MissingNode(name="n1", state="DOWN"),)
    result = refused(state, "n1", "n1 is DOWN").model_copy(update={"missing_nodes": missing})
    (finding,) = diagnose(Run([UNMEASURED], [], {}), [result], [], tmp_path)
    assert (finding.subject, finding.explains) == ("n1", (UNMEASURED.key,))
