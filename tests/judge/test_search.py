"""A search for slow nodes fails the trial only if it has located a slow node."""

from __future__ import annotations

import pytest

from seatrial.checks import catalog
from seatrial.judge import search_verdicts
from seatrial.model import CLUSTER, Measurement, Metric, Outcome

NAME = "collectives.localization"


def search(slow: float, error: str | None = None, check: str = NAME) -> Measurement:
    values = {"slow_ranks": (slow, "ranks"), "slow_paths": (0, "paths"), "slow_rails": (0, "rails")}
    values["wrong_elements"] = (0, "count")
    metrics = [Metric(name=name, value=value, unit=unit, subject=CLUSTER) for name, (value, unit) in values.items()]
    return Measurement(
        check=check,
        subject="n0/rank0",
        metrics=() if error else tuple(metrics),
        facts={"backend": "gloo"},
        error=error,
    )


def test_a_located_node_is_a_failure() -> None:
    (verdict,) = search_verdicts([search(1)], catalog())
    assert (verdict.check, verdict.metric, verdict.outcome) == (NAME, "slow_ranks", Outcome.FAIL)


@pytest.mark.parametrize(
    "measurements", [[], [search(0)], [search(1, error="killed")], [search(1, check="collectives.of_another_version")]]
)
def test_other_searches_have_no_verdict(measurements: list[Measurement]) -> None:
    assert search_verdicts(measurements, catalog()) == ()
