"""Verdicts of a check on synthetic metrics."""

from __future__ import annotations

from typing import Any

from seatrial.checks.base import Check
from seatrial.judge.rules import judge_check
from seatrial.model import Absent, Measurement, Metric, Outcome, Why


def outcomes(
    check: Check, values: dict[str, float], absent: dict[str, str] | None = None, /, **facts: Any
) -> dict[str, Outcome]:
    """Metric → outcome for the measured ``values``, with keys ``METRIC SUBJECT`` or ``METRIC``.

    ``absent``: metrics that do not apply, and why. For a metric with several subjects, the outcome that is not PASS.
    """
    metrics = []
    for key, value in values.items():
        name, _, subject = key.partition(" ")
        unit = check.metrics[name if name in check.metrics else f"{name.partition('.')[0]}.*"]
        metrics.append(Metric(name=name, value=value, unit=unit, subject=subject or "cluster"))
    without = tuple(
        Absent(metric=name, why=Why.DOES_NOT_APPLY, reason=reason) for name, reason in (absent or {}).items()
    )
    measurement = Measurement(
        check=check.name, subject="node0/gpu0", metrics=tuple(metrics), absent=without, facts=facts
    )
    verdicts = judge_check(check, [measurement], {}, "t")
    all_outcomes = {verdict.metric: verdict.outcome for verdict in verdicts}
    return all_outcomes | {
        verdict.metric: verdict.outcome for verdict in verdicts if verdict.outcome is not Outcome.PASS
    }
