"""Verdicts on made-up figures of a check."""

from __future__ import annotations

from typing import Any

from seatrial.checks.base import Check
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome


def outcomes(check: Check, values: dict[str, float], **facts: Any) -> dict[str, Outcome]:
    """Metric → outcome, where ``values`` (``METRIC SUBJECT`` or ``METRIC``) is all that was measured."""
    metrics = []
    for key, value in values.items():
        name, _, subject = key.partition(" ")
        unit = check.metrics.get(name) or check.metrics[f"{name.partition('.')[0]}.*"]
        metrics.append(Metric(name=name, value=value, unit=unit, subject=subject or "cluster"))
    measurement = Measurement(check=check.name, subject="node0/gpu0", metrics=tuple(metrics), facts=facts)
    verdicts = judge_check(check, [measurement], {}, "t")
    found = {verdict.metric: verdict.outcome for verdict in verdicts}
    assert len(found) == len(verdicts), "one verdict a metric"
    return found
