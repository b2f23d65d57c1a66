"""Verdicts on places and pairs of places → findings: the node, the GPU or the path at fault. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Literal

from seatrial.checks.base import Check, FindingTemplate
from seatrial.model import Finding, Measurement, Metric, Outcome, Reason, Verdict, format_value
from seatrial.util.text import and_more

MAX_NAMED = 8
Confidence = Literal["high", "medium", "low"]
Trouble = list[tuple[Metric, Verdict]]
_WEAKEST: tuple[Confidence, ...] = ("low", "medium", "high")


def localize(
    verdicts: Sequence[Verdict], measurements: Sequence[Measurement], checks: Mapping[str, Check]
) -> Iterator[Finding]:
    """One finding for each place that a FAIL or a WARN is on, of metrics whose check declares a location.

    Confidence: high for a FAIL that was reproduced, medium for a FAIL that was measured once, low for a WARN and where
    more places are in trouble than the check can tell apart. ``measurements`` are the first ones, without retries.
    """
    locating = {name: check for name, check in checks.items() if check.finding_templates}
    troubled = _troubled(verdicts, locating)
    for measurement in (one for one in measurements if one.check in locating):
        check = locating[measurement.check]
        for name, location in check.finding_templates.items():
            metrics = [metric for metric in measurement.metrics if metric.name == name]
            trouble = [
                (metric, troubled[check.name, name, metric.subject])
                for metric in metrics
                if (check.name, name, metric.subject) in troubled
            ]
            certain = _distinguishable(location, measurement, trouble)
            for place in _places(location, trouble):
                yield _finding(check, location, metrics, place, certain=certain)


def finding_source(check: Check, metric: str) -> str:
    """The source of a finding that a verdict on ``metric`` gave."""
    return f"{metric} of {check.name}"


def _troubled(verdicts: Sequence[Verdict], checks: Mapping[str, Check]) -> dict[tuple[str, str, str], Verdict]:
    """The worst verdict by check, metric and subject: FAIL before WARN, no other."""
    worst: dict[tuple[str, str, str], Verdict] = {}
    for outcome in (Outcome.FAIL, Outcome.WARN):
        for one in verdicts:
            if one.outcome is outcome and one.check in checks and one.metric in checks[one.check].finding_templates:
                worst.setdefault((one.check, one.metric, one.subject), one)
    return worst


def _distinguishable(location: FindingTemplate, measurement: Measurement, trouble: Trouble) -> bool:
    """Whether so few are in trouble that none of them can have been slow only because of its partners."""
    if not location.max_distinguishable_fact:
        return True
    most = measurement.facts.get(location.max_distinguishable_fact)
    nodes = {_node(metric.subject) for metric, _ in trouble}
    return isinstance(most, int) and len(nodes if location.whole_node_title else trouble) <= most


def _places(location: FindingTemplate, trouble: Trouble) -> Iterator[Trouble]:
    """What makes one finding: a place or pair by itself, or all of a node, without its WARNs where any FAILs."""
    if not location.whole_node_title:
        yield from ([one] for one in trouble)
        return
    for node in dict.fromkeys(_node(metric.subject) for metric, _ in trouble):
        of_node = [(metric, verdict) for metric, verdict in trouble if _node(metric.subject) == node]
        yield [(metric, verdict) for metric, verdict in of_node if verdict.outcome is Outcome.FAIL] or of_node


def _finding(
    check: Check, location: FindingTemplate, metrics: Sequence[Metric], place: Trouble, *, certain: bool
) -> Finding:
    subjects = [metric.subject for metric, _ in place]
    node, (metric, verdict) = _node(subjects[0]), place[0]
    whole = location.whole_node_title and len(place) == sum(_node(one.subject) == node for one in metrics)
    figures = and_more([f"{format_value(one.value, one.unit)} at {one.subject}" for one, _ in place], MAX_NAMED)
    rule = next(rule for rule in check.rules if rule.metric == metric.name)
    why = f"{metric.name} {figures}: {rule.meaning}"
    if not certain:
        why += "; more are in trouble than this check tells apart: some may only have met slow partners"
    return Finding(
        title=location.whole_node_title if whole else location.title,
        subject=node if whole else ", ".join(subjects),
        confidence=min((_confidence(one) for _, one in place), key=_WEAKEST.index) if certain else "low",
        evidence=why,
        first_command=location.first_command.format(node=node, pair=" and ".join(subjects[0].split("->"))),
        fix=verdict.fix,
        source=finding_source(check, metric.name),
    )


def _confidence(verdict: Verdict) -> Confidence:
    if verdict.outcome is not Outcome.FAIL:
        return "low"
    return "high" if Reason.REPRODUCED in verdict.reasons else "medium"


def _node(subject: str) -> str:
    return subject.partition("/")[0]
