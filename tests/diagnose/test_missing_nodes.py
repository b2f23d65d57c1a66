"""Findings from nodes that did not run the jobs of a trial."""

from __future__ import annotations

import re

import pytest

from seatrial.diagnose.job_failures import missing_node_causes, missing_node_findings
from seatrial.model import CLUSTER, JobResult, JobState, MissingNode, Outcome, Verdict


def result(state: str) -> JobResult:
    node = MissingNode(name="node1", state=state)
    return JobResult(
        job="ranks",
        attempt=1,
        launcher="slurm",
        state=JobState.FAILED,
        started=0,
        seconds=1,
        startup_s=0,
        missing_nodes=(node,),
    )


@pytest.mark.parametrize(
    ("state", "cause"),
    [
        ("IDLE+DRAIN: fan broken", "node_drained"),
        (
            "DOWN+NOT_RESPONDING: Not responding; port 6818 of node1 accepts connections: slurmd runs",
            "node_authentication",
        ),
        ("DOWN; port 6818 of node1 refuses connections: slurmd does not run", "slurmd_down"),
        ("ALLOCATED; port 6818 of node1 does not answer within 3 s", "node_unreachable"),
        ("ALLOCATED; port 6818 of node1 accepts connections: slurmd runs", "node_lost"),
        ("no heartbeat from any of its ranks for 60 s during job ranks", "node_lost"),
        *(
            (f"srun cannot start a task on this node: {error}", cause)
            for error, cause in {
                "Zero Bytes were transmitted or received": "node_authentication",
                "Invalid job credential": "node_authentication",
                "Connection refused": "slurmd_down",
                "Communication connection failure": "node_unreachable",
                "User not found on host": "node_user_unknown",
                "Unspecified error": "node_lost",
            }.items()
        ),
    ],
)
def test_state_gives_the_cause_and_the_command_for_the_node(state: str, cause: str) -> None:
    error = Verdict("nodes.reachable", CLUSTER, Outcome.ERROR)
    (finding,) = missing_node_findings([result(state), result("other")], [error])
    assert (finding.cause, finding.subject, finding.evidence) == (cause, "node1", f"node1: {state}")
    assert "node1" in finding.first_command
    assert finding.explains == (error.key,)


def test_a_lost_node_of_kubernetes_has_a_command_of_kubectl() -> None:
    lost = result("no heartbeat from any of its ranks for 60 s during job ranks")
    (finding,) = missing_node_findings([lost.model_copy(update={"launcher": "kubernetes"})], ())
    assert (finding.cause, finding.first_command) == ("kubernetes_node_lost", "kubectl describe node node1")


def test_every_state_has_a_cause_with_placeholders_that_are_filled() -> None:
    causes = missing_node_causes()
    assert causes[-1].pattern == ""
    for cause in causes:
        assert set(re.findall(r"\{(\w+)\}", cause.first_command + cause.fix)) == {"node"}
