"""Geometry of all charts of the report: pure arithmetic from values to coordinates. The template draws them as SVG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from seatrial.model import Series, format_bytes, format_value
from seatrial.report.formatting import family, print_value, unit_text

# Space for the labels of the y axis, in SVG units: distance from the axis, and width of a digit. The width is that of
# the font on narrow screens, which is larger
TICK_MARGIN, DIGIT_WIDTH = 12.0, 7.8
CHARACTER_WIDTH = 7.0  # mean width of the characters of a label such as "256 KiB", with the font of narrow screens
STYLES = 8  # colours and dash patterns of curves: .s0 to .s7 in style.css
MAX_CURVES = 8  # a chart of more curves shows their band and median, and the curves of subjects that did not pass
MAX_POINTS = 400  # points of a curve: about one per SVG unit of width
MAX_MARKS = 40  # a curve with more points has no marks that show values on hovering
# Beyond these limits the steps of an axis would exceed the range of a float; measured values are far smaller
LARGEST, SMALLEST = 1e300, 1e-300

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """The size of a chart in SVG units, its margins, font size, and decimals of a path."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    font: float
    decimals: int

    @property
    def x_range(self) -> tuple[float, float]:
        """Start and end of the x axis."""
        return self.left, self.width - self.right

    @property
    def y_range(self) -> tuple[float, float]:
        """Start and end of the y axis."""
        return self.height - self.bottom, self.top

    def path(self, points: Points) -> str:
        """An SVG path: the first point, then relative moves; a horizontal part is one move."""
        rounded = [(round(x, self.decimals), round(y, self.decimals)) for x, y in points]
        bends = [
            point
            for before, point, after in zip(rounded, rounded[1:], rounded[2:], strict=False)
            if not before[1] == point[1] == after[1]
        ]
        points = [rounded[0], *bends, *rounded[-1:]] if len(rounded) > 1 else rounded
        moves = (f"l{round(x2 - x1, 1):g} {round(y2 - y1, 1):g}" for (x1, y1), (x2, y2) in pairwise(points))
        return f"M{points[0][0]:g} {points[0][1]:g}" + "".join(moves)

    def area(self, low: Points, high: Points) -> str:
        """An SVG path around the area between two curves."""
        return self.path([*low, *reversed(high)]) + "Z"


FRAME = Frame(width=460, height=250, left=58, right=14, top=24, bottom=40, font=11.5, decimals=1)


@dataclass(frozen=True)
class Axis:
    """Maps the range of values (``low``, ``high``) to the range of positions (``start``, ``end``) in SVG units."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...] = ()  # position, label
    log: bool = False

    def position(self, value: float) -> float:
        """The position of ``value`` in SVG units."""
        low, high = (math.log2(self.low), math.log2(self.high)) if self.log else (self.low, self.high)
        fraction = ((math.log2(value) if self.log else value) - low) / ((high - low) or 1.0)
        return round(self.start + fraction * (self.end - self.start), 1)

    def with_ticks(self, values: Iterable[float], unit: str) -> Axis:
        """The same axis with a tick at each value."""
        return replace(self, ticks=tuple((self.position(value), tick_label(value, unit)) for value in values))


@dataclass(frozen=True)
class Curve:
    """A line as an SVG path. ``style``: number of its colour and dash pattern. ``marks``: (x, y, text on hovering)."""

    label: str
    style: int
    path: str = ""
    marks: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True)
class Chart:
    """Axes and curves; with more than MAX_CURVES curves, a band around all of them."""

    frame: Frame
    title: str
    x: Axis
    y: Axis
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    band: str = ""  # an SVG path
    band_label: str = ""
    legend: tuple[Curve, ...] = ()
    range_text: str = ""  # minimum and maximum of the values
    limits: tuple[tuple[float, float], ...] = ()  # points
    expected: tuple[tuple[float, float], ...] = ()  # points

    @property
    def caption(self) -> str:
        """The text below the chart: ``busbw in GB/s over message size``."""
        unit = f" in {self.y_label}" if self.y_label else ""
        return f"{self.title}{unit} over {self.x_label or 'x'}"


@dataclass(frozen=True)
class Limit:
    """The limit and the expected value of a family of metrics at one size."""

    family: str
    size: float
    limit: float
    expected: float | None


def charts(all_series: Iterable[Series], not_passed: frozenset[str], limits: Sequence[Limit] = ()) -> list[Chart]:
    """One chart per family of names: ``loss.all_ranks`` and ``loss.one_process`` share a chart.

    ``limits`` are short lines at their sizes. With more than MAX_CURVES curves, a chart has their band and median, and
    curves of ``not_passed`` subjects.
    """
    families: dict[tuple[str, str, str], list[Series]] = {}
    for series in all_series:
        if series.x and series.y:
            values = {"x": tuple(map(drawable, series.x)), "y": tuple(map(drawable, series.y))}
            key = (family(series.name), series.x_unit, series.y_unit)
            families.setdefault(key, []).append(series.model_copy(update=values))
    return [
        _chart(group, not_passed, [limit for limit in limits if limit.family == name])
        for (name, _x_unit, _y_unit), group in families.items()
    ]


def drawable(value: float) -> float:
    """``value`` limited to the range that axes support."""
    return 0.0 if abs(value) < SMALLEST else min(max(value, -LARGEST), LARGEST)


def _chart(group: list[Series], not_passed: frozenset[str], limits: Sequence[Limit]) -> Chart:
    """The chart of ``group``, the series of one family with the same units."""
    first = group[0]
    ys_by_x: dict[float, list[float]] = {}
    for series in group:
        for x, y in zip(series.x, series.y, strict=False):
            ys_by_x.setdefault(x, []).append(y)
    xs = sorted(ys_by_x)
    over_sizes = first.x_unit == "B" and xs[0] > 0
    limits = [limit for limit in limits if limit.size in ys_by_x]
    marked = [drawable(y) for each in limits for y in (each.limit, each.expected) if y is not None]
    y_axis = _y_axis(first, [y for ys in ys_by_x.values() for y in ys] + marked, over_sizes)
    tick_digits = max(len(label) for _position, label in y_axis.ticks)
    frame = replace(FRAME, left=max(FRAME.left, TICK_MARGIN + DIGIT_WIDTH * tick_digits))
    x_axis = (_size_axis if over_sizes else linear)(xs, first.x_unit, *frame.x_range)
    label_of = _label_function(group)

    def to_svg(points: Points) -> Points:
        return [(x_axis.position(x), y_axis.position(y)) for x, y in points]

    def combined(combine: Callable[[list[float]], float]) -> Points:
        return to_svg(_thin([(x, combine(ys_by_x[x])) for x in xs]))

    def curve(series: Series, style: int) -> Curve:
        pairs = _thin(list(zip(series.x, series.y, strict=False)))
        points, label = to_svg(pairs), label_of(series)
        notes = [f"{label}: {tick_label(x, series.x_unit)}, {print_value(y, series.y_unit)}" for x, y in pairs]
        marks = [(*point, note) for point, note in zip(points, notes, strict=True)] if len(pairs) <= MAX_MARKS else []
        return Curve(label, style, frame.path(points), tuple(marks))

    chart = Chart(
        frame=frame,
        title=family(first.name) if len({series.name for series in group}) > 1 else first.name,
        x=x_axis,
        y=y_axis,
        x_label={"B": "message size", "s": "time in s"}.get(first.x_unit) or unit_text(first.x_unit),
        y_label=unit_text(first.y_unit),
        curves=tuple(curve(series, style) for style, series in enumerate(group)) if len(group) <= MAX_CURVES else (),
        limits=tuple(to_svg([(each.size, drawable(each.limit)) for each in limits])),
        expected=tuple(to_svg([(each.size, drawable(each.expected)) for each in limits if each.expected is not None])),
    )
    if chart.curves:
        return chart
    highlighted = [series for series in group if series.subject in not_passed][: MAX_CURVES - 2]
    median_curve = Curve(f"median of {len(group)}", 0, frame.path(combined(median)))
    return replace(
        chart,
        curves=(median_curve, *(curve(series, style) for style, series in enumerate(highlighted, 1))),
        band=frame.area(combined(min), combined(max)),
        band_label=f"all {len(group)}",
    )


def _y_axis(first: Series, values: list[float], over_sizes: bool) -> Axis:
    """A logarithmic axis for durations by message size, else a linear axis; it includes zero except for a loss."""
    if over_sizes and first.y_unit in ("us", "ms", "s") and min(values) > 0:
        return _decade_axis(values, *FRAME.y_range)
    return linear(values if "loss" in first.name.lower() else [*values, 0.0], first.y_unit, *FRAME.y_range)


def _label_function(group: list[Series]) -> Callable[[Series], str]:
    """A function that labels a curve by its subject, by its name without the family, or by both.

    The name or the subject is omitted if all curves share it.
    """
    if len({series.name for series in group}) == 1:
        return lambda series: series.subject
    if len({series.subject for series in group}) == 1:
        return lambda series: series.name.partition(".")[2] or series.name
    return lambda series: f"{series.name.partition('.')[2] or series.name}, {series.subject}"


def _thin(points: Points) -> Points:
    """At most MAX_POINTS points: the minimum and maximum of each interval, so that no spike is lost."""
    if len(points) <= MAX_POINTS:
        return points
    stride = math.ceil(len(points) / (MAX_POINTS / 2))
    extremes: list[tuple[float, float]] = []
    for start in range(0, len(points), stride):
        interval = points[start : start + stride]
        extremes += sorted({min(interval, key=lambda point: point[1]), max(interval, key=lambda point: point[1])})
    return extremes


def linear(values: Sequence[float], unit: str, start: float, end: float) -> Axis:
    """A linear axis over ``values`` with a few ticks at round values, from position ``start`` to ``end``."""
    low, high = min(values), max(values)
    if low == high:
        low, high = (0.0, high or 1.0) if high >= 0 else (low, 0.0)
    distance = tick_distance(high - low)
    low_n, high_n = math.floor(low / distance + 1e-9), math.ceil(high / distance - 1e-9)  # multiples of ``distance``
    ticks = (n * distance for n in range(low_n, high_n + 1))
    return Axis(low_n * distance, high_n * distance, start, end).with_ticks(ticks, unit)


def _decade_axis(values: Sequence[float], start: float, end: float) -> Axis:
    """A logarithmic axis over whole powers of ten with at most nine labels."""
    low_power, high_power = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    high_power = max(high_power, low_power + 1)
    ticks = (10.0**power for power in range(low_power, high_power + 1, math.ceil((high_power - low_power) / 8)))
    return Axis(10.0**low_power, 10.0**high_power, start, end, log=True).with_ticks(ticks, "")


def _size_axis(values: Sequence[float], unit: str, start: float, end: float) -> Axis:
    """A log2 axis with a label at each measured size; with more than six sizes, at powers of two."""
    low, high = values[0], values[-1] if values[-1] > values[0] else values[0] * 2
    low_power, high_power = math.ceil(math.log2(low)), math.floor(math.log2(high))
    step = max(1, math.ceil((high_power - low_power) / 6))
    powers_of_two = [2.0**power for power in range(low_power, high_power + 1, step)]
    axis = Axis(low, high, start, end, log=True).with_ticks(values if len(values) <= 6 else powers_of_two, unit)
    return replace(axis, ticks=_without_overlaps(axis.ticks, end))


def _without_overlaps(ticks: Sequence[tuple[float, str]], end: float) -> tuple[tuple[float, str], ...]:
    """The ticks, without the labels that would overlap a neighbour; the first and the last label stay.

    ``end``: end of the axis, at which the last label ends.
    """
    if len(ticks) < 3:
        return tuple(ticks)
    last_position, last_label = ticks[-1]
    last_position = min(last_position, end - len(last_label) * CHARACTER_WIDTH / 2)
    shown = [ticks[0]]
    for position, label in ticks[1:-1]:
        position_before, label_before = next(tick for tick in reversed(shown) if tick[1])
        overlaps = position - position_before < _label_distance(label_before, label)
        overlaps = overlaps or last_position - position < _label_distance(label, last_label)
        shown.append((position, "" if overlaps else label))
    return (*shown, ticks[-1])


def _label_distance(a: str, b: str) -> float:
    """The minimum distance between the centres of two labels of an x axis, in SVG units."""
    return (len(a) + len(b) + 1) / 2 * CHARACTER_WIDTH


def tick_distance(span: float) -> float:
    """The distance between ticks: 1, 2, 5 or 10 times a power of ten, with at most 6 of them in ``span``."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 6), power * 10)


def tick_label(value: float, unit: str) -> str:
    """The label of a tick: bytes with their unit, other values without."""
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    return format_bytes(value) if unit == "B" else format_value(float(f"{value:.10g}"), "")


@dataclass(frozen=True)
class Rug:
    """The distribution of values: a strip with one tick per value, or a histogram of many, as SVG path data."""

    base: str  # the horizontal line
    passed: str
    not_passed: str
    limit: str
    expected: str


RUG_WIDTH, RUG_HEIGHT = 96.0, 16.0  # SVG units
MAX_TICKS = 40  # with more ticks of passed values, a histogram replaces them
BIN_WIDTH = 3.0  # width of a bin of the histogram in SVG units


def rug(values: Sequence[float], limit: float | None, expected: float | None, op: str) -> Rug:
    """The distribution of ``values``, on an axis that includes the limit and spans at least 10 % around the median.

    Values that do not meet ``op limit`` are drawn as not passed.
    """
    values = [*map(drawable, values)]
    middle = median(values)
    margin = abs(middle) * 0.1
    others = [drawable(value) for value in (limit, expected) if value is not None]
    low, high = min(*values, *others, middle - margin), max(*values, *others, middle + margin)
    scale = (RUG_WIDTH - 4) / ((high - low) or 1.0)

    def position(value: float) -> float:
        return 2 + (drawable(value) - low) * scale

    is_bad = [limit is not None and _violates(value, op, limit) for value in values]
    passed = [position(value) for value, bad in zip(values, is_bad, strict=True) if not bad]
    uses_histogram = len(passed) > MAX_TICKS
    return Rug(
        base=f"M0 {14.5 if uses_histogram else 8}H{RUG_WIDTH:g}",
        passed=_histogram(passed) if uses_histogram else _ticks(passed, 4, 12),
        not_passed=_ticks([position(value) for value, bad in zip(values, is_bad, strict=True) if bad], 1, 15),
        limit="" if limit is None else _ticks([position(limit)], 0, RUG_HEIGHT),
        expected="" if expected is None else _ticks([position(expected)], 0, RUG_HEIGHT),
    )


def _violates(value: float, op: str, limit: float) -> bool:
    return value < limit if op in (">", ">=") else value > limit if op in ("<", "<=") else value != limit


def _ticks(positions: Sequence[float], top: float, bottom: float) -> str:
    return "".join(f"M{x:g} {top:g}V{bottom:g}" for x in sorted({round(x, 1) for x in positions}))


def _histogram(positions: Sequence[float]) -> str:
    """One bar per bin, on a base at y = 14: 3 to 13 SVG units high, in proportion to the number of positions in it."""
    counts = Counter(int(x / BIN_WIDTH) for x in positions)
    highest = max(counts.values())
    return "".join(
        f"M{(n + 0.5) * BIN_WIDTH:g} 14v{-3 - 10 * count / highest:.1f}" for n, count in sorted(counts.items())
    )
