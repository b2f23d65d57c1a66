"""What tests of checks that train have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from seatrial.checks.base import Check, Place
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Observation, Outcome
from seatrial.worker import measure


def outcomes(check: Check, measurements: Iterable[Measurement]) -> dict[str, Outcome]:
    """Metric → what the rules say of it."""
    return {verdict.metric: verdict.outcome for verdict in judge_check(check, list(measurements), {}, "t")}


def failed(check: Check, observations: Iterable[Observation], folder: Path) -> set[str]:
    """The metrics that the rules fail, of these observations."""
    told = list(observations)
    found = measure(replace(check, measure=lambda place, options: iter(told)), seat(folder), {})
    assert found.error is None
    judged = outcomes(check, [found])
    return {metric for metric, outcome in judged.items() if outcome is Outcome.FAIL}


def seat(out: Path, ranks: int = 2) -> Place:
    return Place(
        node="n0", rank=0, world_size=ranks, local_rank=0, device="cpu", promised_gpus=None, out=out, run_dir=out
    )
