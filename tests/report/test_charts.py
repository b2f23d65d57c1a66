"""The geometry of charts, as numbers."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.model import Series
from seatrial.report.charts import (
    FRAME,
    MAX_POINTS,
    MAX_TICKS,
    RUG_HEIGHT,
    RUG_WIDTH,
    Chart,
    charts,
    rug,
)
from tests.report.paths import points_of


def series(name: str, x: list[float], y: list[float], subject: str = "cluster", units: str = "step ") -> Series:
    x_unit, _, y_unit = units.partition(" ")
    return Series(name=name, subject=subject, x=tuple(x), y=tuple(y), x_unit=x_unit, y_unit=y_unit)


def only(*given: Series, not_passed: frozenset[str] = frozenset()) -> Chart:
    (chart,) = charts(given, not_passed)
    return chart


def labels(ticks: tuple[tuple[float, str], ...]) -> list[str]:
    return [label for _, label in ticks]


def test_sizes_are_on_a_log_axis_labelled_where_they_were_measured() -> None:
    chart = only(series("busbw", [2**20, 10 * 2**20, 2**30], [60, 230, 350], units="B GB/s"))
    assert labels(chart.x.ticks) == ["1MiB", "10MiB", "1GiB"]
    at = [place for place, _ in chart.x.ticks]
    assert (at[1] - at[0]) / (at[2] - at[0]) == pytest.approx(math.log2(10) / 10, abs=0.001)
    assert labels(chart.y.ticks) == ["0", "100", "200", "300", "400"]
    assert chart.caption == "busbw in GB/s over message size"


def test_many_sizes_are_labelled_at_powers_of_two() -> None:
    chart = only(series("busbw", [2.0**n for n in range(10, 34)], [1.0] * 24, units="B GB/s"))
    assert labels(chart.x.ticks) == ["1KiB", "16KiB", "256KiB", "4MiB", "64MiB", "1GiB"]


def test_long_labels_have_room() -> None:
    chart = only(series("latency", [2**20, 2**33], [24.7, 3_400_711], units="B us"))
    assert labels(chart.y.ticks)[-1] == "10,000,000"
    assert chart.x.start - 8 >= len("10,000,000") * 7  # a digit is as wide at a phone's larger print
    assert points_of(chart.curves[0].path)[0][0] == chart.x.start


def test_a_time_over_sizes_has_a_log_axis_of_decades() -> None:
    chart = only(series("latency", [2**20, 2**33], [24.7, 34_711], units="B us"))
    assert labels(chart.y.ticks) == ["10", "100", "1,000", "10,000", "100,000"]
    assert chart.y_label == "µs"


def test_y_begins_at_zero_but_for_a_loss() -> None:
    assert labels(only(series("speed", [1, 2], [90, 100])).y.ticks)[0] == "0"
    assert labels(only(series("training loss", [1, 2], [2.1, 2.3])).y.ticks) == ["2.1", "2.15", "2.2", "2.25", "2.3"]


def test_subjects_share_a_chart_and_names_of_one_family_too() -> None:
    both = only(series("loss", [1], [1], "n/gpu0"), series("loss", [1], [2], "n/gpu1"))
    assert [(line.label, line.style) for line in both.curves] == [("n/gpu0", 0), ("n/gpu1", 1)]
    family = only(series("loss.ddp", [1], [1]), series("loss.single_process", [1], [2]))
    assert (family.title, [line.label for line in family.curves]) == ("loss", ["ddp", "single_process"])
    mixed = only(series("loss.a", [1], [1], "n1"), series("loss.b", [1], [2], "n2"))
    assert [line.label for line in mixed.curves] == ["a, n1", "b, n2"]


def test_other_units_are_another_chart() -> None:
    assert len(charts([series("a", [1], [1]), series("a", [1], [1], units="s W")], frozenset())) == 2


def test_many_subjects_are_a_band_with_the_median_and_those_in_trouble() -> None:
    every = [series("loss", [1, 2], [number, number], f"n{number}") for number in range(20)]
    chart = only(*every, not_passed=frozenset({"n3", "n19"}))
    assert [line.label for line in chart.curves] == ["median of 20", "n3", "n19"]
    assert chart.band_label == "all 20"
    lowest, highest = chart.y.at(0), chart.y.at(19)
    assert chart.band.endswith("Z")
    left, right = FRAME.across
    assert points_of(chart.band) == [(left, lowest), (right, lowest), (right, highest), (left, highest)]


def test_a_long_curve_is_thinned_and_keeps_its_spike() -> None:
    y = [1.0] * 10_000
    y[5_432] = 99.0
    chart = only(series("loss", [float(step) for step in range(10_000)], y))
    points = points_of(chart.curves[0].path)
    assert len(points) <= MAX_POINTS
    assert min(place for _, place in points) == chart.y.at(99.0)
    assert chart.curves[0].marks == ()


def test_a_path_is_exact_and_a_level_stretch_is_one_stroke() -> None:
    assert FRAME.path([(58.0, 30.5), (60.1, 30.5), (63.0, 30.5), (70.3, 40.0)]) == "M58 30.5l5 0l7.3 9.5"
    assert FRAME.path([(58.0, 30.5)]) == "M58 30.5"


def test_points_tell_their_values() -> None:
    chart = only(series("busbw", [2**20], [63.5], units="B GB/s"))
    assert [note for _, _, note in chart.curves[0].marks] == ["cluster: 1MiB, 63.5 GB/s"]


def test_nothing_to_draw_is_no_chart() -> None:
    assert charts([series("a", [], [])], frozenset()) == []


# Far beyond what anybody measures, and yet no denormals.
number = st.floats(min_value=-1e30, max_value=1e30).map(lambda value: value if abs(value) > 1e-30 else 0.0)


@given(
    st.lists(st.tuples(number, number), min_size=1, max_size=30),
    st.sampled_from(["B us", "B GB/s", "step nats", "s W"]),
)
def test_whatever_the_numbers_the_curve_stays_within_the_frame(points: list[tuple[float, float]], units: str) -> None:
    points = sorted(points)
    chart = only(series("loss", [x for x, _ in points], [y for _, y in points], units=units))
    for x, y in points_of(chart.curves[0].path):
        assert FRAME.across[0] <= x <= FRAME.across[1]
        assert FRAME.upwards[1] <= y <= FRAME.upwards[0]
    for axis in (chart.x, chart.y):
        assert len(axis.ticks) <= 10
        assert all(min(axis.start, axis.end) <= place <= max(axis.start, axis.end) for place, _ in axis.ticks)


def test_a_tight_spread_looks_tight() -> None:
    tight, wide = rug([99, 100, 101], [False] * 3), rug([50, 100, 150], [False] * 3)
    assert tight.passed == "M43.4 4V12M48 4V12M52.6 4V12"
    assert wide.passed == "M2 4V12M48 4V12M94 4V12"


def test_trouble_has_ticks_of_its_own() -> None:
    strip = rug([1, 2, 3], [False, False, True])
    assert (strip.passed.count("M"), strip.not_passed) == (2, "M94 1V15")


def test_many_values_are_a_histogram() -> None:
    strip = rug([float(value) for value in range(MAX_TICKS + 1)], [False] * (MAX_TICKS + 1))
    assert strip.passed.count("v") <= RUG_WIDTH / 3 + 1
    assert "V" not in strip.passed


@given(st.lists(st.tuples(number, st.booleans()), min_size=2, max_size=60))
def test_whatever_the_numbers_the_ticks_stay_on_the_strip(values: list[tuple[float, bool]]) -> None:
    strip = rug([value for value, _ in values], [bad for _, bad in values])
    starts = [move.split("V")[0].split("v")[0].split() for move in (strip.passed + strip.not_passed).split("M")[1:]]
    assert all(0 <= float(x) <= RUG_WIDTH + 3 and 0 <= float(y) <= RUG_HEIGHT for x, y in starts)
