"""Jobs, their logs and measurements → findings: what went wrong, where, how sure we are, what to do first."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

from seatrial.checks.base import Check
from seatrial.diagnose.localize import finding_source, localize
from seatrial.diagnose.signatures import Match, search
from seatrial.model import Finding, JobResult, JobState, Measurement, Trial, Verdict, format_bytes

# A log is read from its end: what broke stands there, and a runaway log must not exhaust memory.
_TAIL_BYTES = 4 * 2**20


def diagnose(
    results: Sequence[JobResult],
    measurements: Sequence[Measurement],
    repeats: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    checks: Mapping[str, Check],
    run_dir: Path,
) -> tuple[Finding, ...]:
    """Findings for a trial, the surest first, each once per place. A symptom shows only where no cause was found."""
    findings = {(finding.title, finding.subject): finding for finding in _from_errors([*measurements, *repeats])}
    explained = {what for what, _ in findings}
    for finding in _from_jobs(results, run_dir):  # only what no error explains
        if finding.title not in explained:
            findings.setdefault((finding.title, finding.subject), finding)
    return (*findings.values(), *localize(verdicts, measurements, checks))


def refreshed_findings(trial: Trial, verdicts: Sequence[Verdict], checks: Mapping[str, Check]) -> tuple[Finding, ...]:
    """The findings of a recorded trial, those that came from its verdicts made anew from ``verdicts``."""
    sources = {finding_source(check, metric) for check in checks.values() for metric in check.finding_templates}
    kept = [finding for finding in trial.findings if finding.source not in sources]
    return (*kept, *localize(verdicts, trial.measurements, checks))


def explain(file: BinaryIO, name: str) -> tuple[Finding, ...]:
    """Findings for one log, a file or a pipe, called ``name``. Raises OSError when it cannot be read."""
    lines, cut = _tail(file)
    source = f"{name}, last {format_bytes(_TAIL_BYTES)}" if cut else name
    return tuple(_finding(match, where="", confidence="medium") for match in _causes(search(lines, source)))


def _from_errors(measurements: Sequence[Measurement]) -> Iterator[Finding]:
    for measurement in measurements:
        if measurement.error:
            for match in _causes(search(measurement.error.splitlines(), measurement.check)):
                yield _finding(match, measurement.subject, "high")


def _from_jobs(results: Sequence[JobResult], run_dir: Path) -> Iterator[Finding]:
    for result in sorted(results, key=lambda one: one.state is JobState.COMPLETED):
        if result.state is JobState.CANCELLED:
            continue
        folder = run_dir / "jobs" / result.job / f"attempt{result.attempt}"
        logs = sorted(path for path in folder.glob("**/*") if path.suffix in (".err", ".log") and path.is_file())
        if result.state is JobState.COMPLETED:
            yield from _survived(logs, run_dir, result.job)
        else:
            for match in _causes(match for log in logs for match in _read(log, run_dir)):
                yield _finding(match, result.failed_subject or result.job, "medium")


def _survived(logs: Iterable[Path], run_dir: Path, job: str) -> Iterator[Finding]:
    """What would explain a failure, in the logs of a job that came to its end all the same. A symptom is none there.

    What NCCL says of its own doing is passed over: of thousands of ranks that is gigabytes.
    """
    for match in (match for log in logs for match in _read(log, run_dir, but="NCCL INFO")):
        if match.signature.role == "cause":
            finding = _finding(match, job, "low")
            yield finding.model_copy(update={"evidence": f"The job came to its end all the same. {finding.evidence}"})


def _causes(matches: Iterable[Match]) -> list[Match]:
    """Causes; symptoms only when nothing better was found."""
    every = list(matches)
    return [match for match in every if match.signature.role == "cause"] or every


def _finding(match: Match, where: str, confidence: str) -> Finding:
    return Finding.model_validate(
        {
            "what": match.signature.title,
            "where": where,
            "confidence": confidence,
            "why": f"{match.signature.cause} Seen: {match.line[:300]}",
            "first_command": match.signature.first_command,
            "fix": match.signature.fix,
            "source": match.source,
        }
    )


def _read(log: Path, run_dir: Path, but: str = "") -> list[Match]:
    """What its lines mean; those that hold ``but`` count as empty, so that all others keep their numbers."""
    with log.open("rb") as file:
        lines = _tail(file)[0]
    read = ["" if but in line else line for line in lines] if but else lines
    return search(read, str(log.relative_to(run_dir)))


def _tail(file: BinaryIO) -> tuple[list[str], bool]:
    """The last lines of a log, and whether more stood before them."""
    if file.seekable():
        begin = max(0, file.seek(0, os.SEEK_END) - _TAIL_BYTES)
        file.seek(begin)
        tail, cut = file.read(), begin > 0
    else:
        tail, cut = b"", False
        while chunk := file.read(_TAIL_BYTES):
            cut = cut or len(tail) + len(chunk) > _TAIL_BYTES
            tail = (tail + chunk)[-_TAIL_BYTES:]
    return tail.decode("utf-8", errors="replace").splitlines(), cut
