"""A rank that failed or hung, for which errors, logs and stacks show no known failure."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

from seatrial.diagnose.hangs import CAUSE as HANG
from seatrial.model import Finding, Job, JobResult, JobState
from seatrial.util.input_files import read_json
from seatrial.util.torchrun_logs import rank_of_log

RANK_FAILED = "rank_failed"  # the value of Finding.cause
# torchrun prints these when seatrial ends a job
SIGTERM_SIGNATURES = ("torchrun.agent_signal", "torchrun.terminated")
_RANK = re.compile(r"rank (\d+)\b")
_TAIL_LINES = 50


def failed_rank_finding(result: JobResult, folder: Path) -> Finding | None:
    """The finding for the one rank that made a job fail or hang; None for other results.

    ``folder``: the folder of the attempt.
    """
    rank = _RANK.match(result.failed_subject)
    if rank is None or result.state not in (JobState.FAILED, JobState.HUNG):
        return None
    hung = result.state is JobState.HUNG
    log = _error_log(folder, int(rank[1]))
    return Finding(
        cause=HANG if hung else RANK_FAILED,
        title="One rank hung, and the others waited for it" if hung else "One rank failed, and ended the others",
        subject=result.failed_subject,
        confidence="high",
        evidence=result.cause,
        first_command=result.first_command or f"tail -n {_TAIL_LINES} {shlex.quote(str(log))}",
        fix="Find what stopped the process or its node, then run the trial again."
        if hung
        else "Read the error of this rank: the errors of the other ranks follow from it. Then run the trial again.",
        action="retry-job" if hung else "none",
        source=f"job {result.job}, attempt {result.attempt}",
    )


def _error_log(folder: Path, rank: int) -> Path:
    """The log of a rank's standard error as torchrun writes it; without one the log of the launcher."""
    try:
        job = Job.model_validate(read_json(folder.parent / "job.json"))
    except (OSError, ValueError):
        return folder / "launcher.err"
    logs = (folder / "logs").glob("**/stderr.log")
    return next((log for log in logs if rank_of_log(log, job.ranks_per_node) == rank), folder / "launcher.err")
