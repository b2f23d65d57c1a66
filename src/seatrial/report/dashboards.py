"""The GPU and CPU dashboards of each phase: small charts of one time axis, with the checks that ran meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from seatrial.model import Trial
from seatrial.model.telemetry import GAUGES, THROTTLED, Dashboard, Gauge, Load, Span, Telemetry, Track
from seatrial.report.charts import Axis, drawable, linear, step, tick
from seatrial.report.formatting import natural, span
from seatrial.report.text import plural
from seatrial.report.view import CheckView

# Twice the size of its print at a phone's width: whole numbers are then exact to half a pixel.
WIDTH, HEIGHT = 660.0, 240.0
LEFT, RIGHT, TOP, BOTTOM = 84.0, 14.0, 30.0, 36.0
LEAST_NUMBERED = 20.0  # units of width of a check, to print its number over it
# A line is broken where nothing was read for so long: less is what PCIe is asked in turn, or a sample that came late.
GAP_STEPS, GAP_S = 3, 10.0
LEAST_S = 0.1  # of an axis
_GIB = 2.0**30
_TITLES = {"gpu": "GPU dashboard", "host": "CPU dashboard"}
_DEVICES = {"gpu": "GPU", "host": "node"}


@dataclass(frozen=True)
class Curve:
    """A line in pixels, as an SVG path. ``style`` numbers colour and dashes."""

    label: str
    style: int
    path: str


@dataclass(frozen=True)
class Shade:
    """Where a check ran, in pixels. ``number`` is empty where there is no room to print it."""

    x: float
    width: float
    number: str
    title: str


@dataclass(frozen=True)
class Panel:
    """One gauge over the time of a phase."""

    title: str
    unit: str
    range: str
    x: Axis
    y: Axis
    curves: tuple[Curve, ...]
    band: str  # from the least to the greatest of many devices, as an SVG path
    legend: tuple[Curve, ...]  # of curves that this panel alone has


@dataclass(frozen=True)
class Board:
    """All panels of one kind in one phase."""

    title: str
    extent: str
    spans: tuple[Span, ...]
    shades: tuple[Shade, ...]
    panels: tuple[Panel, ...]
    cuts: tuple[float, ...]  # in pixels
    legend: tuple[Curve, ...]  # of the devices, or of the median of many: the same in all panels; empty for one
    all: str  # what the band is; empty without one
    loads: tuple[Load, ...]
    not_looked_at: str  # checks while which some GPUs were not


def boards(telemetry: Telemetry | None, phase: str, checks: Sequence[str]) -> list[Board]:
    """The dashboards of a phase, GPUs first; a phase in which nothing was read twice has none."""
    found = [one for one in telemetry.dashboards if one.phase == phase] if telemetry else []
    loads = tuple(load for load in telemetry.loads if load.check in checks) if telemetry else ()
    unseen = _not_looked_at(telemetry.not_looked_at, checks) if telemetry else ""
    drawn = [
        _board(one, *((loads, unseen) if one.kind == "gpu" else ((), "")))
        for one in sorted(found, key=lambda one: one.kind)
    ]
    return [board for board in drawn if board.panels]


def undrawn(trial: Trial, phase: str, checks: Sequence[CheckView]) -> str:
    """Why a phase that was sampled lacks a dashboard; empty where it has all, or none of its checks was sampled."""
    jobs = [job for job in trial.jobs if job.telemetry_hz]
    sampled = {name for job in jobs for name in job.checks}
    ran = [one for one in checks if one.name in sampled and any(not m.skipped and m.seconds for m in one.measurements)]
    if not trial.telemetry or not ran:
        return ""
    has = {board.title for board in boards(trial.telemetry, phase, [])}
    kinds = ("gpu", "host") if any(job.device == "cuda" for job in jobs) else ("host",)
    missing = " and no ".join(_TITLES[kind] for kind in kinds if _TITLES[kind] not in has)
    seconds = sum(one.seconds for one in ran)
    return missing and f"No {missing}: in the {seconds:.1f} s of its checks no gauge was read twice."


def _not_looked_at(counts: Mapping[str, int], checks: Sequence[str]) -> str:
    """The checks that were too short for a look at each GPU, and for how many."""
    return ", ".join(f"{check} ({plural(counts[check], 'GPU')})" for check in checks if check in counts)


def _board(one: Dashboard, loads: tuple[Load, ...], unseen: str) -> Board:
    x = _time_axis(_end(one))
    many = any(track.role != "device" for track in one.tracks)
    devices = {track.label for track in one.tracks if track.role == "device" and track.gauge != THROTTLED}
    labels = ["median"] if many else sorted(devices, key=natural)
    styles = {label: n % 8 for n, label in enumerate(labels)}
    extent = f"{plural(one.devices, _DEVICES[one.kind])}, {one.seconds:.0f} s, a point each {one.step_s:.3g} s"
    return Board(
        title=_TITLES[one.kind],
        extent=extent,
        spans=one.spans,
        shades=tuple(_shade(number, each, x) for number, each in enumerate(one.spans, 1)),
        panels=tuple(_panel(gauge, one, x, styles) for gauge in _drawn(one)),
        cuts=tuple(x.at(drawable(at)) for at in one.cuts),
        legend=tuple(Curve(label, n, "") for label, n in styles.items()) if many or len(styles) > 1 else (),
        all=f"all {one.devices}" if many else "",
        loads=loads,
        not_looked_at=unseen,
    )


def _end(one: Dashboard) -> float:
    """Seconds that its axis lasts."""
    return max(drawable(one.seconds), LEAST_S)


def _time_axis(seconds: float) -> Axis:
    """From zero to the end, however odd: a phase that fills half of its chart wastes the other half."""
    size = step(seconds)
    axis = Axis(0.0, seconds, LEFT, WIDTH - RIGHT, ())
    marks = [n * size for n in range(int(seconds / size) + 1)]
    return replace(axis, ticks=tuple((axis.at(mark), tick(mark, "s")) for mark in marks))


def _drawn(one: Dashboard) -> Iterator[Gauge]:
    """Gauges with at least two values of a device; what throttled GPUs, where anything did."""
    read = {track.gauge for track in one.tracks if sum(value is not None for value in track.values) > 1}
    yield from (gauge for gauge in GAUGES[one.kind] if gauge.name in read)
    if THROTTLED in read:
        yield Gauge(THROTTLED, "GPUs", "Throttled at their last look")


def _panel(gauge: Gauge, one: Dashboard, x: Axis, styles: dict[str, int]) -> Panel:
    scale, unit = (_GIB, "GiB") if gauge.unit == "B" else (1.0, gauge.unit)
    tracks = [(track, _scaled(track, scale)) for track in one.tracks if track.gauge == gauge.name]
    known = [value for _, values in tracks for value in values if value is not None]
    y = linear([0.0, 100.0] if unit == "%" else [0.0, *known], unit, HEIGHT - BOTTOM, TOP)
    shown = [(track, values) for track, values in tracks if track.role in ("device", "median")]
    own = [track.label for track, _ in shown if track.label not in styles]
    styles = styles | {label: n % 8 for n, label in enumerate(own, len(shown) - len(own))}
    curves = tuple(Curve(track.label, styles[track.label], _path(values, one, x, y)) for track, values in shown)
    ends = {track.role: values for track, values in tracks}
    band = _band(ends["least"], ends["greatest"], one, x, y) if {"least", "greatest"} <= set(ends) else ""
    legend = tuple(curve for curve in curves if curve.label in own)
    return Panel(gauge.title, unit, span(known, unit), x, y, curves, band, legend)


def _scaled(track: Track, scale: float) -> list[float | None]:
    return [None if value is None else drawable(value) / scale for value in track.values]


def _shade(number: int, each: Span, x: Axis) -> Shade:
    begin, end = (min(max(x.at(drawable(at)), x.start), x.end) for at in (each.begin, each.end))
    words = f"{number} {each.check}: {each.begin:.1f} to {each.end:.1f} s"
    return Shade(begin, round(end - begin, 1), str(number) if end - begin >= LEAST_NUMBERED else "", words)


def _path(values: Sequence[float | None], one: Dashboard, x: Axis, y: Axis) -> str:
    """Through the middle of each step; a value by itself is a short stroke."""
    strokes = [[(x.at(at), y.at(value)) for at, value in stretch] for stretch in _stretches(values, one)]
    return "".join(_line(points) if len(points) > 1 else f"{_line(points)}h2" for points in strokes)


def _band(least: Sequence[float | None], greatest: Sequence[float | None], one: Dashboard, x: Axis, y: Axis) -> str:
    outlines = zip(_stretches(least, one), _stretches(greatest, one), strict=False)
    return "".join(
        _line([(x.at(at), y.at(value)) for at, value in [*low, *reversed(high)]]) + "Z" for low, high in outlines
    )


def _stretches(values: Sequence[float | None], one: Dashboard) -> Iterator[list[tuple[float, float]]]:
    """The values with their times, apart where the time was cut, and where nothing was read for too long."""
    stretch: list[tuple[float, float]] = []
    end = _end(one)
    for number, value in enumerate(values):
        if value is None:
            continue
        at = min((number + 0.5) * one.step_s, end)
        if stretch and _apart(stretch[-1][0], at, one):
            yield stretch
            stretch = []
        stretch.append((at, value))
    if stretch:
        yield stretch


def _apart(before: float, after: float, one: Dashboard) -> bool:
    return after - before > max(GAP_STEPS * one.step_s, GAP_S) or any(before < cut <= after for cut in one.cuts)


def _line(points: Sequence[tuple[float, float]]) -> str:
    """An SVG path: the first point, then differences, in whole numbers; a level stretch is one stroke."""
    whole = [(round(x), round(y)) for x, y in points]
    bends = [b for a, b, c in zip(whole, whole[1:], whole[2:], strict=False) if not a[1] == b[1] == c[1]]
    kept = [whole[0], *bends, *whole[-1:]] if len(whole) > 1 else whole
    return f"M{kept[0][0]} {kept[0][1]}" + "".join(f"l{b[0] - a[0]} {b[1] - a[1]}" for a, b in pairwise(kept))
