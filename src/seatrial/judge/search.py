"""Verdicts on searches for slow nodes, which the pipeline starts after the checks of a trial. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.check import Check
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict


def search_verdicts(searches: Sequence[Measurement], checks: Mapping[str, Check]) -> tuple[Verdict, ...]:
    """A FAIL for each slow node that a search confirms by repeated measurements; this needs no reference value.

    A search that finds nothing gives no verdict, since it is not a check of the trial.
    """
    verdicts: list[Verdict] = []
    for name in dict.fromkeys(measurement.check for measurement in searches):
        if name in checks:
            measured = [measurement for measurement in searches if measurement.check == name]
            verdicts += judge_check(checks[name], measured, expect={}, trial="")
    return tuple(verdict for verdict in verdicts if verdict.outcome is Outcome.FAIL)
