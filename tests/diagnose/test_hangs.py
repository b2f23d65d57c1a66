"""The finding of a job that hung."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.diagnose.causes import Run
from seatrial.diagnose.hangs import CAUSE, hang_findings
from seatrial.discover.rank_stacks import FOLDER, STATES
from seatrial.model import JobResult, JobState, Outcome, Verdict, VerdictKey
from tests.discover.test_rank_stacks import STACK, worker

TIMEOUT = "collectives.all_reduce exceeded its time limit of 9 s"


def attempt_with(run_dir: Path, state: str) -> Path:
    attempt = run_dir / "jobs" / "ranks" / "attempt1"
    (attempt / FOLDER).mkdir(parents=True)
    (attempt / FOLDER / STATES).write_text(worker("n1", 0, 5) + worker("n1", 1, 6) + worker("n2", 2, 5, state))
    for rank in range(3):
        (attempt / f"rank{rank}.heartbeat.json").touch()
        (attempt / FOLDER / f"rank{rank}.txt").write_text(STACK.format(line=9 if rank == 2 else 7))
    return attempt


@pytest.mark.parametrize(
    ("state", "confidence", "command"),
    [
        ("S", "medium", "cat {}/rank2.txt"),
        ("D", "high", "srun --nodelist=n2 sh -c 'dmesg"),
        ("T", "high", "cat {}/rank2"),
    ],
)
def test_rank_at_fault_is_one_cause_of_all_errors(state: str, confidence: str, command: str, tmp_path: Path) -> None:
    attempt = attempt_with(tmp_path, state)
    result = JobResult(
        job="ranks",
        attempt=1,
        launcher="slurm",
        state=JobState.TIMEOUT,
        started=0,
        seconds=9,
        startup_s=1,
        failed_subject="rank 2 (n2/gpu0, pid 5)",
        cause=TIMEOUT,
    )
    verdicts = [
        Verdict("collectives.all_reduce", "n2/gpu0", Outcome.ERROR, detail=f"rank 2: {TIMEOUT}"),
        Verdict("other", "n1", Outcome.ERROR, detail="another error"),
    ]
    (finding,) = hang_findings([result], Run(verdicts, [], {}, "srun --nodelist={node}"), tmp_path)
    assert (finding.cause, finding.subject, finding.confidence) == (CAUSE, "n2/gpu0", confidence)
    assert finding.explains == (VerdictKey(check="collectives.all_reduce", subject="n2/gpu0"),)
    assert finding.first_command.startswith(command.format(attempt / FOLDER))
    completed = result.model_copy(update={"state": JobState.COMPLETED})
    assert list(hang_findings([completed], Run(verdicts, [], {}), tmp_path)) == []
