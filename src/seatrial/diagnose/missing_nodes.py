"""Nodes that did not run the jobs of a trial → findings, from data/missing_nodes.yaml. Pure."""

from __future__ import annotations

import re
from collections.abc import Sequence
from functools import cache

from seatrial.model import Finding, Frozen, JobResult, Outcome, Verdict, VerdictKey
from seatrial.model.trial import Action
from seatrial.util import data_files


class MissingNodeCause(Frozen):
    """Why a node is missing, and what to do. ``pattern``: a regular expression that the state of the node matches.

    ``launcher``: the cause is only for jobs of this launcher; empty: for all jobs. In ``first_command`` and ``fix``,
    {node} is replaced by the name of the node.
    """

    id: str
    title: str
    pattern: str
    launcher: str = ""
    first_command: str
    fix: str
    action: Action
    source: str


@cache
def missing_node_causes() -> tuple[MissingNodeCause, ...]:
    """All rows of the file, in its order; the last one matches every state."""
    return tuple(MissingNodeCause.model_validate(row) for row in data_files.read("missing_nodes.yaml"))


def missing_node_findings(results: Sequence[JobResult], verdicts: Sequence[Verdict]) -> list[Finding]:
    """One finding per node that a job lost or did not get; each explains all ERROR verdicts."""
    errors = tuple(VerdictKey.from_verdict(verdict) for verdict in verdicts if verdict.outcome is Outcome.ERROR)
    findings: dict[str, Finding] = {}
    for result in results:
        for node in result.missing_nodes:
            rows = (row for row in missing_node_causes() if row.launcher in ("", result.launcher))
            cause = next(row for row in rows if re.search(row.pattern, node.state))
            finding = Finding(
                cause=cause.id,
                title=cause.title,
                subject=node.name,
                confidence="high",
                evidence=f"{node.name}: {node.state}",
                first_command=cause.first_command.replace("{node}", node.name),
                fix=cause.fix.replace("{node}", node.name),
                action=cause.action,
                source=f"job {result.job}; {cause.source}",
                explains=errors,
            )
            findings.setdefault(node.name, finding)
    return list(findings.values())
