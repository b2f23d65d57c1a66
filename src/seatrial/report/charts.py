"""Geometry of the report's charts: pure arithmetic from series to coordinates. The template draws them as SVG."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median

from seatrial.model import Series, format_bytes, format_value
from seatrial.report.formatting import family, figure, unit_in_print

WIDTH, HEIGHT = 460.0, 250.0
RIGHT, TOP, BOTTOM = 14.0, 24.0, 40.0  # the frame around the drawing area: room for the labels of the axes
LEAST_LEFT, LEFT_OF_TICK, DIGIT = 58.0, 12.0, 7.8  # on the left as the labels need: a digit at a phone's larger print
MOST_LINES = 8  # more than that no eye tells apart: then the band of all, the median, and those in trouble
MOST_POINTS = 400  # about one for each unit of width
# Beyond these, differences and steps of an axis would leave the range of a float. No figure of a machine comes near.
LARGEST, SMALLEST = 1e300, 1e-300


@dataclass(frozen=True)
class Axis:
    """Values ``low`` to ``high`` onto pixels ``start`` to ``end``, with labelled ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...]  # pixel, label
    log: bool = False

    def at(self, value: float) -> float:
        low, high = (math.log2(self.low), math.log2(self.high)) if self.log else (self.low, self.high)
        share = ((math.log2(value) if self.log else value) - low) / ((high - low) or 1.0)
        return round(self.start + share * (self.end - self.start), 1)


@dataclass(frozen=True)
class Line:
    """One curve: its points in pixels, and what to write into the legend. ``style`` numbers colour and dashes."""

    label: str
    style: int
    points: tuple[tuple[float, float], ...]
    notes: tuple[str, ...] = ()  # a word on each point, shown on hovering; none for long curves

    @property
    def path(self) -> str:
        return " ".join(f"{x:g},{y:g}" for x, y in self.points)


@dataclass(frozen=True)
class Chart:
    """What the template draws: axes, curves, and for many subjects a band around them."""

    title: str
    x: Axis
    y: Axis
    x_label: str
    y_label: str
    lines: tuple[Line, ...]
    band: str  # the outline of the band, as points of a polygon
    band_label: str

    @property
    def caption(self) -> str:
        """What stands over what: ``busbw in GB/s over message size``."""
        unit = f" in {self.y_label}" if self.y_label else ""
        return f"{self.title}{unit} over {self.x_label or 'x'}"


def charts(series: Sequence[Series], troubled: frozenset[str]) -> list[Chart]:
    """One chart for every family of names, so that ``loss.together`` and ``loss.alone`` lie over each other.

    ``troubled`` subjects stand out where there are many curves.
    """
    families: dict[tuple[str, str, str], list[Series]] = {}
    for one in map(_tame, series):
        if one.x and one.y:
            families.setdefault((family(one.name), one.x_unit, one.y_unit), []).append(one)
    return [_chart(group, troubled) for group in families.values()]


def _tame(series: Series) -> Series:
    return series.model_copy(update={"x": tuple(map(drawable, series.x)), "y": tuple(map(drawable, series.y))})


def drawable(value: float) -> float:
    """The nearest value that axes can be made of."""
    return 0.0 if abs(value) < SMALLEST else min(max(value, -LARGEST), LARGEST)


def _chart(group: list[Series], troubled: frozenset[str]) -> Chart:
    first = group[0]
    xs = sorted({x for one in group for x in one.x})
    ys = [y for one in group for y in one.y]
    log = first.x_unit == "B" and xs[0] > 0
    y = _y_axis(first, ys, log)
    left = max(LEAST_LEFT, LEFT_OF_TICK + DIGIT * max(len(label) for _, label in y.ticks))
    x = (_sizes if log else linear)(xs, first.x_unit, left, WIDTH - RIGHT)
    few = len(group) <= MOST_LINES
    chosen = group if few else [one for one in group if one.subject in troubled][: MOST_LINES - 2]
    labels = _labels(group)
    lines = tuple(_line(one, labels(one), x, y, number) for number, one in enumerate(chosen, 0 if few else 1))
    return Chart(
        title=family(first.name) if len({one.name for one in group}) > 1 else first.name,
        x=x,
        y=y,
        x_label="message size" if first.x_unit == "B" else unit_in_print(first.x_unit),
        y_label=unit_in_print(first.y_unit),
        lines=lines if few else (_middle(group, x, y), *lines),
        band="" if few else _band(group, x, y),
        band_label="" if few else f"all {len(group)}",
    )


def _y_axis(first: Series, values: list[float], over_sizes: bool) -> Axis:
    """From zero, with two exceptions: a loss, whose zero means nothing, and a time over sizes, which spans decades."""
    if over_sizes and first.y_unit in ("us", "ms", "s") and min(values) > 0:
        return _decades(values, HEIGHT - BOTTOM, TOP)
    return linear(values if "loss" in first.name.lower() else [*values, 0.0], first.y_unit, HEIGHT - BOTTOM, TOP)


def _labels(group: list[Series]) -> Callable[[Series], str]:
    """What tells the curves of a chart apart: their subject, the rest of their name, or both."""
    if len({one.name for one in group}) == 1:
        return lambda one: one.subject
    if len({one.subject for one in group}) == 1:
        return lambda one: one.name.partition(".")[2] or one.name
    return lambda one: f"{one.name.partition('.')[2] or one.name}, {one.subject}"


def _line(series: Series, label: str, x: Axis, y: Axis, style: int) -> Line:
    pairs = _thinned(list(zip(series.x, series.y, strict=False)))
    notes = [f"{label}: {tick(a, series.x_unit)}, {figure(b, series.y_unit)}" for a, b in pairs]
    return Line(
        label=label,
        style=style,
        points=tuple((x.at(a), y.at(b)) for a, b in pairs),
        notes=tuple(notes) if len(pairs) <= 40 else (),
    )


def _middle(group: list[Series], x: Axis, y: Axis) -> Line:
    at = _by_x(group)
    points = _thinned([(value, median(at[value])) for value in sorted(at)])
    return Line(f"median of {len(group)}", 0, tuple((x.at(a), y.at(b)) for a, b in points))


def _band(group: list[Series], x: Axis, y: Axis) -> str:
    at = _by_x(group)
    top = _thinned([(value, max(at[value])) for value in sorted(at)])
    bottom = _thinned([(value, min(at[value])) for value in sorted(at)])
    return " ".join(f"{x.at(a):g},{y.at(b):g}" for a, b in (*top, *reversed(bottom)))


def _by_x(group: list[Series]) -> dict[float, list[float]]:
    at: dict[float, list[float]] = {}
    for one in group:
        for x, y in zip(one.x, one.y, strict=False):
            at.setdefault(x, []).append(y)
    return at


def _thinned(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """At most MOST_POINTS of them: of every stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    stride = math.ceil(len(points) / (MOST_POINTS / 2))
    kept = []
    for start in range(0, len(points), stride):
        stretch = points[start : start + stride]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def linear(values: Sequence[float], unit: str, start: float, end: float) -> Axis:
    """An axis over ``values`` with four to nine round ticks, from pixel ``start`` to ``end``."""
    low, high = min(values), max(values)
    if low == high:
        low, high = (0.0, high or 1.0) if high >= 0 else (low, 0.0)
    size = step(high - low)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    axis = Axis(first * size, last * size, start, end, ())
    ticks = tuple((axis.at(n * size), tick(n * size, unit)) for n in range(first, last + 1))
    return Axis(axis.low, axis.high, start, end, ticks)


def _decades(values: Sequence[float], start: float, end: float) -> Axis:
    """A logarithmic axis over whole powers of ten, every so many of them labelled where they are many."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    stride = math.ceil((last - first) / 8)
    axis = Axis(10.0**first, 10.0**last, start, end, (), log=True)
    ticks = tuple((axis.at(10.0**power), tick(10.0**power, "")) for power in range(first, last + 1, stride))
    return Axis(axis.low, axis.high, start, end, ticks, log=True)


def step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are four to nine ticks."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 6), power * 10)


def _sizes(values: Sequence[float], unit: str, start: float, end: float) -> Axis:
    """A log2 axis, labelled at the sizes measured, or at powers of two where these are too many."""
    low, high = values[0], values[-1] if values[-1] > values[0] else values[0] * 2
    axis = Axis(low, high, start, end, (), log=True)
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    marks = (
        values if len(values) <= 6 else [2.0**n for n in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]
    )
    return Axis(low, high, start, end, tuple((axis.at(mark), tick(mark, unit)) for mark in marks), log=True)


def tick(value: float, unit: str) -> str:
    """A value beside an axis, without its unit."""
    if abs(value) >= 1e15:
        return f"{value:.3g}"
    return format_bytes(value) if unit == "B" else format_value(float(f"{value:.10g}"), "")


@dataclass(frozen=True)
class Rug:
    """A strip of ticks, one a subject or sample: how far values lie apart, at a glance. SVG path data."""

    base: str
    calm: str  # values without trouble
    loud: str  # and those with


RUG_WIDTH, RUG_HEIGHT = 96.0, 16.0
MOST_TICKS = 40  # more would run into one bar: then the calm ones become a histogram
BIN = 3.0  # units of width


def rug(values: Sequence[float], troubled: Sequence[bool]) -> Rug:
    """Ticks over ``values``. The strip spans at least 10 % either side of the median: a tight spread looks tight."""
    values = [*map(drawable, values)]
    middle = median(values)
    margin = abs(middle) * 0.1
    low, high = min(*values, middle - margin), max(*values, middle + margin)
    scale = (RUG_WIDTH - 4) / ((high - low) or 1.0)
    places = [(2 + (value - low) * scale, bad) for value, bad in zip(values, troubled, strict=True)]
    calm = [x for x, bad in places if not bad]
    many = len(calm) > MOST_TICKS
    return Rug(
        base=f"M0 {14.5 if many else 8}H{RUG_WIDTH:g}",
        calm=_histogram(calm) if many else _ticks(calm, 4, 12),
        loud=_ticks([x for x, bad in places if bad], 1, 15),
    )


def _ticks(places: Sequence[float], top: float, bottom: float) -> str:
    return "".join(f"M{x:g} {top:g}V{bottom:g}" for x in sorted({round(x, 1) for x in places}))


def _histogram(places: Sequence[float]) -> str:
    counts = Counter(int(x / BIN) for x in places)
    most = max(counts.values())
    return "".join(f"M{(n + 0.5) * BIN:g} 14v{-3 - 10 * count / most:.1f}" for n, count in sorted(counts.items()))
