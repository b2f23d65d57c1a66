"""Known causes why jobs and probe pods do not start or fail → findings, one per cause. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

from pydantic import ValidationError

from seatrial.checks.check import Check
from seatrial.diagnose.cause_data import Cause, causes
from seatrial.diagnose.causes import needs_cause, overlap
from seatrial.hardware.links import role_facts
from seatrial.model import (
    CLUSTER,
    Finding,
    JobFailure,
    JobResult,
    Measurement,
    Outcome,
    Reason,
    Verdict,
    VerdictKey,
)
from seatrial.util.text import and_more

_MAX_NAMED = 6


class _SourcedFailure(NamedTuple):
    """A failure, the bad verdicts that it explains, and where it was recorded: a job or a check."""

    failure: JobFailure
    consequences: list[Verdict]
    source: str


def job_failure_findings(
    results: Sequence[JobResult],
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
) -> list[Finding]:
    """One finding per cause and named object; it explains the checks that were not measured for this reason.

    A cause that explains nothing is omitted: a resumed trial has measured the checks since.
    """
    bad = [verdict for verdict in verdicts if needs_cause(verdict)]
    by_id = {cause.id: cause for cause in causes() if cause.message}
    failures = [*_failures_of_jobs(results, measurements, bad), *_failures_of_checks(measurements, bad, checks)]
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


def is_explained_by(verdict: Verdict, findings: Sequence[Finding]) -> bool:
    """Whether one of ``findings`` explains the verdict."""
    return any(VerdictKey.from_verdict(verdict) in finding.explains for finding in findings)


def not_started(results: Sequence[JobResult], verdicts: Sequence[Verdict]) -> list[Verdict]:
    """The verdicts on checks that were not measured, if nodes or the scheduler refused the last job."""
    if not results or not results[-1].refused:
        return []
    return [verdict for verdict in verdicts if Reason.NOT_MEASURED in verdict.reasons]


def _failures_of_jobs(
    results: Sequence[JobResult], measurements: Sequence[Measurement], bad: Sequence[Verdict]
) -> Iterator[_SourcedFailure]:
    """The failures of jobs. They explain ERRORs of checks whose error ends with the reason why this attempt ended.

    If the last job was not started, they also explain the checks that were not measured.
    """
    for result in results:
        error = f"{result.failed_subject}: {result.cause}"  # end of an error; "exit code 1" is also in "exit code 127"
        failed_measurements = {
            (each.check, each.subject) for each in measurements if result.cause and (each.error or "").endswith(error)
        }
        consequences = [
            verdict
            for verdict in bad
            if verdict.outcome is Outcome.ERROR and (verdict.check, verdict.subject) in failed_measurements
        ]
        if result is results[-1]:
            consequences += not_started(results, bad)
        for failure in result.failures:
            yield _SourcedFailure(failure, consequences, f"job {result.job}")


def _failures_of_checks(
    measurements: Sequence[Measurement], bad: Sequence[Verdict], checks: Mapping[str, Check]
) -> Iterator[_SourcedFailure]:
    """The failures of pods that a check creates.

    They explain ERRORs of the check, and evidence of causes with ``explained_by_job_failure`` at the same place.
    """
    explained_causes = [cause for cause in causes() if cause.explained_by_job_failure]
    for measurement, value in role_facts("job_failures", measurements, checks):
        for row in value if isinstance(value, list) else ():
            try:
                failure = JobFailure.model_validate(row)
            except ValidationError:  # a fact of another shape
                continue
            of_check = [verdict for verdict in bad if verdict.check == measurement.check]
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
    keys = dict.fromkeys(VerdictKey.from_verdict(verdict) for member in members for verdict in member.consequences)
    place = f"{and_more(nodes, _MAX_NAMED)}: " if nodes else ""
    return Finding(
        cause=cause.id,
        title=f"{cause.title}: {first.name}" if first.name else cause.title,
        subject=", ".join(nodes) or CLUSTER,
        confidence="high",
        evidence=f"{place}{first.message}",
        first_command=first.first_command,
        fix=cause.fix,
        action=cause.action,
        source=and_more(list(dict.fromkeys(member.source for member in members)), _MAX_NAMED),
        explains=tuple(keys),
    )
