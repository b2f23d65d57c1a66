"""Geometry of all charts of the report: pure arithmetic from values to coordinates. The template draws them as SVG."""

from __future__ import annotations

import math
import operator
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from statistics import median

from seatrial.model import Series, format_bytes, format_value
from seatrial.model.telemetry import GAUGES, THROTTLED, Dashboard, Gauge
from seatrial.report.figures import Figure
from seatrial.report.formatting import family, natural_key, print_value, size_in_name, unit_text
from seatrial.util.grouping import grouped

WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 460.0, 250.0, 58.0, 446.0, 24.0, 210.0  # SVG units; the last four: axes
# Space for the labels of the y axis, in SVG units: distance from the axis, and width of a digit. The width is that of
# the font on narrow screens, which is larger
TICK_MARGIN, DIGIT_WIDTH = 12.0, 7.8
STYLES = 8  # colours and dash patterns of curves: .s0 to .s7 in style.css
MAX_CURVES = 8  # a chart of more curves shows their band and median, and the curves of subjects that did not pass
MAX_POINTS = 400  # points of a curve: about one per SVG unit of width
MAX_MARKS = 40  # a curve with more points has no marks that show values on hovering
MAX_LABELS = 6  # labels of a logarithmic axis
# Beyond these limits the steps of an axis would exceed the range of a float; measured values are far smaller
LARGEST, SMALLEST = 1e300, 1e-300
# A telemetry curve is interrupted if there is no sample for GAP_STEPS steps and for GAP_S seconds. Shorter gaps are
# late samples, or GPUs that the sampler reads in turn
GAP_STEPS, GAP_S = 3, 10.0
_GIB = 2.0**30

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Axis:
    """Maps the range of values (``low``, ``high``) to the range of positions (``start``, ``end``) in SVG units."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...] = ()  # position, label
    is_log: bool = False

    def position(self, value: float) -> float:
        """The position of ``value`` in SVG units."""
        scale = math.log2 if self.is_log else float
        low, high = scale(self.low), scale(self.high)
        return round(self.start + (scale(value) - low) / ((high - low) or 1.0) * (self.end - self.start), 1)

    def with_ticks(self, values: Iterable[float], unit: str) -> Axis:
        """The same axis with a tick at each value."""
        return replace(self, ticks=tuple((self.position(value), tick_label(value, unit)) for value in values))


@dataclass(frozen=True)
class Curve:
    """A line as an SVG path. ``style``: number of its colour and dash pattern. ``marks``: (x, y, text on hovering)."""

    label: str
    style: int
    path: str
    marks: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True)
class Chart:
    """Axes and curves; with more than MAX_CURVES curves, a band around all of them."""

    title: str
    x: Axis
    y: Axis
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    band: str  # an SVG path; empty without a band
    band_label: str
    limits: tuple[tuple[float, float], ...]  # points
    expected: tuple[tuple[float, float], ...]  # points

    @property
    def caption(self) -> str:
        """The text below the chart: ``busbw in GB/s over message size``."""
        unit = f" in {self.y_label}" if self.y_label else ""
        return f"{self.title}{unit} over {self.x_label or 'x'}"


@dataclass(frozen=True)
class Line:
    """The values of a curve before they are drawn; at a point with a NaN the curve is interrupted."""

    label: str
    points: Points
    is_bad: bool = False


def charts(all_series: Iterable[Series], not_passed: frozenset[str], figures: Sequence[Figure] = ()) -> list[Chart]:
    """One chart per family of names: ``loss.all_ranks`` and ``loss.one_process`` share a chart.

    The limits of ``figures`` are short lines at the sizes in their names. With more than MAX_CURVES curves, a chart has
    their band and median, and curves of ``not_passed`` subjects.
    """
    families = grouped(
        ((family(series.name), series.x_unit, series.y_unit), series) for series in all_series if series.x and series.y
    )
    drawn = []
    for (name, x_unit, y_unit), group in families.items():
        label_of = _label_function(group)
        lines = [
            Line(
                label_of(each),
                [*zip(map(drawable, each.x), map(drawable, each.y), strict=False)],
                each.subject in not_passed,
            )
            for each in group
        ]
        title = name if len({series.name for series in group}) > 1 else group[0].name
        drawn.append(_chart(title, lines, x_unit, y_unit, [each for each in figures if family(each.metric) == name]))
    return drawn


def telemetry_charts(dashboard: Dashboard) -> list[Chart]:
    """One chart for each gauge with a curve of at least two values; x is the time in the phase in seconds."""
    gauges = (*GAUGES[dashboard.kind], Gauge(THROTTLED, "", "Number of GPUs throttled, by reason"))
    drawn = []
    for gauge in gauges:
        scale, unit = (_GIB, "GiB") if gauge.unit == "B" else (1.0, gauge.unit)
        tracks = [track for track in dashboard.tracks if track.gauge == gauge.name]
        lines = [Line(each.label, [*_unbroken(each.values, dashboard, scale)]) for each in tracks]
        if any(len(line.points) > 1 for line in lines):
            ordered = sorted((line for line in lines if line.points), key=lambda line: natural_key(line.label))
            drawn.append(_chart(gauge.title, ordered, "s", unit, ()))
    return drawn


def drawable(value: float) -> float:
    """``value`` limited to the range that axes support."""
    return 0.0 if abs(value) < SMALLEST else min(max(value, -LARGEST), LARGEST)


def _unbroken(values: Sequence[float | None], dashboard: Dashboard, scale: float) -> Iterator[tuple[float, float]]:
    """(time, value) of each step with a value, with a NaN at long gaps and where a pause was cut out."""
    max_gap_s, last = max(GAP_STEPS * dashboard.step_s, GAP_S), math.inf
    for step, value in enumerate(values):
        if value is not None:
            time = drawable((step + 0.5) * dashboard.step_s)
            if time - last > max_gap_s or any(last < cut <= time for cut in dashboard.cuts):
                yield time, math.nan
            yield time, drawable(value) / scale
            last = time


def _chart(title: str, lines: Sequence[Line], x_unit: str, y_unit: str, figures: Sequence[Figure]) -> Chart:
    ys_by_x = grouped((x, y) for line in lines for x, y in line.points if not math.isnan(y))
    xs = sorted(ys_by_x)
    over_sizes = x_unit == "B" and xs[0] > 0
    sizes = [(size, each) for each in figures if (size := size_in_name(each.metric)) in ys_by_x]
    limits = [(size, drawable(each.limit)) for size, each in sizes if each.limit is not None]
    expected = [(size, drawable(each.expected)) for size, each in sizes if each.expected is not None]
    marked = [y for _, y in (*limits, *expected)]
    y_axis = _y_axis(title, y_unit, [y for ys in ys_by_x.values() for y in ys] + marked, over_sizes)
    left = max(LEFT, TICK_MARGIN + DIGIT_WIDTH * max(len(label) for _position, label in y_axis.ticks))
    x_axis = logarithmic(xs, 2, x_unit, left, RIGHT) if over_sizes else linear(xs, x_unit, left, RIGHT)

    def to_svg(points: Iterable[tuple[float, float]]) -> Points:
        return [(x_axis.position(x), y if math.isnan(y) else y_axis.position(y)) for x, y in points]

    def combined(combine: Callable[[list[float]], float]) -> Points:
        return to_svg(_thin([(x, combine(ys_by_x[x])) for x in xs]))

    def curve(line: Line, style: int) -> Curve:
        shown = _thin(line.points)
        texts = [f"{line.label}: {tick_label(x, x_unit)}, {print_value(y, y_unit)}" for x, y in shown]
        points = to_svg(shown)
        marks = [(x, y, text) for (x, y), text in zip(points, texts, strict=True) if not math.isnan(y)]
        return Curve(line.label, style % STYLES, path(points), tuple(marks) if len(marks) <= MAX_MARKS else ())

    has_band = len(lines) > MAX_CURVES
    drawn = [line for line in lines if line.is_bad][: MAX_CURVES - 2] if has_band else lines
    median_curve = [Curve(f"median of {len(lines)}", 0, path(combined(median)))] if has_band else []
    return Chart(
        title=title,
        x=x_axis,
        y=y_axis,
        x_label={"B": "message size", "s": "time in s"}.get(x_unit) or unit_text(x_unit),
        y_label=unit_text(y_unit),
        curves=(*median_curve, *(curve(line, style) for style, line in enumerate(drawn, len(median_curve)))),
        band=path([*combined(min), *reversed(combined(max))]) + "Z" if has_band else "",
        band_label=f"all {len(lines)}" if has_band else "",
        limits=tuple(to_svg(limits)),
        expected=tuple(to_svg(expected)),
    )


def _y_axis(title: str, unit: str, values: list[float], over_sizes: bool) -> Axis:
    """A logarithmic axis for durations by message size, else a linear axis; it includes zero except for a loss."""
    if over_sizes and unit in ("us", "ms", "s") and min(values) > 0:
        return logarithmic(values, 10, "", BOTTOM, TOP)
    ends = [] if "loss" in title.lower() else [0.0, 100.0] if unit == "%" and max(values) <= 100 else [0.0]
    return linear([*values, *ends], unit, BOTTOM, TOP)


def _label_function(group: list[Series]) -> Callable[[Series], str]:
    """A function that labels a curve by its subject, by its name without the family, or by both.

    The name or the subject is omitted if all curves share it.
    """
    if len({series.name for series in group}) == 1:
        return lambda series: series.subject
    if len({series.subject for series in group}) == 1:
        return lambda series: series.name.partition(".")[2] or series.name
    return lambda series: f"{series.name.partition('.')[2] or series.name}, {series.subject}"


def path(points: Points) -> str:
    """An SVG path: the first point, then relative moves; a horizontal part is one move, and a NaN an interruption."""
    text, start = "", 0
    for end in [n for n, (_, y) in enumerate(points) if math.isnan(y)] + [len(points)]:
        part = points[start:end]
        middle = [
            point
            for before, point, after in zip(part, part[1:], part[2:], strict=False)
            if not before[1] == point[1] == after[1]
        ]
        bends = [*part[:1], *middle, *part[1:][-1:]]
        text += "".join(f"M{x:g} {y:g}" + ("" if len(bends) > 1 else "h2") for x, y in bends[:1])
        text += "".join(f"l{round(x2 - x1, 1):g} {round(y2 - y1, 1):g}" for (x1, y1), (x2, y2) in pairwise(bends))
        start = end + 1
    return text


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


def logarithmic(values: Sequence[float], base: int, unit: str, start: float, end: float) -> Axis:
    """A logarithmic axis over whole powers of ``base``, at most MAX_LABELS of them with a label."""
    low, high = math.floor(math.log(min(values), base) + 1e-9), math.ceil(math.log(max(values), base) - 1e-9)
    high = max(high, low + 1)
    ticks = (float(base) ** power for power in range(low, high + 1, math.ceil((high - low + 1) / MAX_LABELS)))
    return Axis(float(base) ** low, float(base) ** high, start, end, is_log=True).with_ticks(ticks, unit)


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
class Distribution:
    """A histogram of values as SVG path data, with the limit and the expected value as vertical lines."""

    passed: str
    not_passed: str
    limit: str
    expected: str


BINS, BIN_WIDTH, BAR_HEIGHT = 32, 3.0, 16.0  # width and height in SVG units


def distribution(values: Sequence[float], limit: float | None, expected: float | None, op: str) -> Distribution:
    """The distribution of ``values``, on an axis that includes the limit and spans at least 10 % around the median.

    Values that do not meet ``op limit`` are drawn as not passed.
    """
    values = [*map(drawable, values)]
    middle = median(values)
    margin = abs(middle) * 0.1
    others = [drawable(value) for value in (limit, expected) if value is not None]
    low, high = min(*values, *others, middle - margin), max(*values, *others, middle + margin)

    def position(value: float) -> int:
        """The number of the bin of ``value``."""
        return min(int((drawable(value) - low) / ((high - low) or 1.0) * BINS), BINS - 1)

    is_met = {">": operator.ge, ">=": operator.ge, "<": operator.le, "<=": operator.le}.get(op, operator.eq)
    bad = Counter(position(value) for value in values if limit is not None and not is_met(value, limit))
    good = Counter(map(position, values)) - bad
    highest = max((*bad.values(), *good.values()))

    def bars(counts: Counter[int]) -> str:
        """One bar per bin: 4 to 16 SVG units high, in proportion to the number of values."""
        heights = {n: 4 + (BAR_HEIGHT - 4) * count / highest for n, count in sorted(counts.items())}
        return "".join(f"M{(n + 0.5) * BIN_WIDTH:g} {BAR_HEIGHT:g}v-{height:.3g}" for n, height in heights.items())

    def line(value: float | None) -> str:
        return "" if value is None else f"M{(position(value) + 0.5) * BIN_WIDTH:g} 0V{BAR_HEIGHT:g}"

    return Distribution(bars(good), bars(bad), line(limit), line(expected))
