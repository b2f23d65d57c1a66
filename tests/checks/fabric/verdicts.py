"""Verdicts on made-up figures of a check."""

from __future__ import annotations

from typing import Any

from seatrial.checks.base import Check
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Metric, Outcome


def outcomes(check: Check, values: dict[str, float], **facts: Any) -> dict[str, Outcome]:
    """Metric → outcome, where ``values`` (``METRIC SUBJECT`` or ``METRIC``) is all that was measured.

    Of a metric with several subjects, the outcome of the one that is not PASS.
    """
    metrics = []
    for key, value in values.items():
        name, _, subject = key.partition(" ")
        unit = check.metrics[name if name in check.metrics else f"{name.partition('.')[0]}.*"]
        metrics.append(Metric(name=name, value=value, unit=unit, subject=subject or "cluster"))
    measurement = Measurement(check=check.name, subject="node0/gpu0", metrics=tuple(metrics), facts=facts)
    verdicts = judge_check(check, [measurement], {}, "t")
    found = {verdict.metric: verdict.outcome for verdict in verdicts}
    return found | {one.metric: one.outcome for one in verdicts if one.outcome is not Outcome.PASS}
