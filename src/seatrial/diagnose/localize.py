"""Verdicts on subjects and pairs of subjects → findings that name the node, GPU or path at fault. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from seatrial.checks.check import Check
from seatrial.checks.declare import FindingTemplate
from seatrial.diagnose.causes import Run
from seatrial.model import Finding, Measurement, Metric, Outcome, Reason, Verdict, format_value, node_of
from seatrial.model.trial import Confidence
from seatrial.util.grouping import grouped
from seatrial.util.text import and_more

MAX_NAMED = 8
_CONFIDENCE_ORDER: tuple[Confidence, ...] = ("low", "medium", "high")


def localize(run: Run) -> Iterator[Finding]:
    """One finding for each subject, or each node, with a FAIL or WARN on a metric that locates faults.

    Confidence: high for a FAIL that its retry reproduced on the same subject, medium for any other FAIL, low for a
    WARN. Also low if more subjects failed than the check can locate: a good subject is slow if all its partners are
    slow.
    """
    templates = {name: finding_templates(check) for name, check in run.checks.items()}
    worst: dict[tuple[str, str, str], Verdict] = {}  # (check, metric, subject) → its FAIL, else its WARN
    for outcome in (Outcome.FAIL, Outcome.WARN):
        for verdict in run.verdicts:
            if verdict.outcome is outcome and verdict.metric in templates.get(verdict.check, ()):
                worst.setdefault((verdict.check, verdict.metric, verdict.subject), verdict)
    for measurement in run.measurements:
        for name, template in templates.get(measurement.check, {}).items():
            metrics = {metric.subject: metric for metric in measurement.metrics if metric.name == name}
            keys = ((measurement.check, name, subject) for subject in metrics)
            failures = [worst[key] for key in keys if key in worst]
            certain = _are_locatable(template, measurement, failures)
            for group in _groups(template, failures):
                yield _finding(run.checks[measurement.check], template, metrics, group, certain=certain)


def finding_templates(check: Check) -> dict[str, FindingTemplate]:
    """Metric that locates faults → the template of its findings."""
    return {each.name: each.finding for each in check.declared if each.finding}


def finding_source(check: Check, metric: str) -> str:
    """The source of a finding that is derived from a verdict on ``metric``."""
    return f"{metric} of {check.name}"


def _are_locatable(template: FindingTemplate, measurement: Measurement, failures: Sequence[Verdict]) -> bool:
    """Whether the check can locate this number of faults; with more, slow partners make good subjects look slow."""
    if not template.max_locatable_fact:
        return True
    limit = measurement.facts.get(template.max_locatable_fact)
    nodes = {node_of(verdict.subject) for verdict in failures}
    return isinstance(limit, int) and len(nodes if template.whole_node_title else failures) <= limit


def _groups(template: FindingTemplate, failures: Sequence[Verdict]) -> Iterator[list[Verdict]]:
    """The failures of each finding: one subject, or all subjects of a node (only its FAILs if it has any)."""
    if not template.whole_node_title:
        yield from ([verdict] for verdict in failures)
        return
    for of_node in grouped((node_of(verdict.subject), verdict) for verdict in failures).values():
        yield [verdict for verdict in of_node if verdict.outcome is Outcome.FAIL] or of_node


def _finding(
    check: Check,
    template: FindingTemplate,
    metrics: Mapping[str, Metric],
    failures: Sequence[Verdict],
    *,
    certain: bool,
) -> Finding:
    """The finding of one group of failures; ``metrics``: those of all subjects; ``certain``: see _are_locatable."""
    subjects = [verdict.subject for verdict in failures]
    node, name = node_of(subjects[0]), failures[0].metric
    is_whole_node = template.whole_node_title and len(failures) == sum(node_of(subject) == node for subject in metrics)
    values = [f"{format_value(metrics[each].value, metrics[each].unit)} on {each}" for each in subjects]
    rule = next(rule for rule in check.rules if rule.metric == name)
    evidence = f"{name} {and_more(values, MAX_NAMED)}: {rule.meaning}"
    if not certain:
        evidence += "; so many subjects failed that faulty ones cannot be told from their partners"
    return Finding(
        title=template.whole_node_title if is_whole_node else template.title,
        subject=node if is_whole_node else ", ".join(subjects),
        confidence=min(map(_confidence, failures), key=_CONFIDENCE_ORDER.index) if certain else "low",
        evidence=evidence,
        first_command=template.first_command.format(node=node, pair=" and ".join(subjects[0].split("->"))),
        fix=failures[0].fix,
        source=finding_source(check, name),
    )


def _confidence(verdict: Verdict) -> Confidence:
    if verdict.outcome is not Outcome.FAIL:
        return "low"
    return "high" if Reason.REPRODUCED in verdict.reasons else "medium"
