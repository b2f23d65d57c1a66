"""Verdicts of a check on synthetic metrics."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from seatrial.checks.check import Check
from seatrial.checks.declare import Answer, answers
from seatrial.judge.rules import judge_check
from seatrial.model import CLUSTER, Absent, Fact, Measurement, Metric, Outcome, Verdict, Why, worst


def measurement(check: Check, given: Iterable[Answer], subject: str, **facts: Any) -> Measurement:
    """What the rank ``subject`` of a check of all ranks yields, as a measurement with additional ``facts``."""
    observed = list(answers(given, check.declared, check.name, {None: CLUSTER, "rank": subject}))
    return Measurement(
        check=check.name,
        subject=subject,
        rank=0,
        metrics=tuple(item for item in observed if isinstance(item, Metric)),
        absent=tuple(item for item in observed if isinstance(item, Absent)),
        facts=facts | {item.name: item.value for item in observed if isinstance(item, Fact)},
    )


def outcomes(
    check: Check, values: dict[str, float], absent: dict[str, str] | None = None, /, **facts: Any
) -> dict[str, Outcome]:
    """Metric → outcome for the measured ``values``, with keys ``METRIC SUBJECT`` or ``METRIC``.

    ``absent``: metrics that do not apply, and why. For a metric with several verdicts, the worst outcome.
    """
    metrics = []
    for key, value in values.items():
        name, _, subject = key.partition(" ")
        unit = check.units[name if name in check.units else f"{name.partition('.')[0]}.*"]
        metrics.append(Metric(name=name, value=value, unit=unit, subject=subject or "cluster"))
    without = tuple(
        Absent(metric=name, why=Why.DOES_NOT_APPLY, reason=reason) for name, reason in (absent or {}).items()
    )
    measurement = Measurement(
        check=check.name, subject="node0/gpu0", metrics=tuple(metrics), absent=without, facts=facts
    )
    verdicts = judge_check(check, [measurement], {}, "t")
    metrics_judged = dict.fromkeys(verdict.metric for verdict in verdicts)
    return {name: worst(each.outcome for each in verdicts if each.metric == name) for name in metrics_judged}


def verdicts(check: Check, given: Iterable[Answer]) -> list[Verdict]:
    """The verdicts on what rank 0 of a check of all ranks yields."""
    return judge_check(check, [measurement(check, given, "node0/rank0")], {}, "t")
