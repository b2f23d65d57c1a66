"""Metrics that are declared by name and as members of a family, with a value of some."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from seatrial.checks.check import Check, Context, Options
from seatrial.checks.declare import Answer, absent, metric, value
from seatrial.model import Outcome, Phase, Scope
from tests.fakes.slurm import judge, run_check


def measure(_context: Context, _options: Options) -> Iterator[Answer]:
    yield value("used.home", 5)
    yield absent("*", "no path")


CHECK = Check(
    name="filesystem.example",
    title="Example",
    phase=Phase.ENVIRONMENT,
    scope=Scope.NODE,
    measure=measure,
    limit_s=1,
    declared=(
        metric("used.*", unit="%"),
        *(metric(f"used.{name}", "<= 90 %", "full", "delete files") for name in ("home", "scratch")),
    ),
)


def test_the_answer_on_a_family_is_not_one_on_a_metric_with_a_value(tmp_path: Path) -> None:
    outcomes = [(verdict.metric, verdict.outcome) for verdict in judge(CHECK, run_check(CHECK, tmp_path))]
    assert outcomes == [("used.home", Outcome.PASS), ("used.scratch", Outcome.SKIP)]
