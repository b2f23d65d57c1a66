"""Verdicts on searches for slow nodes, which the pipeline makes after the checks of a trial. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from seatrial.checks.base import Check
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome, Verdict


def search_verdicts(searches: Sequence[Measurement], checks: Mapping[str, Check]) -> tuple[Verdict, ...]:
    """The FAILs of searches: a slow node that repeated measurements name is a fault, also without a reference value.

    A search without a result has no verdict, since the trial did not ask for it.
    """
    names = dict.fromkeys(measurement.check for measurement in searches)
    return tuple(
        verdict
        for name in names
        if name in checks
        for verdict in judge_check(checks[name], [each for each in searches if each.check == name], {}, "")
        if verdict.outcome is Outcome.FAIL
    )
