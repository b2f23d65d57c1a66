"""Raises the confidence of findings that a second source confirms, such as another log line. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase

from seatrial.diagnose.cause_data import causes
from seatrial.diagnose.causes import overlap
from seatrial.diagnose.signature import MAX_QUOTE, Match
from seatrial.model import Finding, Measurement
from seatrial.model.trial import Confidence

_RAISED_CONFIDENCE: dict[Confidence, Confidence] = {"low": "medium", "medium": "high", "high": "high"}


def with_confirmations(finding: Finding, match: Match, matches: Sequence[Match]) -> Finding:
    """``finding`` of ``match``, with a higher confidence if a confirmation in ``matches`` supports it."""
    lines = [
        f"{other.shown_line[:MAX_QUOTE]} ({other.source})"
        for other in matches
        if other.signature.role == "confirmation" and other.signature.confirms_signature(match.signature.id)
    ]
    return _confirmed(finding, f"Confirmed by: {'; '.join(lines)}") if lines else finding


def merge(
    cause_findings: Sequence[Finding],
    others: Iterable[Finding],
    jobs: frozenset[str],
    measurements: Iterable[Measurement] = (),
) -> list[Finding]:
    """The causes, then the other findings.

    A finding from a log that shows one of the causes moves into ``confirmed_by`` of the cause, and raises its
    confidence. One that quotes a fact of ``measurements`` that a cause is based on (the field ``with_fact``) repeats
    the evidence of the cause, and is left out. ``jobs``: names of jobs; a finding on a job names no place.
    """
    cause_ids = {finding.cause for finding in cause_findings}
    facts = {cause.with_fact for cause in causes() if cause.with_fact and cause.id in cause_ids}
    values = (measurement.facts.get(fact) for measurement in measurements for fact in facts)
    quotes = {value for value in values if isinstance(value, str) and value}
    merged, not_merged = list(cause_findings), []
    for other in others:
        if any(quote in other.evidence for quote in quotes):
            continue
        index = next((index for index, cause in enumerate(merged) if _shows(other, cause, jobs)), None)
        if index is None:
            not_merged.append(other)
            continue
        cause = _confirmed(merged[index], f"The log shows it too: {other.title}. {other.evidence} ({other.source})")
        merged[index] = cause.model_copy(update={"confirmed_by": (*cause.confirmed_by, other)})
    return [*merged, *not_merged]


def unmerged(findings: Sequence[Finding]) -> list[Finding]:
    """The findings that are no causes, as they were before ``merge``."""
    others: list[Finding] = []
    for finding in findings:
        others += finding.confirmed_by if finding.cause else [finding]
    return others


def _shows(other: Finding, cause: Finding, jobs: frozenset[str]) -> bool:
    """Whether the finding from a log shows the cause, at the same place or without a place."""
    patterns = (pattern for each in causes() if each.id == cause.cause for pattern in each.signatures)
    is_same = any(fnmatchcase(other.signature, pattern) for pattern in patterns)
    return is_same and (not other.subject or other.subject in jobs or overlap(cause.subject, other.subject))


def _confirmed(finding: Finding, evidence: str) -> Finding:
    confidence = _RAISED_CONFIDENCE[finding.confidence]
    return finding.model_copy(update={"confidence": confidence, "evidence": f"{finding.evidence} {evidence}".strip()})
