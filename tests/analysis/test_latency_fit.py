"""Lines over size: the parameters that were put in come out, and what the sizes do not show is unknown."""

from __future__ import annotations

import random

import pytest

from seatrial.analysis.latency_fit import FittedLine, Point, fit_regimes

SIZES = [2.0**power for power in range(10, 34, 2)]  # 1 KiB to 8 GiB


def line(
    sizes: list[float], alpha: float, gbps: float, name: str = "", noise: float = 0.0, seed: int = 1
) -> list[Point]:
    chance = random.Random(seed)
    return [(size, (alpha + size / gbps / 1e3) * (1 + chance.gauss(0, noise)), name) for size in sizes]


def test_one_line_comes_out_as_it_went_in() -> None:
    (found,) = fit_regimes(line(SIZES, 20, 250))
    assert [found.alpha_us, found.gbps] == pytest.approx([20, 250])
    assert found.max_relative_error < 1e-9


def test_noise_moves_the_line_little_and_a_bend_shows_in_its_fit_error() -> None:
    (noisy,) = fit_regimes(line(SIZES, 20, 250, noise=0.01))
    assert noisy.gbps == pytest.approx(250, rel=0.02)
    assert noisy.max_relative_error < 0.05
    (bent,) = fit_regimes([*line(SIZES[:6], 10, 20), *line(SIZES[6:], 60, 300)])
    assert bent.max_relative_error > 0.15


def test_each_algorithm_and_protocol_with_enough_sizes_has_a_line() -> None:
    points = [*line(SIZES[:4], 20, 250, "Ring/LL"), *line(SIZES[4:6], 20, 250, "Tree/LL128")]
    found = fit_regimes([*points, *line(SIZES[6:], 20, 250, "Ring/Simple")])
    assert [(one.regime, one.sizes) for one in found] == [
        ("Ring/LL", tuple(SIZES[:4])),
        ("Ring/Simple", tuple(SIZES[6:])),
    ]


@pytest.mark.parametrize("count", [1, 2])
def test_two_sizes_are_no_line(count: int) -> None:
    assert fit_regimes(line(SIZES[:count], 20, 250)) == ()


def test_what_the_sizes_do_not_show_is_unknown() -> None:
    (large,) = fit_regimes([(2.0**30, 4000, ""), (2.0**31, 8100, ""), (2.0**32, 16400, "")])
    assert isinstance(large, FittedLine)
    assert large.alpha_us is None
    (flat,) = fit_regimes([(1024.0, 20, ""), (2048.0, 20, ""), (4096.0, 19, "")])
    assert isinstance(flat, FittedLine)
    assert flat.gbps is None
