"""Verdicts of a check on synthetic metrics."""

from __future__ import annotations

from typing import Any

from seatrial.checks.base import Check
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome


def outcomes(check: Check, values: dict[str, float], **facts: Any) -> dict[str, Outcome]:
    """Metric → outcome for the measured ``values``, with keys ``METRIC SUBJECT`` or ``METRIC``.

    For a metric with several subjects, the outcome that is not PASS.
    """
    metrics = []
    for key, value in values.items():
        name, _, subject = key.partition(" ")
        unit = check.metrics[name if name in check.metrics else f"{name.partition('.')[0]}.*"]
        metrics.append(Metric(name=name, value=value, unit=unit, subject=subject or "cluster"))
    measurement = Measurement(check=check.name, subject="node0/gpu0", metrics=tuple(metrics), facts=facts)
    verdicts = judge_check(check, [measurement], {}, "t")
    all_outcomes = {verdict.metric: verdict.outcome for verdict in verdicts}
    return all_outcomes | {
        verdict.metric: verdict.outcome for verdict in verdicts if verdict.outcome is not Outcome.PASS
    }
