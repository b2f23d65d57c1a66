"""A job that its nodes or the scheduler refused → at most one finding. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial.diagnose.job_failures import not_started
from seatrial.diagnose.signatures import search_lines
from seatrial.model import CLUSTER, Finding, JobResult, JobState, Verdict, VerdictKey

RENDEZVOUS_FAILS, NODE_UNFIT, JOB_REJECTED = CAUSES = "rendezvous_fails", "node_unfit", "job_rejected"


def refused_job_findings(results: Sequence[JobResult], verdicts: Sequence[Verdict]) -> list[Finding]:
    """The finding for the last job, if it was refused; it explains the checks that were not measured.

    None if nodes are missing, or if the scheduler rejected it for known failures: these have findings of their own.
    """
    findings = []
    for result in results[-1:]:
        if result.state is JobState.REFUSED and not result.missing_nodes:
            findings = [_refused_by_nodes(result)]
        elif result.state is JobState.REJECTED and not (result.failures or result.missing_nodes):
            findings = [_rejected_by_scheduler(result)]
        explains = tuple(map(VerdictKey.from_verdict, not_started(results, verdicts)))
        changes = {"explains": explains, "first_command": result.first_command}
    return [finding.model_copy(update=changes) for finding in findings]


def _refused_by_nodes(result: JobResult) -> Finding:
    is_rendezvous = "rendezvous" in result.cause
    network_fix = "Correct name resolution, open all ports between the nodes, or free the port; then run it again."
    node_fix = "Correct the environment of the node, or environment and container of the trial; then run it again."
    return Finding(
        title="The rendezvous of the job fails on a node"
        if is_rendezvous
        else "The node does not meet the requirements of the trial",
        subject=result.failed_subject,
        cause=RENDEZVOUS_FAILS if is_rendezvous else NODE_UNFIT,
        confidence="high",
        evidence=result.cause,
        fix=network_fix if is_rendezvous else node_fix,
        source=f"preflight of job {result.job}",
    )


def _rejected_by_scheduler(result: JobResult) -> Finding:
    """The finding with title, fix and action of the signature that the scheduler's message has, if any."""
    match = next(iter(search_lines([result.cause], result.job)), None)
    signature = match.signature if match else None
    return Finding(
        title=signature.titled(match.values) if signature and match else "The job was not started",
        subject=CLUSTER,
        cause=JOB_REJECTED,
        confidence="high",
        evidence=result.cause_without_command,
        fix=signature.filled(signature.fix, match.values) if signature and match else "",
        action=signature.action if signature else None,
        signature=signature.id if signature else "",
        source=f"job {result.job}",
    )
