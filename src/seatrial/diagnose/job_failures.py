"""Why jobs, nodes and ranks failed or did not start → findings: known messages, refusals, missing nodes, one rank."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator, Sequence
from functools import cache
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import ValidationError

from seatrial.checks.cause import Cause, filled
from seatrial.diagnose.cause_data import causes
from seatrial.diagnose.causes import Run, overlap
from seatrial.diagnose.hangs import CAUSE as HANG
from seatrial.diagnose.log_search import search_text
from seatrial.hardware.links import role_facts
from seatrial.model import (
    CLUSTER,
    Finding,
    Job,
    JobFailure,
    JobResult,
    JobState,
    Outcome,
    Reason,
    Verdict,
)
from seatrial.util import data_files
from seatrial.util.input_files import read_json
from seatrial.util.text import and_more
from seatrial.util.torchrun_logs import rank_of_log

# Values of Finding.cause
RANK_FAILED = "rank_failed"
RENDEZVOUS_FAILS, NODE_UNFIT, JOB_REJECTED = REFUSALS = "rendezvous_fails", "node_unfit", "job_rejected"
# torchrun prints these when seatrial ends a job
SIGTERM_SIGNATURES = ("torchrun.agent_signal", "torchrun.terminated")
_RANK = re.compile(r"rank (\d+)\b")
_TAIL_LINES = 50
_MAX_NAMED = 6


class _SourcedFailure(NamedTuple):
    """A failure, the bad verdicts that it explains, and where it was recorded: a job or a check."""

    failure: JobFailure
    consequences: list[Verdict]
    source: str


def job_failure_findings(results: Sequence[JobResult], run: Run) -> list[Finding]:
    """One finding per cause and named object; it explains the checks that were not measured for this reason.

    A cause that explains nothing is omitted: a resumed trial has measured the checks since.
    """
    by_id = {cause.id: cause for cause in causes() if cause.message}
    failures = [*_failures_of_jobs(results, run), *_failures_of_checks(run)]
    present = {each.failure.cause for each in failures}
    groups: dict[tuple[str, str], list[_SourcedFailure]] = {}  # (id of the cause, name of the object) → failures
    for each in failures:
        cause_id = each.failure.cause
        if cause_id in by_id and each.consequences:
            roots = [name for name in by_id[cause_id].consequence_of if name in present]
            groups.setdefault((roots[0] if roots else cause_id, each.failure.name), []).append(each)
    return [_finding(by_id[cause_id], members) for (cause_id, _), members in groups.items()]


def assign_consequences(
    failures: Sequence[Finding], cause_findings: Sequence[Finding]
) -> tuple[list[Finding], list[Finding]]:
    """``failures`` that no cause explains, and ``cause_findings`` with the verdicts of the other failures added."""
    consequence_of = {cause.id: cause.consequence_of for cause in causes()}
    kept, extended = [], list(cause_findings)
    for failure in failures:
        names = consequence_of.get(failure.cause, ())
        root = next((index for index, each in enumerate(extended) if each.cause in names), None)
        if root is None:
            kept.append(failure)
        else:
            explains = dict.fromkeys((*extended[root].explains, *failure.explains))
            extended[root] = extended[root].model_copy(update={"explains": tuple(explains)})
    return kept, extended


def not_started(results: Sequence[JobResult], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts on checks that were not measured, if nodes or the scheduler refused the last job."""
    if not results or not results[-1].refused:
        return []
    return [verdict for verdict in verdicts if Reason.NOT_MEASURED in verdict.reasons]


def _failures_of_jobs(results: Sequence[JobResult], run: Run) -> Iterator[_SourcedFailure]:
    """The failures of jobs. They explain ERRORs of checks whose error ends with the reason why this attempt ended.

    If the last job was not started, they also explain the checks that were not measured.
    """
    for result in results:
        error = f"{result.failed_subject}: {result.cause}"  # end of an error; "exit code 1" is also in "exit code 127"
        failed_measurements = {
            (each.check, each.subject)
            for each in run.measurements
            if result.cause and (each.error or "").endswith(error)
        }
        consequences = [
            verdict
            for verdict in run.bad
            if verdict.outcome is Outcome.ERROR and (verdict.check, verdict.subject) in failed_measurements
        ]
        if result is results[-1]:
            consequences += not_started(results, run.bad)
        for failure in result.failures:
            yield _SourcedFailure(failure, consequences, f"job {result.job}")


def _failures_of_checks(run: Run) -> Iterator[_SourcedFailure]:
    """The failures of pods that a check creates.

    They explain ERRORs of the check, and evidence of causes with ``explained_by_job_failure`` at the same place.
    """
    explained_causes = [cause for cause in causes() if cause.explained_by_job_failure]
    for measurement, value in role_facts("job_failures", run.measurements, run.checks):
        for row in value if isinstance(value, list) else ():
            try:
                failure = JobFailure.model_validate(row)
            except ValidationError:  # a fact of another shape
                continue
            of_check = [verdict for verdict in run.bad if verdict.check == measurement.check]
            evidence = [
                verdict
                for verdict in of_check
                if any(overlap(place, verdict.subject) for place in failure.nodes or (CLUSTER,))
                and any(cause.is_evidence(verdict) for cause in explained_causes)
            ]
            is_error = failure.message in (measurement.error or "")
            errors = [
                verdict
                for verdict in of_check
                if verdict.outcome is Outcome.ERROR and (is_error or Reason.METRIC_MISSING in verdict.reasons)
            ]
            yield _SourcedFailure(failure, [*evidence, *errors], f"check {measurement.check}")


def _finding(cause: Cause, members: Sequence[_SourcedFailure]) -> Finding:
    failures = [member.failure for member in members]
    first = next((failure for failure in failures if failure.cause == cause.id), failures[0])
    nodes = list(dict.fromkeys(node for failure in failures for node in failure.nodes))
    place = f"{and_more(nodes, _MAX_NAMED)}: " if nodes else ""
    finding = cause.finding(
        ", ".join(nodes) or CLUSTER,
        "high",
        f"{place}{first.message}",
        first.first_command,
        and_more(list(dict.fromkeys(member.source for member in members)), _MAX_NAMED),
        first.name,
    )
    return finding.explaining(verdict for member in members for verdict in member.consequences)


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
        findings = [each.model_copy(update={"first_command": result.first_command}) for each in findings]
    return [finding.explaining(not_started(results, verdicts)) for finding in findings]


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
    match = next(iter(search_text(result.cause, result.job)), None)
    unknown = Finding(title="The job was not started", subject=CLUSTER, confidence="high", evidence="")
    return (match.finding(CLUSTER, "high") if match else unknown).model_copy(
        update={"cause": JOB_REJECTED, "evidence": result.cause_without_command, "source": f"job {result.job}"}
    )


class MissingNodeCause(Cause):
    """Why a node is missing, and what to do. ``pattern``: a regular expression that the state of the node matches.

    ``launcher``: the cause is only for jobs of this launcher; empty: for all jobs.
    """

    place: Literal["node"] = "node"
    explains: tuple[str, ...] = ()
    pattern: str
    launcher: str = ""
    source: str


@cache
def missing_node_causes() -> tuple[MissingNodeCause, ...]:
    """All rows of the file, in its order; the last one matches every state."""
    return tuple(MissingNodeCause.model_validate(row) for row in data_files.read("missing_nodes.yaml"))


def missing_node_findings(results: Sequence[JobResult], verdicts: Sequence[Verdict]) -> list[Finding]:
    """One finding per node that a job lost or did not get; each explains all ERROR verdicts."""
    errors = [verdict for verdict in verdicts if verdict.outcome is Outcome.ERROR]
    findings: dict[str, Finding] = {}
    for result in results:
        for node in result.missing_nodes:
            rows = (row for row in missing_node_causes() if row.launcher in ("", result.launcher))
            cause = next(row for row in rows if re.search(row.pattern, node.state))
            command, evidence = filled(cause.first_command, node.name), f"{node.name}: {node.state}"
            finding = cause.finding(node.name, "high", evidence, command, f"job {result.job}; {cause.source}")
            findings.setdefault(node.name, finding.explaining(errors))
    return list(findings.values())


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
