"""The arithmetic of detectable slowdowns, against draws of whole decisions."""

from __future__ import annotations

from statistics import median

import numpy as np
import pytest

from seatrial.config.schema import CheckSettings, Config
from seatrial.hardware.references import References, Sku
from seatrial.judge import checks_to_retry, judge
from seatrial.judge.insights.power import (
    CERTAINTY,
    detectable_slowdown,
    rejected_share,
    samples_needed,
    samples_table,
    sensitivity_insights,
)
from seatrial.model import Measurement, Metric, Outcome, Scope
from tests.judge.test_rules import BY_REFERENCE, FOUR, SKU, check


def draw(rng: np.random.Generator, speed: float, noise: float, samples: int, retry: int = 0) -> Measurement:
    values = tuple((400 * speed * (1 + noise * rng.standard_normal(samples))).tolist())
    metric = Metric(name="speed", value=median(values), unit="GB/s", subject="n0/gpu0", samples=values)
    return Measurement(check="c", subject="n0/gpu0", metrics=(metric,), facts=FOUR, retry=retry)


def is_rejected(rng: np.random.Generator, speed: float, noise: float, samples: int) -> bool:
    """Measure, retry as the pipeline does, and judge."""
    checks, config = {"c": check(BY_REFERENCE, scope=Scope.GPU)}, Config(name="t", checks={"c": CheckSettings()})
    first, retries = draw(rng, speed, noise, samples), list[Measurement]()
    for number in (1, 2):
        if checks_to_retry(config, [first], retries, checks, number):
            retries.append(draw(rng, speed, noise, samples, number))
    verdicts = judge(config, (), [first], checks, {}, retries=retries)
    return any(verdict.outcome is Outcome.FAIL and verdict.metric for verdict in verdicts)


@pytest.mark.parametrize(("noise", "samples"), [(0.02, 20), (0.03, 10), (0.05, 40), (0.003, 10)])
def test_detectable_slowdown_is_rejected_in_draws(noise: float, samples: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("seatrial.judge.skus", lambda: (Sku.model_validate(SKU.model_dump()),))
    rng, draws, slowdown = np.random.default_rng(0), 200, detectable_slowdown(0.9, noise, samples)
    assert sum(is_rejected(rng, 1 - slowdown, noise, samples) for _ in range(draws)) >= 0.97 * draws
    assert not any(is_rejected(rng, 1.0, noise, samples) for _ in range(draws))


def test_detectable_slowdown_is_rejected_in_99_percent() -> None:
    slowdown = detectable_slowdown(0.9, 0.03, 10)
    assert 0.13 < slowdown < 0.17, "10 samples with 3 % noise do not show 12 %"
    assert rejected_share(slowdown, 0.9, 0.03, 10) == pytest.approx(CERTAINTY, abs=1e-3)
    assert detectable_slowdown(0.9, 0.0, 10) == pytest.approx(0.1, abs=1e-3)
    assert detectable_slowdown(0.9, 5.0, 2) == 1.0


def test_samples_needed() -> None:
    needed = samples_needed(0.12, 0.9, 0.03)
    assert needed is not None
    assert rejected_share(0.12, 0.9, 0.03, needed) >= CERTAINTY > rejected_share(0.12, 0.9, 0.03, needed - 1)
    assert samples_needed(0.08, 0.9, 0.03) is None
    table = samples_table(0.9)
    assert table[0.005][0.15] == 1
    assert list(table[0.1]) == [0.11, 0.12, 0.13, 0.15, 0.2]


def test_sensitivity_of_the_noisiest_subject() -> None:
    rng = np.random.default_rng(0)
    measurements = [draw(rng, 1.0, noise, 20) for noise in (0.001, 0.02)]
    (insight,) = sensitivity_insights(
        measurements, {"c": check(BY_REFERENCE, scope=Scope.GPU)}, References(None, (SKU,))
    )
    assert 0.11 < float(str(insight.values["speed"])) < 0.13
    measured_only = [draw(rng, 1.0, 0.1, 1)]
    assert not list(
        sensitivity_insights(measured_only, {"c": check(BY_REFERENCE, scope=Scope.GPU)}, References(None, (SKU,)))
    )
