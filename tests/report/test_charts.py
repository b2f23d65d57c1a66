"""Axes, curves and rug plots of charts, in SVG units."""

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
    Limit,
    charts,
    rug,
)
from tests.report.svg_paths import points_of


def series(name: str, x: list[float], y: list[float], subject: str = "cluster", units: str = "step ") -> Series:
    x_unit, _, y_unit = units.partition(" ")
    return Series(name=name, subject=subject, x=tuple(x), y=tuple(y), x_unit=x_unit, y_unit=y_unit)


def single_chart(*series_list: Series, not_passed: frozenset[str] = frozenset()) -> Chart:
    (chart,) = charts(series_list, not_passed)
    return chart


def labels(ticks: tuple[tuple[float, str], ...]) -> list[str]:
    return [label for _, label in ticks]


def test_a_size_axis_is_logarithmic_with_a_label_at_each_measured_size() -> None:
    chart = single_chart(series("busbw", [2**20, 10 * 2**20, 2**30], [60, 230, 350], units="B GB/s"))
    assert labels(chart.x.ticks) == ["1 MiB", "10 MiB", "1 GiB"]
    positions = [position for position, _ in chart.x.ticks]
    assert (positions[1] - positions[0]) / (positions[2] - positions[0]) == pytest.approx(math.log2(10) / 10, abs=0.001)
    assert labels(chart.y.ticks) == ["0", "100", "200", "300", "400"]
    assert chart.caption == "busbw in GB/s over message size"


def test_the_labels_of_sizes_that_are_close_do_not_overlap() -> None:
    """Each size has a mark; the label of one that is close to its neighbour is omitted."""
    sizes = [2.0**10, 2.0**18, 2.0**20, 2.0**29, 2.0**30]
    ticks = single_chart(series("busbw", sizes, [1, 2, 3, 4, 5], units="B GB/s")).x.ticks
    assert labels(ticks) == ["1 KiB", "256 KiB", "", "", "1 GiB"]
    assert len({position for position, _ in ticks}) == len(sizes)


def test_an_axis_of_many_sizes_has_labels_at_powers_of_two() -> None:
    chart = single_chart(series("busbw", [2.0**n for n in range(10, 34)], [1.0] * 24, units="B GB/s"))
    assert labels(chart.x.ticks) == ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "1 GiB"]


def test_the_left_margin_grows_with_the_labels() -> None:
    chart = single_chart(series("latency", [2**20, 2**33], [24.7, 3_400_711], units="B us"))
    assert labels(chart.y.ticks)[-1] == "10,000,000"
    assert chart.x.start - 8 >= len("10,000,000") * 7  # 7: width of a digit in the larger font of phones
    assert points_of(chart.curves[0].path)[0][0] == chart.x.start


def test_time_over_size_has_a_logarithmic_y_axis() -> None:
    chart = single_chart(series("latency", [2**20, 2**33], [24.7, 34_711], units="B us"))
    assert labels(chart.y.ticks) == ["10", "100", "1,000", "10,000", "100,000"]
    assert chart.y_label == "µs"


def test_the_y_axis_starts_at_zero_except_for_a_loss() -> None:
    assert labels(single_chart(series("speed", [1, 2], [90, 100])).y.ticks)[0] == "0"
    assert labels(single_chart(series("training loss", [1, 2], [2.1, 2.3])).y.ticks) == [
        "2.1",
        "2.15",
        "2.2",
        "2.25",
        "2.3",
    ]


def test_subjects_and_members_of_a_family_share_a_chart() -> None:
    both = single_chart(series("loss", [1], [1], "n/gpu0"), series("loss", [1], [2], "n/gpu1"))
    assert [(line.label, line.style) for line in both.curves] == [("n/gpu0", 0), ("n/gpu1", 1)]
    family = single_chart(series("loss.ddp", [1], [1]), series("loss.single_process", [1], [2]))
    assert (family.title, [line.label for line in family.curves]) == ("loss", ["ddp", "single_process"])
    mixed = single_chart(series("loss.a", [1], [1], "n1"), series("loss.b", [1], [2], "n2"))
    assert [line.label for line in mixed.curves] == ["a, n1", "b, n2"]


def test_series_with_different_units_have_separate_charts() -> None:
    assert len(charts([series("a", [1], [1]), series("a", [1], [1], units="s W")], frozenset())) == 2


def test_many_subjects_are_a_band_with_their_median_and_those_not_passed() -> None:
    curves = [series("loss", [1, 2], [number, number], f"n{number}") for number in range(20)]
    chart = single_chart(*curves, not_passed=frozenset({"n3", "n19"}))
    assert [line.label for line in chart.curves] == ["median of 20", "n3", "n19"]
    assert chart.band_label == "all 20"
    lowest, highest = chart.y.position(0), chart.y.position(19)
    assert chart.band.endswith("Z")
    left, right = FRAME.x_range
    assert points_of(chart.band) == [(left, lowest), (right, lowest), (right, highest), (left, highest)]


def test_a_long_curve_is_thinned_and_keeps_spikes() -> None:
    y = [1.0] * 10_000
    y[5_432] = 99.0
    chart = single_chart(series("loss", [float(step) for step in range(10_000)], y))
    points = points_of(chart.curves[0].path)
    assert len(points) <= MAX_POINTS
    assert min(y for _, y in points) == chart.y.position(99.0)
    assert chart.curves[0].marks == ()


def test_a_path_has_relative_moves_and_one_move_for_a_horizontal_part() -> None:
    assert FRAME.path([(58.0, 30.5), (60.1, 30.5), (63.0, 30.5), (70.3, 40.0)]) == "M58 30.5l5 0l7.3 9.5"
    assert FRAME.path([(58.0, 30.5)]) == "M58 30.5"


def test_marks_show_the_values_of_points() -> None:
    chart = single_chart(series("busbw", [2**20], [63.5], units="B GB/s"))
    assert [note for _, _, note in chart.curves[0].marks] == ["cluster: 1 MiB, 63.5 GB/s"]


def test_an_empty_series_has_no_chart() -> None:
    assert charts([series("a", [], [])], frozenset()) == []


# Far outside the range of measured values, without denormal numbers
number = st.floats(min_value=-1e30, max_value=1e30).map(lambda value: value if abs(value) > 1e-30 else 0.0)


@given(
    st.lists(st.tuples(number, number), min_size=1, max_size=30),
    st.sampled_from(["B us", "B GB/s", "step nats", "s W"]),
)
def test_the_curve_of_any_values_is_within_the_frame(points: list[tuple[float, float]], units: str) -> None:
    points = sorted(points)
    chart = single_chart(series("loss", [x for x, _ in points], [y for _, y in points], units=units))
    for x, y in points_of(chart.curves[0].path):
        assert FRAME.x_range[0] <= x <= FRAME.x_range[1]
        assert FRAME.y_range[1] <= y <= FRAME.y_range[0]
    for axis in (chart.x, chart.y):
        assert len(axis.ticks) <= 10
        assert all(min(axis.start, axis.end) <= position <= max(axis.start, axis.end) for position, _ in axis.ticks)


def test_the_rug_plot_spans_at_least_ten_percent_around_the_median() -> None:
    tight, wide = rug([99, 100, 101], None, None, ""), rug([50, 100, 150], None, None, "")
    assert tight.passed == "M43.4 4V12M48 4V12M52.6 4V12"
    assert wide.passed == "M2 4V12M48 4V12M94 4V12"


def test_values_beyond_the_limit_have_separate_ticks_and_the_limit_a_line() -> None:
    strip = rug([1, 2, 3], 2.5, 2, "<=")
    assert (strip.passed.count("M"), strip.not_passed, strip.limit) == (2, "M94 1V15", "M71 0V16")
    assert strip.expected.startswith("M48 ")


def test_many_passed_values_are_a_histogram() -> None:
    strip = rug([float(value) for value in range(MAX_TICKS + 1)], None, None, "")
    assert strip.passed.count("v") <= RUG_WIDTH / 3 + 1
    assert "V" not in strip.passed


@given(st.lists(number, min_size=2, max_size=60), number, number)
def test_the_ticks_of_any_values_are_within_the_strip(values: list[float], limit: float, expected: float) -> None:
    strip = rug(values, limit, expected, ">=")
    paths = strip.passed + strip.not_passed + strip.limit + strip.expected
    starts = [move.split("V")[0].split("v")[0].split() for move in paths.split("M")[1:]]
    assert all(0 <= float(x) <= RUG_WIDTH + 3 and 0 <= float(y) <= RUG_HEIGHT for x, y in starts)


def test_limits_are_marked_at_their_sizes() -> None:
    sizes = [2.0**20, 2.0**30]
    marks = [
        Limit("busbw", 2.0**30, 90.0, 100.0),
        Limit("busbw", 2.0**33, 1.0, None),
        Limit("other", 2.0**30, 1.0, None),
    ]
    (chart,) = charts([series("busbw", sizes, [10.0, 95.0], units="B GB/s")], frozenset(), marks)
    ((x, y),) = chart.limits
    assert (x, y) == (chart.x.position(2.0**30), chart.y.position(90.0))
    assert chart.expected == ((x, chart.y.position(100.0)),)
