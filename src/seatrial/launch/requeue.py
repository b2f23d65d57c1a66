"""Requeue of a Slurm job after a lost node: ``python -m seatrial.launch.requeue CODE``, at the end of its script.

Slurm itself requeues a job whose node it sets DOWN, after SlurmdTimeout (300 s by default). But the ranks on the other
nodes may fail within seconds: the script ends, and for Slurm the job is FAILED. This module then looks for a lost node.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable

from seatrial.discover import slurm
from seatrial.model import SeatrialError


def lost_nodes(nodes: Iterable[str]) -> dict[str, str]:
    """Name → how its slurmd fails to answer, for the nodes without a running slurmd. Raises SeatrialError."""
    answers = {name: slurm.slurmd_answer(name) for name in nodes}
    return {name: answer for name, answer in answers.items() if not answer.endswith(slurm.SLURMD_RUNS)}


def requeue_after_lost_node(job_id: str, nodelist: str) -> str:
    """Requeue the job if one of its nodes is lost and it was submitted with --requeue; return a sentence about it.

    The sentence is empty if all nodes answer. Raises SeatrialError if Slurm does not answer or refuses.
    """
    lost = lost_nodes(slurm.hostnames(nodelist))
    if not lost:
        return ""
    nodes = "; ".join(f"{name} is lost ({answer})" for name, answer in lost.items())
    if "Requeue=1" not in slurm.command_output(["scontrol", "show", "job", job_id]).split():
        return f"{nodes}. The job ends: it was submitted without --requeue (docs/requeue.md)"
    slurm.command_output(["scontrol", "requeue", job_id])
    return f"{nodes}. Slurm starts job {job_id} again"


def main(code: int) -> int:
    """Requeue the job of this script where a node is lost; return ``code``, its exit code."""
    try:
        message = requeue_after_lost_node(os.environ["SLURM_JOB_ID"], os.environ["SLURM_JOB_NODELIST"])
    except (SeatrialError, ValueError) as error:
        message = f"the nodes of the job could not be examined: {error}"
    if message:
        print(f"requeue: {message}", file=sys.stderr)
    return code


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1])))
