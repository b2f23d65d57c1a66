"""The causes of bad verdicts for all reports, each with the verdicts that it explains."""

from __future__ import annotations

from dataclasses import dataclass

from seatrial.model import CLUSTER, Explained, Finding, Outcome, Trial
from seatrial.report.text import plural
from seatrial.report.view import NOT_PASSED, Group, grouped


@dataclass(frozen=True)
class CauseView:
    """A cause, and the groups of verdicts that it explains and no earlier cause does."""

    finding: Finding
    groups: tuple[Group, ...]
    also: int  # number of its verdicts that an earlier cause explains too


def causes(trial: Trial) -> list[CauseView]:
    """The causes of bad verdicts, each with the verdicts that it explains."""
    by_key = {Explained.of(verdict): verdict for verdict in trial.verdicts if verdict.outcome in NOT_PASSED}
    views = []
    for finding in trial.findings:
        if finding.explains:
            verdicts = [by_key.pop(key) for key in finding.explains if key in by_key]
            groups = tuple(grouped(verdicts))
            views.append(CauseView(finding, groups, len(finding.explains) - len(verdicts)))
    return views


def cause_text(trial: Trial) -> str:
    """The causes on one line, with the number of failures that each explains; empty if none is known."""
    failures = sum(verdict.outcome is Outcome.FAIL for verdict in trial.verdicts)
    texts = []
    for cause in causes(trial):
        explained = sum(verdict.outcome is Outcome.FAIL for group in cause.groups for verdict in group.verdicts)
        if explained:
            place = "" if cause.finding.subject == CLUSTER else f" on {cause.finding.subject}"
            texts.append(f"{cause.finding.title}{place} ({explained} of {plural(failures, 'failure')})")
    return "; ".join(texts)
