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

LEFT_OF_TICK, DIGIT = 12.0, 7.8  # room for the labels of the y axis: a digit is so wide at a phone's larger print
MOST_LINES = 8  # more than that no eye tells apart: then the band of all, the median, and those in trouble
MOST_POINTS = 400  # about one for each unit of width
MOST_MARKS = 40  # points of a curve that are drawn, and say their value on hovering
# Beyond these, differences and steps of an axis would leave the range of a float. No figure of a machine comes near.
LARGEST, SMALLEST = 1e300, 1e-300

Points = Sequence[tuple[float, float]]


@dataclass(frozen=True)
class Frame:
    """The area of a chart in SVG units, the margins around its curves, its font size, and the decimals of a path."""

    width: float
    height: float
    left: float
    right: float
    top: float
    bottom: float
    font: float
    digits: int

    @property
    def across(self) -> tuple[float, float]:
        """Start and end of the x axis."""
        return self.left, self.width - self.right

    @property
    def upwards(self) -> tuple[float, float]:
        """Start and end of the y axis."""
        return self.height - self.bottom, self.top

    def path(self, points: Points) -> str:
        """An SVG path: the first point, then differences; a level stretch is one stroke."""
        rounded = [(round(x, self.digits), round(y, self.digits)) for x, y in points]
        bends = [b for a, b, c in zip(rounded, rounded[1:], rounded[2:], strict=False) if not a[1] == b[1] == c[1]]
        kept = [rounded[0], *bends, *rounded[-1:]] if len(rounded) > 1 else rounded
        strokes = (f"l{round(b[0] - a[0], 1):g} {round(b[1] - a[1], 1):g}" for a, b in pairwise(kept))
        return f"M{kept[0][0]:g} {kept[0][1]:g}" + "".join(strokes)

    def area(self, low: Points, high: Points) -> str:
        """An SVG path around the area between two curves."""
        return self.path([*low, *reversed(high)]) + "Z"


FRAME = Frame(width=460, height=250, left=58, right=14, top=24, bottom=40, font=11.5, digits=1)


@dataclass(frozen=True)
class Axis:
    """Values ``low`` to ``high`` onto ``start`` to ``end`` in SVG units, with labelled ticks."""

    low: float
    high: float
    start: float
    end: float
    ticks: tuple[tuple[float, str], ...] = ()  # place, label
    log: bool = False

    def at(self, value: float) -> float:
        low, high = (math.log2(self.low), math.log2(self.high)) if self.log else (self.low, self.high)
        share = ((math.log2(value) if self.log else value) - low) / ((high - low) or 1.0)
        return round(self.start + share * (self.end - self.start), 1)

    def with_ticks(self, values: Iterable[float], unit: str) -> Axis:
        """The same axis with a tick at each value."""
        return replace(self, ticks=tuple((self.at(value), tick(value, unit)) for value in values))


@dataclass(frozen=True)
class Curve:
    """A line as an SVG path. ``style`` numbers colour and dashes; ``marks`` are points with the text for hovering."""

    label: str
    style: int
    path: str = ""
    marks: tuple[tuple[float, float, str], ...] = ()


@dataclass(frozen=True)
class Chart:
    """Axes, curves, and for many subjects a band around them."""

    frame: Frame
    title: str
    x: Axis
    y: Axis
    x_label: str
    y_label: str
    curves: tuple[Curve, ...]
    band: str = ""  # as an SVG path
    band_label: str = ""
    legend: tuple[Curve, ...] = ()
    range: str = ""  # least and greatest value

    @property
    def caption(self) -> str:
        """``busbw in GB/s over message size``."""
        unit = f" in {self.y_label}" if self.y_label else ""
        return f"{self.title}{unit} over {self.x_label or 'x'}"


def charts(series: Sequence[Series], troubled: frozenset[str]) -> list[Chart]:
    """One chart for every family of names, so that ``loss.together`` and ``loss.alone`` lie over each other.

    ``troubled`` subjects stand out where there are many curves.
    """
    families: dict[tuple[str, str, str], list[Series]] = {}
    for one in series:
        if one.x and one.y:
            values = {"x": tuple(map(drawable, one.x)), "y": tuple(map(drawable, one.y))}
            families.setdefault((family(one.name), one.x_unit, one.y_unit), []).append(one.model_copy(update=values))
    return [_chart(group, troubled) for group in families.values()]


def drawable(value: float) -> float:
    """The nearest value that axes can be made of."""
    return 0.0 if abs(value) < SMALLEST else min(max(value, -LARGEST), LARGEST)


def _chart(group: list[Series], troubled: frozenset[str]) -> Chart:
    first = group[0]
    at: dict[float, list[float]] = {}
    for one in group:
        for a, b in zip(one.x, one.y, strict=False):
            at.setdefault(a, []).append(b)
    xs, ys = sorted({x for one in group for x in one.x}), [y for one in group for y in one.y]
    over_sizes = first.x_unit == "B" and xs[0] > 0
    y = _y_axis(first, ys, over_sizes)
    frame = replace(FRAME, left=max(FRAME.left, LEFT_OF_TICK + DIGIT * max(len(label) for _, label in y.ticks)))
    x = (_sizes if over_sizes else linear)(xs, first.x_unit, *frame.across)

    def placed(points: Points) -> Points:
        return [(x.at(a), y.at(b)) for a, b in points]

    def of_all(value: Callable[[list[float]], float]) -> Points:
        return placed(_thinned([(a, value(at[a])) for a in sorted(at)]))

    def curve(one: Series, style: int) -> Curve:
        pairs = _thinned(list(zip(one.x, one.y, strict=False)))
        points, label = placed(pairs), labels(one)
        notes = [f"{label}: {tick(a, one.x_unit)}, {print_value(b, one.y_unit)}" for a, b in pairs]
        marks = [(*point, note) for point, note in zip(points, notes, strict=True)] if len(pairs) <= MOST_MARKS else []
        return Curve(label, style, frame.path(points), tuple(marks))

    labels = _labels(group)
    chart = Chart(
        frame=frame,
        title=family(first.name) if len({one.name for one in group}) > 1 else first.name,
        x=x,
        y=y,
        x_label="message size" if first.x_unit == "B" else unit_text(first.x_unit),
        y_label=unit_text(first.y_unit),
        curves=tuple(curve(one, style) for style, one in enumerate(group)) if len(group) <= MOST_LINES else (),
    )
    if chart.curves:
        return chart
    chosen = [one for one in group if one.subject in troubled][: MOST_LINES - 2]
    middle = Curve(f"median of {len(group)}", 0, frame.path(of_all(median)))
    return replace(
        chart,
        curves=(middle, *(curve(one, style) for style, one in enumerate(chosen, 1))),
        band=frame.area(of_all(min), of_all(max)),
        band_label=f"all {len(group)}",
    )


def _y_axis(first: Series, values: list[float], over_sizes: bool) -> Axis:
    """From zero, with two exceptions: a loss, whose zero means nothing, and a time over sizes, which spans decades."""
    if over_sizes and first.y_unit in ("us", "ms", "s") and min(values) > 0:
        return _decades(values, *FRAME.upwards)
    return linear(values if "loss" in first.name.lower() else [*values, 0.0], first.y_unit, *FRAME.upwards)


def _labels(group: list[Series]) -> Callable[[Series], str]:
    """What tells the curves of a chart apart: their subject, the rest of their name, or both."""
    if len({one.name for one in group}) == 1:
        return lambda one: one.subject
    if len({one.subject for one in group}) == 1:
        return lambda one: one.name.partition(".")[2] or one.name
    return lambda one: f"{one.name.partition('.')[2] or one.name}, {one.subject}"


def _thinned(points: Points) -> Points:
    """At most MOST_POINTS of them: of every stretch the lowest and the highest, so that no spike is lost."""
    if len(points) <= MOST_POINTS:
        return points
    stride = math.ceil(len(points) / (MOST_POINTS / 2))
    kept: list[tuple[float, float]] = []
    for start in range(0, len(points), stride):
        stretch = points[start : start + stride]
        kept += sorted({min(stretch, key=lambda point: point[1]), max(stretch, key=lambda point: point[1])})
    return kept


def linear(values: Sequence[float], unit: str, start: float, end: float) -> Axis:
    """An axis over ``values`` with four to nine round ticks, from place ``start`` to ``end``."""
    low, high = min(values), max(values)
    if low == high:
        low, high = (0.0, high or 1.0) if high >= 0 else (low, 0.0)
    size = step(high - low)
    first, last = math.floor(low / size + 1e-9), math.ceil(high / size - 1e-9)
    return Axis(first * size, last * size, start, end).with_ticks((n * size for n in range(first, last + 1)), unit)


def _decades(values: Sequence[float], start: float, end: float) -> Axis:
    """A logarithmic axis over whole powers of ten, every so many of them labelled where they are many."""
    first, last = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    last = max(last, first + 1)
    powers = range(first, last + 1, math.ceil((last - first) / 8))
    return Axis(10.0**first, 10.0**last, start, end, log=True).with_ticks((10.0**power for power in powers), "")


def _sizes(values: Sequence[float], unit: str, start: float, end: float) -> Axis:
    """A log2 axis, labelled at the sizes measured, or at powers of two where these are too many."""
    low, high = values[0], values[-1] if values[-1] > values[0] else values[0] * 2
    first, last = math.ceil(math.log2(low)), math.floor(math.log2(high))
    powers = [2.0**n for n in range(first, last + 1, max(1, math.ceil((last - first) / 6)))]
    return Axis(low, high, start, end, log=True).with_ticks(values if len(values) <= 6 else powers, unit)


def step(span: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are four to nine ticks."""
    power = 10.0 ** math.floor(math.log10(span / 4))
    return next((power * factor for factor in (1, 2, 5) if span / (power * factor) <= 6), power * 10)


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
