"""The GPU and CPU dashboards of each phase: small charts of one time axis, with the checks that ran meanwhile."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seatrial.model import Trial
from seatrial.model.telemetry import GAUGES, THROTTLED, Dashboard, Gauge, Load, Span, Telemetry
from seatrial.report.charts import Axis, Chart, Curve, Frame, drawable, linear, step
from seatrial.report.formatting import format_range, natural_key
from seatrial.report.text import plural
from seatrial.report.view import CheckView

# Twice the size of its print at a phone's width: whole numbers are then exact to half a pixel.
FRAME = Frame(width=660, height=240, left=84, right=14, top=30, bottom=36, font=21, digits=0)
LEAST_NUMBERED = 20.0  # units of width of a check, to print its number over it
# A line is broken where nothing was read for so long: less is what PCIe is asked in turn, or a sample that came late.
GAP_STEPS, GAP_S = 3, 10.0
LEAST_S = 0.1  # of an axis
_GIB = 2.0**30
_TITLES = {"gpu": "GPU dashboard", "host": "CPU dashboard"}
_DEVICES = {"gpu": "GPU", "host": "node"}


@dataclass(frozen=True)
class Shade:
    """Where a check ran, in pixels. ``number`` is empty where there is no room to print it."""

    x: float
    width: float
    number: str
    title: str


@dataclass(frozen=True)
class DashboardView:
    """All panels of one kind in one phase."""

    title: str
    extent: str
    spans: tuple[Span, ...]
    shades: tuple[Shade, ...]
    panels: tuple[Chart, ...]
    cuts: tuple[float, ...]  # in pixels
    legend: tuple[Curve, ...]  # of the devices, or of the median of many: the same in all panels; empty for one
    all: str  # what the band is; empty without one
    loads: tuple[Load, ...]
    not_looked_at: str  # checks while which some GPUs were not


def dashboards(telemetry: Telemetry | None, phase: str, checks: Sequence[str]) -> list[DashboardView]:
    """The dashboards of a phase, GPUs first; a phase in which nothing was read twice has none."""
    if telemetry is None:
        return []
    loads = tuple(load for load in telemetry.loads if load.check in checks)
    counts = telemetry.unsampled_gpus
    unseen = ", ".join(f"{check} ({plural(counts[check], 'GPU')})" for check in checks if check in counts)
    found = sorted((one for one in telemetry.dashboards if one.phase == phase), key=lambda one: one.kind)
    drawn = [_board(one, *((loads, unseen) if one.kind == "gpu" else ((), ""))) for one in found]
    return [board for board in drawn if board.panels]


def missing_dashboards(trial: Trial, phase: str, checks: Sequence[CheckView]) -> str:
    """Why a phase that was sampled lacks a dashboard; empty where it has all, or none of its checks was sampled."""
    jobs = [job for job in trial.jobs if job.telemetry_hz]
    sampled = {name for job in jobs for name in job.checks}
    ran = [one for one in checks if one.name in sampled and any(not m.skipped and m.seconds for m in one.measurements)]
    if not trial.telemetry or not ran:
        return ""
    has = {board.title for board in dashboards(trial.telemetry, phase, [])}
    kinds = ("gpu", "host") if any(job.device == "cuda" for job in jobs) else ("host",)
    missing = " and no ".join(_TITLES[kind] for kind in kinds if _TITLES[kind] not in has)
    seconds = sum(one.seconds for one in ran)
    return missing and f"No {missing}: in the {seconds:.1f} s of its checks no gauge was read twice."


def _board(one: Dashboard, loads: tuple[Load, ...], unseen: str) -> DashboardView:
    x = _time_axis(_end(one))
    many = any(track.role != "device" for track in one.tracks)
    devices = {track.label for track in one.tracks if track.role == "device" and track.gauge != THROTTLED}
    labels = ["median"] if many else sorted(devices, key=natural_key)
    styles = {label: n % 8 for n, label in enumerate(labels)}
    extent = f"{plural(one.devices, _DEVICES[one.kind])}, {one.seconds:.0f} s, a point each {one.step_s:.3g} s"
    return DashboardView(
        title=_TITLES[one.kind],
        extent=extent,
        spans=one.spans,
        shades=tuple(_shade(number, each, x) for number, each in enumerate(one.spans, 1)),
        panels=tuple(_panel(gauge, one, x, styles) for gauge in _drawn(one)),
        cuts=tuple(x.at(drawable(at)) for at in one.cuts),
        legend=tuple(Curve(label, n) for label, n in styles.items()) if many or len(styles) > 1 else (),
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
    axis = Axis(0.0, seconds, *FRAME.across).with_ticks((n * size for n in range(int(seconds / size) + 1)), "s")
    *ticks, (place, label) = axis.ticks
    return replace(axis, ticks=(*ticks, (place, f"{label} s")))


def _drawn(one: Dashboard) -> Iterator[Gauge]:
    """Gauges with at least two values of a device; what throttled GPUs, where anything did."""
    read = {track.gauge for track in one.tracks if sum(value is not None for value in track.values) > 1}
    yield from (gauge for gauge in GAUGES[one.kind] if gauge.name in read)
    if THROTTLED in read:
        yield Gauge(THROTTLED, "GPUs", "Throttled at their last look")


def _panel(gauge: Gauge, one: Dashboard, x: Axis, styles: dict[str, int]) -> Chart:
    scale, unit = (_GIB, "GiB") if gauge.unit == "B" else (1.0, gauge.unit)
    tracks = [
        (track, [None if value is None else drawable(value) / scale for value in track.values])
        for track in one.tracks
        if track.gauge == gauge.name
    ]
    known = [value for _, values in tracks for value in values if value is not None]
    y = linear([0.0, 100.0] if unit == "%" else [0.0, *known], unit, *FRAME.upwards)
    shown = [(track, values) for track, values in tracks if track.role in ("device", "median")]
    new = [track.label for track, _ in shown if track.label not in styles]
    styles = styles | {label: n % 8 for n, label in enumerate(new, len(shown) - len(new))}

    def placed(values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
        return [[(x.at(at), y.at(value)) for at, value in stretch] for stretch in _stretches(values, one)]

    def path(values: Sequence[float | None]) -> str:
        """Through the middle of each step; a value by itself is a short stroke."""
        return "".join(FRAME.path(points) + ("" if len(points) > 1 else "h2") for points in placed(values))

    curves = tuple(Curve(track.label, styles[track.label], path(values)) for track, values in shown)
    ends = {track.role: placed(values) for track, values in tracks if track.role in ("min", "max")}
    areas = zip(ends.get("min", ()), ends.get("max", ()), strict=False)
    return Chart(
        frame=FRAME,
        title=gauge.title,
        x=x,
        y=y,
        x_label="",
        y_label=unit,
        curves=curves,
        band="".join(FRAME.area(low, high) for low, high in areas),
        legend=tuple(curve for curve in curves if curve.label in new),
        range=format_range(known, unit),
    )


def _shade(number: int, each: Span, x: Axis) -> Shade:
    begin, end = (min(max(x.at(drawable(at)), x.start), x.end) for at in (each.begin, each.end))
    words = f"{number} {each.check}: {each.begin:.1f} to {each.end:.1f} s"
    return Shade(begin, round(end - begin, 1), str(number) if end - begin >= LEAST_NUMBERED else "", words)


def _stretches(values: Sequence[float | None], one: Dashboard) -> Iterator[list[tuple[float, float]]]:
    """The values with their times, apart where the time was cut, and where nothing was read for too long."""
    stretch: list[tuple[float, float]] = []
    longest, end = max(GAP_STEPS * one.step_s, GAP_S), _end(one)
    for number, value in enumerate(values):
        if value is None:
            continue
        at = min((number + 0.5) * one.step_s, end)
        before = stretch[-1][0] if stretch else at
        if at - before > longest or any(before < cut <= at for cut in one.cuts):
            yield stretch
            stretch = []
        stretch.append((at, value))
    if stretch:
        yield stretch
