"""What tests of checks that train have in common."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from seatrial.checks.base import Check, Context
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Observation, Outcome
from seatrial.worker import measure


def outcomes(check: Check, measurements: Iterable[Measurement]) -> dict[str, Outcome]:
    """Metric → what the rules say of it."""
    return {verdict.metric: verdict.outcome for verdict in judge_check(check, list(measurements), {}, "t")}


def failed_metrics(check: Check, observations: Iterable[Observation], folder: Path) -> set[str]:
    """The metrics that the rules fail, of these observations."""
    told = list(observations)
    found = measure(replace(check, measure=lambda context, options: iter(told)), make_context(folder), {})
    assert found.error is None
    judged = outcomes(check, [found])
    return {metric for metric, outcome in judged.items() if outcome is Outcome.FAIL}


def make_context(out: Path, ranks: int = 2) -> Context:
    return Context(
        node="n0",
        rank=0,
        world_size=ranks,
        local_rank=0,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=out,
        run_dir=out,
    )
