"""The causes of bad verdicts for all reports, each with the verdicts that it explains."""

from __future__ import annotations

from dataclasses import dataclass

from seatrial.model import CLUSTER, Finding, Outcome, Trial, Verdict, VerdictKey
from seatrial.report.view import NOT_PASSED, Group, grouped
from seatrial.util.text import plural


@dataclass(frozen=True)
class CauseView:
    """A cause, and the groups of verdicts that it explains and that no earlier cause explains."""

    finding: Finding
    groups: tuple[Group, ...]
    explained_earlier: int  # number of further verdicts of this cause, which an earlier cause explains too


def causes(trial: Trial) -> list[CauseView]:
    """The causes of bad verdicts, each with the verdicts that it explains."""
    # lists, since a rule and a threshold of the trial may judge the same metric
    verdicts_by_key: dict[VerdictKey, list[Verdict]] = {}
    for verdict in trial.verdicts:
        if verdict.outcome in NOT_PASSED:
            verdicts_by_key.setdefault(VerdictKey.from_verdict(verdict), []).append(verdict)
    views = []
    for finding in trial.findings:
        if finding.explains:
            # a verdict is listed only with the first cause that explains it
            keys = [key for key in finding.explains if key in verdicts_by_key]
            verdicts = [verdict for key in keys for verdict in verdicts_by_key.pop(key)]
            views.append(CauseView(finding, tuple(grouped(verdicts)), len(finding.explains) - len(keys)))
    return views


def cause_of_each_verdict(trial: Trial) -> dict[VerdictKey, str]:
    """Verdict → title, place and confidence of the first cause that explains it, as text; only explained verdicts."""
    texts: dict[VerdictKey, str] = {}
    for finding in trial.findings:
        for key in finding.explains:
            texts.setdefault(key, f"{finding.title} on {finding.subject} ({finding.confidence} confidence)")
    return texts


def cause_text(trial: Trial) -> str:
    """One line with all causes that explain FAILs; empty if there are none.

    Each cause has the number of FAILs that it explains and that no earlier cause explains.
    """
    failures = sum(verdict.outcome is Outcome.FAIL for verdict in trial.verdicts)
    texts = []
    for cause in causes(trial):
        explained = sum(verdict.outcome is Outcome.FAIL for group in cause.groups for verdict in group.verdicts)
        if explained:
            title, subject = cause.finding.title, cause.finding.subject
            place = "" if subject == CLUSTER or subject in title.split() else f" on {subject}"
            texts.append(f"{title}{place} ({explained} of {plural(failures, 'failure')})")
    return "; ".join(texts)
