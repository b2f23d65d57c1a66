"""Helpers for tests of the training checks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

from seatrial.checks.base import Check, Context
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Observation, Outcome
from seatrial.worker import measure


def outcomes(check: Check, measurements: Iterable[Measurement]) -> dict[str, Outcome]:
    """Metric → outcome of its rule."""
    return {verdict.metric: verdict.outcome for verdict in judge_check(check, list(measurements), {}, "t")}


def failed_metrics(check: Check, observations: Iterable[Observation], folder: Path) -> set[str]:
    """The metrics with outcome FAIL if ``check`` yields ``observations``."""
    fixed = list(observations)
    measurement = measure(replace(check, measure=lambda context, options: iter(fixed)), make_context(folder), {})
    assert measurement.error is None
    return {metric for metric, outcome in outcomes(check, [measurement]).items() if outcome is Outcome.FAIL}


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
