"""Jobs, logs, measurements and verdicts → findings: fault, location, confidence, evidence and first command."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path

from seatrial.checks.check import SkipIf
from seatrial.diagnose.causes import Run, cause_findings
from seatrial.diagnose.confirm import merge, unmerged, with_confirmations
from seatrial.diagnose.hangs import CAUSE as HANG
from seatrial.diagnose.hangs import hang_findings
from seatrial.diagnose.implementations import implementation_findings
from seatrial.diagnose.job_failures import (
    RANK_FAILED,
    REFUSALS,
    SIGTERM_SIGNATURES,
    assign_consequences,
    failed_rank_finding,
    job_failure_findings,
    missing_node_causes,
    missing_node_findings,
    refused_job_findings,
)
from seatrial.diagnose.localize import finding_source, finding_templates, localize
from seatrial.diagnose.log_origin import LogOrigins
from seatrial.diagnose.log_search import search, search_text
from seatrial.diagnose.signature import MAX_QUOTE, Match
from seatrial.diagnose.signatures import signatures as known_signatures
from seatrial.diagnose.slow_nodes import search_findings
from seatrial.model import FAILED_RANK, Finding, JobResult, JobState, Measurement, Outcome, Trial, Verdict
from seatrial.util.grouping import grouped
from seatrial.util.input_files import open_file
from seatrial.util.secrets import secret_values
from seatrial.util.text import and_more

_RANK_CAUSES = (RANK_FAILED, HANG)  # causes of findings that come from jobs and logs, not from verdicts
_MAX_NAMED = 6
_MAX_TITLE = 160  # characters of a line in a title
_MESSAGE = re.compile(
    r"(?:^|[\s:.])(?:[A-Z]\w{0,60}(?:Error|Exception)(?:\(\w{1,60}\))?|error|fatal): +(?:pyxis: +)?(\S.{0,400})"
)
_CONFIRMATION_S = 600.0  # longest time between a line and one that confirms it: the NCCL watchdog waits that long


def diagnose(
    run: Run, results: Sequence[JobResult], retries: Sequence[Measurement], run_dir: Path
) -> tuple[Finding, ...]:
    """The findings of a trial.

    Their order: missing nodes, failures of jobs, causes of bad verdicts, hangs, a refused job, known failures in errors
    and outputs of programs, known failures in logs, verdicts that locate a fault.

    A failure that an error of a check names is not reported again from logs. The logs of a refused job are not
    searched. If nodes are missing, errors of checks, hangs, and logs without a root or a failed step are not
    reported, since they are consequences.
    """
    refused = refused_job_findings(results, run.verdicts)
    missing_nodes = missing_node_findings([result for result in results if not result.failures], run.verdicts)
    failures = job_failure_findings(results, run)
    explained_errors = {(key.check, key.subject) for failure in failures for key in failure.explains}
    measured = (*run.measurements, *retries)
    unexplained = [each for each in measured if (each.check, each.subject) not in explained_errors]
    error_findings = [
        match.finding(measurement.subject, "high")
        for measurement in (() if missing_nodes else unexplained)
        for match in _matches_to_report(search_text(measurement.error or "", measurement.check))
    ]
    output_findings = _findings_in_outputs(run)
    findings = {(finding.title, finding.subject): finding for finding in (*refused, *error_findings, *output_findings)}
    hangs = [] if missing_nodes else list(hang_findings(results, run, run_dir))
    reported_titles = {title for title, _ in findings}
    jobs = frozenset(result.job for result in results)
    for finding in _findings_in_logs(results, run_dir):
        is_consequence = finding.cause in _RANK_CAUSES and bool(error_findings or hangs)
        if finding.title not in reported_titles and not is_consequence:
            findings.setdefault((finding.title, "" if finding.subject in jobs else finding.subject), finding)
    failures, causes = _all_causes(failures, run)
    others = [*hangs, *_without_consequences(findings.values())]
    merged = merge(causes, _with_explained_errors(others, run.verdicts, (*failures, *causes)), jobs, run.measurements)
    return (*missing_nodes, *failures, *merged, *localize(run))


def _without_consequences(findings: Collection[Finding]) -> list[Finding]:
    """The findings without those of role cascade if another one names a cause of the same component."""
    roles = {signature.id: signature.role for signature in known_signatures()}
    components = {each: each.signature.partition(".")[0] for each in findings}
    with_root = {components[each] for each in findings if roles.get(each.signature) == "root"}
    return [each for each in findings if roles.get(each.signature) != "cascade" or components[each] not in with_root]


def _all_causes(failures: Sequence[Finding], run: Run) -> tuple[list[Finding], list[Finding]]:
    """The ``failures`` of jobs that no cause explains, and the causes of verdicts that no failure explains.

    The causes: those with high confidence, slow nodes, slow implementations, then others.
    """
    explained = {key for failure in failures for key in failure.explains}
    run = replace(run, verdicts=[verdict for verdict in run.verdicts if verdict.key not in explained])
    causes = cause_findings(run)
    slow_nodes = search_findings(run, causes)
    certain = [cause for cause in causes if cause.confidence == "high"]
    uncertain = [cause for cause in causes if cause.confidence != "high"]
    implementations = implementation_findings(run, causes)
    return assign_consequences(failures, [*certain, *slow_nodes, *implementations, *uncertain])


def refreshed_findings(trial: Trial, run: Run) -> tuple[Finding, ...]:
    """The findings of a recorded trial; those that come from verdicts are computed again from ``run``."""
    sources = {finding_source(check, metric) for check in run.checks.values() for metric in finding_templates(check)}
    missing_node_ids = (cause.id for cause in missing_node_causes())
    job_causes = {*_RANK_CAUSES, *REFUSALS, *missing_node_ids}  # not from verdicts
    from_jobs = [finding for finding in trial.findings if finding.cause in job_causes]
    others = unmerged([finding for finding in trial.findings if finding.cause not in job_causes])
    kept = [*from_jobs, *(finding for finding in others if finding.source not in sources)]
    failures, causes = _all_causes(job_failure_findings(trial.results, run), run)
    jobs = frozenset(result.job for result in trial.results)
    return (*failures, *merge(causes, kept, jobs, run.measurements), *localize(run))


def explain(matches: Iterable[Match], origins: LogOrigins | None = None) -> tuple[Finding, ...]:
    """One finding for each signature, without secrets of the logs, ordered by its earliest match (see _ordered).

    A title without values of the line quotes the message of an error. An earlier error of the same process
    that no signature knows stands above a consequence or a general error, whose confidence is low then. The evidence
    has the number of logs that show the same failure, the subject all places that they name. Findings of NCCL say if
    its network is unknown. ``origins`` reads the logs while ``matches`` yields.
    """
    all_matches, origins, secrets = list(matches), origins or LogOrigins(), secret_values()
    facts = {match.signature.id for match in all_matches if match.signature.role == "fact"}
    has_slurm = "world.slurm" in facts or "world.kubernetes" not in facts
    network = unknown_network(all_matches)
    ordered = _ordered(_matches_to_report(all_matches), origins)
    by_signature = grouped((match.signature.id, match) for match in ordered)
    findings: list[Finding] = []
    for same in by_signature.values():
        match = same[0]
        if not findings and (first := _first_unknown_error(match, all_matches, origins)):
            findings.append(first)
        places = list(dict.fromkeys(filter(None, (each.place for each in same))))
        place = origins.origin(match.line, match.source).name or and_more(places, _MAX_NAMED)
        confidence = "low" if findings and not findings[0].signature else match.confidence
        finding = match.finding(place, confidence, has_slurm=has_slurm)
        if "{" not in match.signature.title.replace("{option}", "") and (message := _MESSAGE.search(match.shown_line)):
            finding = finding.model_copy(update={"title": f'{finding.title}: "{message[1][:_MAX_TITLE]}"'})
        finding = with_confirmations(finding, match, [other for other in all_matches if _is_near(other, match)])
        logs = {each.log for each in same}
        of_all = f"In {len(logs)} logs. " if len(logs) > 1 else ""
        of_nccl = f" {network}." if network and match.signature.id.startswith("nccl.") else ""
        findings.append(finding.model_copy(update={"evidence": f"{of_all}{finding.evidence}{of_nccl}"}))
    return tuple(finding.without_secrets(secrets) for finding in findings)


def error_lines(matches: Iterable[Match], origins: LogOrigins) -> list[Match]:
    """The lines that only look like errors, by time and rank: what to read if nothing is known."""
    return _ordered((match for match in matches if match.signature.role == "error_line"), origins)


def unknown_network(matches: Iterable[Match]) -> str:
    """The network of NCCL that data/networks.yaml does not have, in a sentence; empty if the logs name none."""
    unknown = (match for match in matches if match.signature.rule == "unknown_network")
    return next((match.signature.titled(match.values) for match in unknown), "")


def _first_unknown_error(match: Match, matches: Iterable[Match], origins: LogOrigins) -> Finding | None:
    """The first line above ``match`` of the same process that only looks like an error.

    None if ``match`` is the cause of a failure, not a consequence, a failed step or a general error.
    """
    if match.signature.role not in ("general", "cascade", "step"):
        return None
    of_process = ("", origins.origin(match.line, match.source).name)
    for other in itertools.takewhile(lambda other: other.source != match.source, matches):
        place = origins.origin(other.line, other.source).name
        if other.signature.role == "error_line" and other.log == match.log and place in of_process:
            return Finding(
                title=f"First error, which no signature knows: {other.shown_line[:_MAX_TITLE]}",
                subject=place,
                confidence="low",
                evidence=f"The errors after it may follow from it. Log line: {other.shown_line[:MAX_QUOTE]}",
                fix="Search for the text in the documentation and the issues of the program that wrote the line.",
                action="none",
                source=other.source,
            )
    return None


def _is_near(other: Match, match: Match) -> bool:
    """Whether two lines may be of one failure: in the same log, and at about the same time if both have one."""
    times = (other.time, match.time)
    return other.log == match.log and (None in times or abs((other.time or 0) - (match.time or 0)) <= _CONFIRMATION_S)


def _ordered(matches: Iterable[Match], origins: LogOrigins) -> list[Match]:
    """The matches by time and, at the same time, by rank. Lines without a time come last, in the order of the logs.

    Failed steps come after roots and families, which name their reason.
    """

    def position(match: Match) -> tuple[bool, float, float]:
        is_late = match.signature.role in ("step", "cascade")
        if match.time is None:
            return is_late, math.inf, 0
        return is_late, match.time, origins.origin(match.line, match.source).order

    return sorted(matches, key=position)


def _with_explained_errors(
    findings: Sequence[Finding], verdicts: Iterable[Verdict], causes: Iterable[Finding]
) -> list[Finding]:
    """The findings with ``explains`` set.

    A finding whose signature has the role root explains each ERROR on its subject whose text the signature matches,
    except ERRORs that one of ``causes`` explains.
    """
    root_ids = {signature.id for signature in known_signatures() if signature.role == "root"}
    explained = {key for cause in causes for key in cause.explains}
    unexplained = (each for each in verdicts if each.outcome is Outcome.ERROR and each.key not in explained)
    errors = grouped((verdict.subject, verdict) for verdict in unexplained)

    @cache  # many checks may have the same error
    def signature_ids(text: str) -> frozenset[str]:
        return frozenset(match.signature.id for match in search_text(text, ""))

    def with_errors(finding: Finding) -> Finding:
        if finding.explains or finding.signature not in root_ids:
            return finding
        of_place = errors.get(finding.subject, ())
        return finding.explaining(each for each in of_place if finding.signature in signature_ids(each.detail))

    return list(map(with_errors, findings))


def _findings_in_outputs(run: Run) -> Iterator[Finding]:
    """Known failures in the evidence of a FAIL on a metric whose evidence has output of a program."""
    failed_ranks = {
        measurement.check: f"rank {failed.get('rank')} on {failed.get('node')}"
        for measurement in run.measurements
        if isinstance(failed := measurement.facts.get(FAILED_RANK), dict)
    }
    for verdict in run.verdicts:
        check = run.checks.get(verdict.check) if verdict.outcome is Outcome.FAIL else None
        declared = check.declaration(verdict.metric) if check else None
        if check and declared and declared.log_evidence:
            lines = verdict.evidence.replace("\\n", "\n").replace('\\"', '"')  # the evidence quotes a log as JSON
            for match in _matches_to_report(search_text(lines, verdict.check)):
                # the rank that the line names may differ from the rank that ended first
                rank = match.values.get("rank", "")
                subject = f"rank {rank}" if rank.isdigit() else failed_ranks.get(verdict.check, verdict.subject)
                program = {"program": "options.command"} if SkipIf.NO_COMMAND in check.skip_if else {}
                of_program = match.model_copy(update={"values": match.values | program})
                yield of_program.finding(subject, "high").explaining([verdict])


def _findings_in_logs(results: Sequence[JobResult], run_dir: Path) -> Iterator[Finding]:
    for result in sorted(results, key=lambda result: result.state is JobState.COMPLETED):
        if result.refused or result.state is JobState.CANCELLED:
            continue
        folder = run_dir / "jobs" / result.job / f"attempt{result.attempt}"
        logs = sorted(path for path in folder.glob("**/*") if path.suffix in (".err", ".log") and path.is_file())
        if result.state is JobState.COMPLETED:
            yield from _findings_of_completed_job(logs, run_dir, result.job)
        else:
            # seatrial or Slurm ends the processes of a job that hangs or loses a node
            ignored = SIGTERM_SIGNATURES if result.state is JobState.HUNG or result.missing_nodes else ()
            all_matches = (match for log in logs for match in _search_log(log, run_dir))
            matches = [match for match in all_matches if match.signature.id not in ignored]
            failed_rank = failed_rank_finding(result, folder)
            # the finding of the failed rank contains the error of the rank, so that a general error adds nothing
            reported = _matches_to_report(
                match for match in matches if not (failed_rank and match.signature.role in ("family", "general"))
            )
            has_root = any(match.signature.role in ("root", "step") for match in reported)
            if failed_rank and not has_root and not result.missing_nodes:
                yield failed_rank
            for match in reported if has_root or not result.missing_nodes else ():
                finding = match.finding(result.failed_subject or result.job, match.confidence)
                yield with_confirmations(finding, match, matches)


def _findings_of_completed_job(logs: Iterable[Path], run_dir: Path, job: str) -> Iterator[Finding]:
    """Roots and failed steps in the logs of a job that completed; other roles are ignored.

    NCCL INFO lines are ignored too: thousands of ranks write gigabytes of them.
    """
    for log in logs:
        for match in _search_log(log, run_dir, ignore="NCCL INFO"):
            if match.signature.role in ("root", "step"):
                finding = match.finding(job, "low")
                yield finding.model_copy(update={"evidence": f"The job completed nevertheless. {finding.evidence}"})


def _matches_to_report(matches: Iterable[Match]) -> list[Match]:
    """The matches of the most specific role that occurs, in the order root, family, step, general, cascade.

    If it is root or family, also the matches of failed steps (role step), and consequences on a device or node of which
    none of them is. Signature explains the roles. Failures that a later line ends do not count. On one line, signatures
    that require facts of the log come before others.
    """
    all_matches = list(matches)
    facts = {match.signature.id for match in all_matches if match.signature.role == "fact"}
    known = [match for match in _without_ended(all_matches) if match.signature.fits(facts)]
    by_facts = {match.source for match in known if match.signature.requires}
    known = [match for match in known if match.signature.requires or match.source not in by_facts]
    roles = {match.signature.role for match in known}
    most_specific = next((role for role in ("root", "family", "step", "general", "cascade") if role in roles), "root")
    reported_roles = {most_specific, "step"} if most_specific in ("root", "family") else {most_specific}
    places = [match.place for match in known if match.signature.role == most_specific]
    is_elsewhere = {
        place: all(place != other and place.partition(" ")[0] == other.partition(" ")[0] for other in places)
        for place in {match.place for match in known if match.place}
    }
    return [
        match
        for match in known
        if match.signature.role in reported_roles
        or (match.signature.role == "cascade" and is_elsewhere.get(match.place))
    ]


def _without_ended(matches: Iterable[Match]) -> list[Match]:
    """The matches without the failures that a later line of the same log ends: a retry or probe that went well."""
    kept: list[Match] = []
    for match in matches:
        if match.signature.role == "recovery":
            kept = [
                each
                for each in kept
                if each.log != match.log
                or not match.signature.confirms_signature(each.signature.id)
                or bool(each.place and match.place and each.place != match.place)
            ]
        kept.append(match)
    return kept


def _search_log(log: Path, run_dir: Path, ignore: str = "") -> list[Match]:
    with open_file(log) as file:
        return list(search(file, str(log.relative_to(run_dir)), ignore))
