"""Latency fits recover the parameters of synthetic points."""

from __future__ import annotations

import random

import pytest

from seatrial.judge.insights.latency_fit import FittedLine, Point, fit_regimes

SIZES = [2.0**power for power in range(10, 34, 2)]  # 1 KiB to 8 GiB


def points(
    sizes: list[float], alpha: float, gbps: float, name: str = "", noise: float = 0.0, seed: int = 1
) -> list[Point]:
    rng = random.Random(seed)
    return [Point(size, (alpha + size / gbps / 1e3) * (1 + rng.gauss(0, noise)), name) for size in sizes]


def test_exact_points_recover_the_parameters() -> None:
    (line,) = fit_regimes(points(SIZES, 20, 250))
    assert [line.alpha_us, line.gbps] == pytest.approx([20, 250])
    assert line.max_relative_error < 1e-9


def test_noise_has_little_effect_and_two_regimes_have_a_large_error() -> None:
    (noisy,) = fit_regimes(points(SIZES, 20, 250, noise=0.01))
    assert noisy.gbps == pytest.approx(250, rel=0.02)
    assert noisy.max_relative_error < 0.05
    (bent,) = fit_regimes([*points(SIZES[:6], 10, 20), *points(SIZES[6:], 60, 300)])
    assert bent.max_relative_error > 0.15


def test_each_regime_with_enough_sizes_has_a_line() -> None:
    mixed = [*points(SIZES[:4], 20, 250, "Ring/LL"), *points(SIZES[4:6], 20, 250, "Tree/LL128")]
    lines = fit_regimes([*mixed, *points(SIZES[6:], 20, 250, "Ring/Simple")])
    assert [(line.regime, line.sizes) for line in lines] == [
        ("Ring/LL", tuple(SIZES[:4])),
        ("Ring/Simple", tuple(SIZES[6:])),
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_two_sizes_have_no_line(count: int) -> None:
    assert fit_regimes(points(SIZES[:count], 20, 250)) == ()


def test_parameters_that_cannot_be_fitted_are_none() -> None:
    (large,) = fit_regimes([Point(2.0**30, 4000, ""), Point(2.0**31, 8100, ""), Point(2.0**32, 16400, "")])
    assert isinstance(large, FittedLine)
    assert large.alpha_us is None
    (flat,) = fit_regimes([Point(1024.0, 20, ""), Point(2048.0, 20, ""), Point(4096.0, 19, "")])
    assert isinstance(flat, FittedLine)
    assert flat.gbps is None
