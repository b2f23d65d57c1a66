"""Delays the end of a job whose training failed until Slurm requeues the job.

The job script calls ``python -m seatrial.launch.requeue CODE`` with the exit code of the training. When Slurm sets a
node DOWN, after SlurmdTimeout (300 s by default), it requeues the jobs on this node. But the ranks on the other nodes
may fail within seconds: if the script ended then, the job would be FAILED and not requeued.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterable

from seatrial.discover import slurm
from seatrial.model import SeatrialError

_MARGIN_S = 60  # after SlurmdTimeout: the controller examines its nodes at intervals
_POLL_S = 5.0


def lost_nodes(nodes: Iterable[str]) -> dict[str, str]:
    """Return node name → answer to a query of its slurmd, for the nodes where slurmd does not run.

    Raises SeatrialError if slurmd cannot be queried.
    """
    answers = {name: slurm.slurmd_answer(name) for name in nodes}
    return {name: answer for name, answer in answers.items() if not answer.endswith(slurm.SLURMD_RUNS)}


def wait_for_requeue(job_id: str, nodelist: str) -> str:
    """Wait until Slurm requeues the job, which ends this process.

    Returns at once with an empty text if all nodes answer. Else returns why the job ends without a requeue: it was
    submitted without --requeue, SlurmdTimeout is not set, all nodes answer again, or the wait was too long.
    `scontrol requeue` is not used: with Slurm 22.05 the job was then held (BadConstraints) when the node was set DOWN.
    Raises SeatrialError if Slurm does not answer, ValueError on unexpected output.
    """
    nodes = slurm.hostnames(nodelist)
    lost = lost_nodes(nodes)
    if not lost:
        return ""
    text = "; ".join(f"{name} is lost ({answer})" for name, answer in lost.items())
    if "Requeue=1" not in slurm.command_output(["scontrol", "show", "job", job_id]).split():
        return f"{text}. The job ends: it was submitted without --requeue"
    timeout_s = slurm.settings().slurmd_timeout_s
    if not isinstance(timeout_s, int) or timeout_s == 0:
        return f"{text}. The job ends: Slurm sets no node DOWN, since SlurmdTimeout is not set"
    print(
        f"requeue: {text}. Waiting until Slurm sets {', '.join(lost)} DOWN (SlurmdTimeout={timeout_s} s)",
        file=sys.stderr,
        flush=True,
    )
    deadline = time.monotonic() + timeout_s + _MARGIN_S
    while time.monotonic() < deadline:
        time.sleep(_POLL_S)
        if not lost_nodes(nodes):
            return f"all nodes of the job answer again: {', '.join(lost)}. The job ends"
    return f"the job ends: Slurm did not requeue it within {timeout_s + _MARGIN_S} s"


def main(code: int) -> int:
    """Wait for the requeue if a node of this job is lost; return ``code``, the exit code of the script."""
    try:
        message = wait_for_requeue(os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"])
    except (SeatrialError, ValueError) as error:
        message = f"the nodes of the job could not be examined: {error}"
    if message:
        print(f"requeue: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
