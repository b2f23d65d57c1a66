"""Slow windows although the median is good, and violations that are inconclusive."""

from __future__ import annotations

from statistics import median

import pytest

from seatrial.judge.samples import slow_windows, violation
from seatrial.model import Metric, Outcome, Reason


def metric(*samples: float, unit: str = "GB/s") -> Metric:
    return Metric(name="busbw", value=median(samples), unit=unit, subject="cluster", samples=samples)


@pytest.mark.parametrize(
    ("slow", "total", "outcome"),
    [
        (1, 10, None),
        (2, 5, Outcome.WARN),
        (2, 10, None),
        (3, 10, Outcome.WARN),
        (4, 10, Outcome.FAIL),
        (20, 300, None),  # 7 %
        (30, 300, Outcome.FAIL),  # 10 %
    ],
)
@pytest.mark.parametrize("unit", ["GB/s", "TFLOP/s", "tokens/s/GPU", "us"])
def test_share_of_slow_windows(slow: int, total: int, outcome: Outcome | None, unit: str) -> None:
    slow_value = 1 / 0.7 if unit == "us" else 0.7
    verdict = slow_windows("c", metric(*[1.0] * (total - slow), *[slow_value] * slow, unit=unit))
    assert (verdict and verdict.outcome) == outcome
    assert not verdict or verdict.reasons == (Reason.SLOW_WINDOWS,)


def test_one_very_slow_window_is_a_warning() -> None:
    verdict = slow_windows("c", metric(*[400.0] * 9, 20.0))
    assert verdict is not None
    assert (verdict.outcome, verdict.value) == (Outcome.WARN, 400)
    assert verdict.basis is not None
    assert verdict.basis.expected == 400


@pytest.mark.parametrize("samples", [(0.0,) * 10, (10.0,), (11.0, 10.0, 9.0, 8.1)])
def test_no_slow_windows(samples: tuple[float, ...]) -> None:
    assert slow_windows("c", metric(*samples)) is None


def test_temperatures_and_shares_have_no_slow_windows() -> None:
    assert slow_windows("c", metric(80, 80, 80, 20, 20, 20, 20, unit="°C")) is None


def test_samples_of_something_else_prove_nothing() -> None:
    other = Metric(name="p99", value=5, unit="us", subject="cluster", samples=(1.0,) * 20)
    assert slow_windows("c", other) is None
    assert violation(other, 4, (4.0).__ge__) == (Outcome.FAIL, None)


def test_upper_bound_with_a_wide_interval() -> None:
    outcome, interval = violation(metric(9, 10.1, 10.2, 9.5, 10.3, unit="us"), 10, (10.0).__ge__)
    assert (outcome, interval) == (Outcome.UNJUDGED, (9, 10.3))
    far, _ = violation(metric(9, 20, 20, 20, 9.5, unit="us"), 10, (10.0).__ge__)
    assert far is Outcome.FAIL


def test_warning_stays_a_warning() -> None:
    assert violation(metric(9, 9.9, 10.2), 10, (10.0).__le__, Outcome.WARN)[0] is Outcome.WARN
