"""Axes, curves and distributions of charts, in SVG units."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from seatrial.model import Series
from seatrial.model.telemetry import THROTTLED, Dashboard, Track
from seatrial.report.charts import (
    BAR_HEIGHT,
    BIN_WIDTH,
    BINS,
    BOTTOM,
    LARGEST,
    LEFT,
    MAX_POINTS,
    RIGHT,
    TOP,
    WIDTH,
    Chart,
    charts,
    distribution,
    path,
    telemetry_charts,
)
from seatrial.report.figures import Figure
from tests.report.svg_paths import points_of


def series(name: str, x: list[float], y: list[float], subject: str = "cluster", units: str = "step ") -> Series:
    x_unit, _, y_unit = units.partition(" ")
    return Series(name=name, subject=subject, x=tuple(x), y=tuple(y), x_unit=x_unit, y_unit=y_unit)


def single_chart(*series_list: Series, not_passed: frozenset[str] = frozenset()) -> Chart:
    (chart,) = charts(series_list, not_passed)
    return chart


def labels(ticks: tuple[tuple[float, str], ...]) -> list[str]:
    return [label for _, label in ticks]


def test_a_size_axis_is_logarithmic_with_labels_at_powers_of_two() -> None:
    chart = single_chart(series("busbw", [2.0**n for n in range(10, 34)], [1.0] * 24, units="B GB/s"))
    assert labels(chart.x.ticks) == ["1 KiB", "16 KiB", "256 KiB", "4 MiB", "64 MiB", "1 GiB"]
    chart = single_chart(series("busbw", [2**20, 2**30], [60, 350], units="B GB/s"))
    positions = [position for position, _ in chart.x.ticks]
    assert positions[1] - positions[0] == pytest.approx(positions[2] - positions[1], abs=0.11)
    assert labels(chart.y.ticks) == ["0", "100", "200", "300", "400"]
    assert chart.caption == "busbw in GB/s over message size"


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
    assert points_of(chart.band) == [(LEFT, lowest), (RIGHT, lowest), (RIGHT, highest), (LEFT, highest)]


def test_a_long_curve_is_thinned_and_keeps_spikes() -> None:
    y = [1.0] * 10_000
    y[5_432] = 99.0
    chart = single_chart(series("loss", [float(step) for step in range(10_000)], y))
    points = points_of(chart.curves[0].path)
    assert len(points) <= MAX_POINTS
    assert min(y for _, y in points) == chart.y.position(99.0)
    assert chart.curves[0].marks == ()


def test_a_path_has_relative_moves_and_one_move_for_a_horizontal_part() -> None:
    assert path([(58.0, 30.5), (60.1, 30.5), (63.0, 30.5), (70.3, 40.0)]) == "M58 30.5l5 0l7.3 9.5"
    assert path([(58.0, 30.5), (60.0, math.nan), (63.0, 40.0), (64.0, 41.0)]) == "M58 30.5h2M63 40l1 1"


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
        assert LEFT <= x <= RIGHT
        assert TOP <= y <= BOTTOM
    for axis in (chart.x, chart.y):
        assert len(axis.ticks) <= 10
        assert all(min(axis.start, axis.end) <= position <= max(axis.start, axis.end) for position, _ in axis.ticks)


def test_a_distribution_spans_at_least_ten_percent_around_the_median() -> None:
    assert distribution([99, 100, 101], None, None, "").passed == "M43.5 16v-16M49.5 16v-16M52.5 16v-16"
    assert distribution([50, 100, 150], None, None, "").passed.startswith("M1.5 16")


def test_values_beyond_the_limit_have_separate_bars_and_the_limit_a_line() -> None:
    drawn = distribution([1, 2, 3], 2.5, 2, "<=")
    assert (drawn.passed.count("M"), drawn.not_passed, drawn.limit) == (2, "M94.5 16v-16", "M73.5 0V16")
    assert drawn.expected.startswith("M49.5 ")


@given(st.lists(number, min_size=2, max_size=60), number, number)
def test_the_bars_of_any_values_are_within_the_strip(values: list[float], limit: float, expected: float) -> None:
    drawn = distribution(values, limit, expected, ">=")
    paths = drawn.passed + drawn.not_passed + drawn.limit + drawn.expected
    starts = [move.split("V")[0].split("v")[0].split() for move in paths.split("M")[1:]]
    assert all(0 <= float(x) <= BINS * BIN_WIDTH and 0 <= float(y) <= BAR_HEIGHT for x, y in starts)


def figure(metric: str, limit: float, expected: float | None) -> Figure:
    return Figure(("a.b",), metric, None, "GB/s", "", 1, expected, ">=", limit)


def test_limits_are_marked_at_their_sizes() -> None:
    sizes = [2.0**20, 2.0**30]
    marks = [figure("busbw.1GiB", 90.0, 100.0), figure("busbw.8GiB", 1.0, None), figure("other.1GiB", 1.0, None)]
    (chart,) = charts([series("busbw", sizes, [10.0, 95.0], units="B GB/s")], frozenset(), marks)
    ((x, y),) = chart.limits
    assert (x, y) == (chart.x.position(2.0**30), chart.y.position(90.0))
    assert chart.expected == ((x, chart.y.position(100.0)),)


def board(*tracks: Track, seconds: float = 10, step_s: float = 1, **other_fields: object) -> list[Chart]:
    fields = {"phase": "P", "kind": "gpu", "devices": 1, "seconds": seconds, "step_s": step_s, "spans": ()}
    return telemetry_charts(Dashboard.model_validate({**fields, "tracks": tracks, **other_fields}))


def track(values: list[float | None], gauge: str = "power_w", label: str = "n0/gpu0", role: str = "device") -> Track:
    return Track.model_validate({"gauge": gauge, "label": label, "role": role, "values": values})


def test_a_telemetry_curve_is_interrupted_at_long_gaps_and_at_cuts_of_the_time_axis() -> None:
    (chart,) = board(track([1.0, None, None, None, 1.0, 1.0]))
    assert chart.curves[0].path.count("M") == 1
    (chart,) = board(track([1.0, 1.0, *[None] * 11, 1.0, 1.0]))
    assert chart.curves[0].path.count("M") == 2
    (chart,) = board(track([1.0] * 10), cuts=(5.0,))
    assert chart.curves[0].path.count("M") == 2


def test_telemetry_has_a_chart_for_each_gauge_with_two_values() -> None:
    tracks = (
        track([2.0**30, 3.0 * 2**30], "memory_used_bytes"),
        track([1.0, 2.0], "sm_util"),
        track([1.0, None], "temperature_c"),
        track([0.0, 2.0], THROTTLED, "software power cap"),
    )
    util, memory, throttled = board(*tracks)
    assert (memory.y_label, labels(memory.y.ticks)[-1]) == ("GiB", "3")
    assert labels(util.y.ticks)[-1] == "100"
    assert [curve.label for curve in throttled.curves] == ["software power cap"]
    assert memory.caption == "Frame buffer used in GiB over time in s"


@pytest.mark.parametrize("value", [LARGEST * 1e8, -LARGEST * 1e8, 5e-324, -1.0, 0.0])
@pytest.mark.parametrize("seconds", [LARGEST * 1e8, 0.0, 5e-324])
def test_extreme_values_of_a_damaged_record_have_small_coordinates(value: float, seconds: float) -> None:
    (chart,) = board(track([value, 0.0]), seconds=seconds, step_s=abs(seconds) or 1.0)
    for x, y in points_of(chart.curves[0].path):
        assert abs(x) < 10 * WIDTH
        assert abs(y) < 10 * WIDTH
