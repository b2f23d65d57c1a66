"""Lines over size: what was put in comes out, and what cannot be told is not told."""

from __future__ import annotations

import random

import pytest

from seatrial.analysis.latency_fit import Line, Point, TooFew, regimes

SIZES = [2.0**power for power in range(10, 34, 2)]  # 1 KiB to 8 GiB


def line(
    sizes: list[float], alpha: float, gbps: float, name: str = "", noise: float = 0.0, seed: int = 1
) -> list[Point]:
    chance = random.Random(seed)
    return [(size, (alpha + size / gbps / 1e3) * (1 + chance.gauss(0, noise)), name) for size in sizes]


def test_one_line_comes_out_as_it_went_in() -> None:
    (found,) = regimes(line(SIZES, 20, 250))
    assert isinstance(found, Line)
    assert [found.alpha_us, found.gbps] == pytest.approx([20, 250])
    assert found.residual < 1e-9


@pytest.mark.parametrize("noise", [0.01, 0.03])
def test_noise_makes_no_second_regime(noise: float) -> None:
    found = [regimes(line(SIZES, 20, 250, noise=noise, seed=seed)) for seed in range(100)]
    assert sum(len(parts) > 1 for parts in found) <= 5
    (one,) = found[0]
    assert isinstance(one, Line)
    assert one.gbps == pytest.approx(250, rel=2 * noise)


def test_a_bend_is_found_where_it_is_and_both_lines_are_right() -> None:
    small, large = line(SIZES[:6], 10, 20, noise=0.002), line(SIZES[6:], 60, 300, noise=0.002)
    before, after = regimes([*small, *large])
    assert isinstance(before, Line)
    assert isinstance(after, Line)
    assert (before.sizes, after.sizes) == (tuple(SIZES[:6]), tuple(SIZES[6:]))
    assert before.gbps == pytest.approx(20, rel=0.02)
    assert [after.alpha_us, after.gbps] == pytest.approx([60, 300], rel=0.02)


def test_what_nccl_says_decides_over_what_the_points_look_like() -> None:
    points = [*line(SIZES[:4], 20, 250, "Ring/LL"), *line(SIZES[4:6], 20, 250, "Tree/LL128")]
    first, second = regimes([*points, *line(SIZES[6:], 20, 250, "Ring/Simple")])[:2]
    assert isinstance(first, Line)
    assert first.regime == "Ring/LL"
    assert second == TooFew("Tree/LL128", tuple(SIZES[4:6]))


@pytest.mark.parametrize("count", [1, 2])
def test_two_sizes_are_no_line(count: int) -> None:
    assert regimes(line(SIZES[:count], 20, 250)) == (TooFew("", tuple(SIZES[:count])),)


def test_what_the_sizes_do_not_show_is_unknown() -> None:
    (large,) = regimes([(2.0**30, 4000, ""), (2.0**31, 8100, ""), (2.0**32, 16400, "")])
    assert isinstance(large, Line)
    assert large.alpha_us is None
    (flat,) = regimes([(1024.0, 20, ""), (2048.0, 20, ""), (4096.0, 19, "")])
    assert isinstance(flat, Line)
    assert flat.gbps is None
