"""Verdicts on searches for slow nodes, which the pipeline starts after the checks of a trial. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.base import Check
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict


def search_verdicts(searches: Sequence[Measurement], checks: Mapping[str, Check]) -> tuple[Verdict, ...]:
    """A FAIL for each slow node that a search confirms by repeated measurements; this needs no reference value.

    A search that finds nothing gives no verdict, since it is not a check of the trial.
    """
    names = dict.fromkeys(measurement.check for measurement in searches)
    return tuple(
        verdict
        for name in names
        if name in checks
        for verdict in judge_check(checks[name], [each for each in searches if each.check == name], {}, "")
        if verdict.outcome is Outcome.FAIL
    )
