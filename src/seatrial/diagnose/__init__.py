"""Jobs, logs, measurements and verdicts → findings: fault, location, confidence, evidence and first command."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from seatrial.checks.base import Check
from seatrial.diagnose.localize import finding_source, localize
from seatrial.diagnose.signatures import Match, search
from seatrial.model import Finding, JobResult, JobState, Measurement, Trial, Verdict, format_bytes
from seatrial.util.input_files import open_file

# Bytes read from the end of a log, where errors are; a log may have any size
_TAIL_BYTES = 4 * 2**20


def diagnose(
    results: Sequence[JobResult],
    measurements: Sequence[Measurement],
    retries: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
    run_dir: Path,
) -> tuple[Finding, ...]:
    """The findings of a trial, one per title and subject: from errors of checks, then from logs, then from verdicts.

    A fault that an error of a check explains is not reported again from logs. The logs of a job that its nodes refused
    have no other fault.
    """
    refused = [_refusal(result) for result in results[-1:] if result.state is JobState.REFUSED]
    errors = _findings_in_errors([*measurements, *retries])
    findings = {(finding.title, finding.subject): finding for finding in (*refused, *errors)}
    explained = {title for title, _ in findings}
    for finding in _findings_in_logs(results, run_dir):
        if finding.title not in explained:
            findings.setdefault((finding.title, finding.subject), finding)
    return (*findings.values(), *localize(verdicts, measurements, checks))


def refreshed_findings(trial: Trial, verdicts: Sequence[Verdict], checks: Mapping[str, Check]) -> tuple[Finding, ...]:
    """The findings of a recorded trial; those that come from verdicts are computed again from ``verdicts``."""
    sources = {finding_source(check, metric) for check in checks.values() for metric in check.finding_templates}
    kept = [finding for finding in trial.findings if finding.source not in sources]
    return (*kept, *localize(verdicts, trial.measurements, checks))


def explain(file: BinaryIO, name: str) -> tuple[Finding, ...]:
    """The findings in one log, a file or a pipe; ``name`` is for the source. Raises OSError if it cannot be read."""
    lines, is_cut = _tail(file)
    source = f"{name}, last {format_bytes(_TAIL_BYTES)}" if is_cut else name
    return tuple(_finding(match, subject="", confidence="medium") for match in _causes(search(lines, source)))


def _refusal(result: JobResult) -> Finding:
    """The finding for nodes that do not have what the trial needs."""
    _, _, command = result.cause.partition(". Run first")
    return Finding(
        title="The node does not have what the trial needs",
        subject=result.failed_subject,
        confidence="high",
        evidence=result.cause,
        first_command=command.partition(": ")[2].partition("; ")[0],
        fix="Correct the environment of the node, or environment and container of the trial; then run it again.",
        source=f"preflight of job {result.job}",
    )


def _findings_in_errors(measurements: Sequence[Measurement]) -> Iterator[Finding]:
    for measurement in measurements:
        if measurement.error:
            for match in _causes(search(measurement.error.splitlines(), measurement.check)):
                yield _finding(match, measurement.subject, "high")


def _findings_in_logs(results: Sequence[JobResult], run_dir: Path) -> Iterator[Finding]:
    for result in sorted(results, key=lambda result: result.state is JobState.COMPLETED):
        if result.state in (JobState.CANCELLED, JobState.REFUSED):
            continue
        folder = run_dir / "jobs" / result.job / f"attempt{result.attempt}"
        logs = sorted(path for path in folder.glob("**/*") if path.suffix in (".err", ".log") and path.is_file())
        if result.state is JobState.COMPLETED:
            yield from _findings_of_completed_job(logs, run_dir, result.job)
        else:
            for match in _causes(match for log in logs for match in _search_log(log, run_dir)):
                yield _finding(match, result.failed_subject or result.job, "medium")


def _findings_of_completed_job(logs: Iterable[Path], run_dir: Path, job: str) -> Iterator[Finding]:
    """Causes of failures in the logs of a job that completed; symptoms are ignored.

    NCCL INFO lines are ignored too: thousands of ranks write gigabytes of them.
    """
    for match in (match for log in logs for match in _search_log(log, run_dir, ignore="NCCL INFO")):
        if match.signature.role == "cause":
            finding = _finding(match, job, "low")
            yield finding.model_copy(update={"evidence": f"The job completed nevertheless. {finding.evidence}"})


def _causes(matches: Iterable[Match]) -> list[Match]:
    """The matches of causes; if there are none, all matches, which are symptoms."""
    all_matches = list(matches)
    return [match for match in all_matches if match.signature.role == "cause"] or all_matches


def _finding(match: Match, subject: str, confidence: str) -> Finding:
    return Finding.model_validate(
        {
            "title": match.signature.title,
            "subject": subject,
            "confidence": confidence,
            "evidence": f"{match.signature.cause} Log line: {match.line[:300]}",
            "first_command": match.signature.first_command,
            "fix": match.signature.fix,
            "source": match.source,
        }
    )


def _search_log(log: Path, run_dir: Path, ignore: str = "") -> list[Match]:
    """The signatures in a log. Lines that contain ``ignore`` count as empty, which keeps the line numbers."""
    with open_file(log) as file:
        lines, _ = _tail(file)
    if ignore:
        lines = ["" if ignore in line else line for line in lines]
    return search(lines, str(log.relative_to(run_dir)))


def _tail(file: BinaryIO) -> tuple[list[str], bool]:
    """The last lines of a log, and whether it has earlier lines."""
    if file.seekable():
        begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(begin)
        tail, is_cut = file.read(_TAIL_BYTES), begin > 0
    else:
        tail, is_cut = b"", False
        while chunk := file.read(_TAIL_BYTES):
            is_cut = is_cut or len(tail) + len(chunk) > _TAIL_BYTES
            tail = (tail + chunk)[-_TAIL_BYTES:]
    return tail.decode("utf-8", errors="replace").splitlines(), is_cut
