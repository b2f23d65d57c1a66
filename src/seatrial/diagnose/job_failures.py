"""Known causes why jobs and probe pods do not start or fail → findings, one per cause. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from pydantic import ValidationError

from seatrial.checks.base import Check
from seatrial.diagnose.cause_data import Cause, causes
from seatrial.diagnose.causes import needs_cause, overlap
from seatrial.hardware.links import role_facts
from seatrial.model import CLUSTER, Finding, JobFailure, JobResult, Measurement, Outcome, Reason, Verdict, VerdictKey
from seatrial.util.text import and_more

_MAX_NAMED = 6


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
    present = {failure.cause for failure, _, _ in failures}
    groups: dict[tuple[str, str], list[tuple[JobFailure, list[Verdict], str]]] = {}
    for failure, consequences, source in failures:
        if failure.cause in by_id and consequences:
            roots = [name for name in by_id[failure.cause].consequence_of if name in present]
            groups.setdefault((roots[0] if roots else failure.cause, failure.name), []).append(
                (failure, consequences, source)
            )
    return [_finding(by_id[identifier], members) for (identifier, _), members in groups.items()]


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


def _failures_of_jobs(
    results: Sequence[JobResult], measurements: Sequence[Measurement], bad: Sequence[Verdict]
) -> Iterator[tuple[JobFailure, list[Verdict], str]]:
    """(failure, verdicts that it explains, source) of each failure of a job.

    The verdicts are those on checks whose error ends with the reason why this attempt ended.
    """
    for result in results:
        error = f"{result.failed_subject}: {result.cause}"  # end of an error; "exit code 1" is also in "exit code 127"
        without_value = {
            (each.check, each.subject) for each in measurements if result.cause and (each.error or "").endswith(error)
        }
        consequences = [
            verdict
            for verdict in bad
            if verdict.outcome is Outcome.ERROR and (verdict.check, verdict.subject) in without_value
        ]
        for failure in result.failures:
            yield failure, consequences, f"job {result.job}"


def _failures_of_checks(
    measurements: Sequence[Measurement], bad: Sequence[Verdict], checks: Mapping[str, Check]
) -> Iterator[tuple[JobFailure, list[Verdict], str]]:
    """(failure, verdicts that it explains, source) of each failure of pods that a check creates.

    The verdicts are errors of the check, and evidence of causes with ``explained_by_job_failure`` at the same place.
    """
    shown = [cause for cause in causes() if cause.explained_by_job_failure]
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
                and any(cause.is_evidence(verdict) for cause in shown)
            ]
            is_error = failure.message in (measurement.error or "")
            errors = [
                verdict
                for verdict in of_check
                if verdict.outcome is Outcome.ERROR and (is_error or Reason.METRIC_MISSING in verdict.reasons)
            ]
            yield failure, [*evidence, *errors], f"check {measurement.check}"


def _finding(cause: Cause, members: Sequence[tuple[JobFailure, list[Verdict], str]]) -> Finding:
    failures = [failure for failure, _, _ in members]
    first = next((each for each in failures if each.cause == cause.id), failures[0])
    nodes = list(dict.fromkeys(node for each in failures for node in each.nodes))
    keys = dict.fromkeys(VerdictKey.from_verdict(verdict) for _, consequences, _ in members for verdict in consequences)
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
        source=and_more(list(dict.fromkeys(source for _, _, source in members)), _MAX_NAMED),
        explains=tuple(keys),
    )
