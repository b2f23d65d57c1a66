"""GPU and CPU dashboards of each phase: small charts with a common time axis and the intervals of the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from seatrial.model import Trial
from seatrial.model.telemetry import GAUGES, THROTTLED, Dashboard, Gauge, Load, Span, Telemetry
from seatrial.report.charts import Axis, Chart, Curve, Frame, drawable, linear, step
from seatrial.report.formatting import format_range, natural_key
from seatrial.report.text import plural
from seatrial.report.view import CheckView

# Twice the printed size on a phone: integers are then exact to half a pixel.
FRAME = Frame(width=660, height=240, left=84, right=14, top=30, bottom=36, font=21, digits=0)
MIN_NUMBERED = 20.0  # width of a check from which its number is printed
# A line is interrupted where no sample was read for so long. Shorter gaps are late samples, or gauges read in turn.
GAP_STEPS, GAP_S = 3, 10.0
MIN_S = 0.1  # of an axis
_GIB = 2.0**30
_TITLES = {"gpu": "GPU dashboard", "host": "CPU dashboard"}
_DEVICES = {"gpu": "GPU", "host": "node"}


@dataclass(frozen=True)
class Shade:
    """The interval of a check, in pixels. ``number`` is empty where there is no room for it."""

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
    legend: tuple[Curve, ...]  # devices, or the median of many, for all panels; empty for one device
    all: str  # the label of the band; empty without a band
    loads: tuple[Load, ...]
    not_sampled: str  # checks during which some GPUs were not sampled


def dashboards(telemetry: Telemetry | None, phase: str, checks: Sequence[str]) -> list[DashboardView]:
    """The dashboards of a phase, GPUs first; none for a phase without a gauge that has two samples."""
    if telemetry is None:
        return []
    loads = tuple(load for load in telemetry.loads if load.check in checks)
    counts = telemetry.unsampled_gpus
    not_sampled = ", ".join(f"{check} ({plural(counts[check], 'GPU')})" for check in checks if check in counts)
    in_phase = sorted((board for board in telemetry.dashboards if board.phase == phase), key=lambda board: board.kind)
    views = [_view(board, *((loads, not_sampled) if board.kind == "gpu" else ((), ""))) for board in in_phase]
    return [view for view in views if view.panels]


def missing_dashboards(trial: Trial, phase: str, checks: Sequence[CheckView]) -> str:
    """Why a sampled phase has no dashboard of a kind; empty where it has all, or was not sampled."""
    jobs = [job for job in trial.jobs if job.telemetry_hz]
    sampled = {name for job in jobs for name in job.checks}
    ran = [c for c in checks if c.name in sampled and any(not m.skipped and m.seconds for m in c.measurements)]
    if not trial.telemetry or not ran:
        return ""
    titles = {view.title for view in dashboards(trial.telemetry, phase, [])}
    kinds = ("gpu", "host") if any(job.device == "cuda" for job in jobs) else ("host",)
    missing = " and no ".join(_TITLES[kind] for kind in kinds if _TITLES[kind] not in titles)
    seconds = sum(check.seconds for check in ran)
    return missing and f"No {missing}: fewer than two samples in the {seconds:.1f} s of its checks."


def _view(dashboard: Dashboard, loads: tuple[Load, ...], not_sampled: str) -> DashboardView:
    x = _time_axis(_end(dashboard))
    many = any(track.role != "device" for track in dashboard.tracks)
    devices = {track.label for track in dashboard.tracks if track.role == "device" and track.gauge != THROTTLED}
    labels = ["median"] if many else sorted(devices, key=natural_key)
    styles = {label: n % 8 for n, label in enumerate(labels)}
    devices_text = plural(dashboard.devices, _DEVICES[dashboard.kind])
    extent = f"{devices_text}, {dashboard.seconds:.0f} s, one point per {dashboard.step_s:.3g} s"
    return DashboardView(
        title=_TITLES[dashboard.kind],
        extent=extent,
        spans=dashboard.spans,
        shades=tuple(_shade(number, span, x) for number, span in enumerate(dashboard.spans, 1)),
        panels=tuple(_panel(gauge, dashboard, x, styles) for gauge in _drawn(dashboard)),
        cuts=tuple(x.at(drawable(at)) for at in dashboard.cuts),
        legend=tuple(Curve(label, n) for label, n in styles.items()) if many or len(styles) > 1 else (),
        all=f"all {dashboard.devices}" if many else "",
        loads=loads,
        not_sampled=not_sampled,
    )


def _end(dashboard: Dashboard) -> float:
    """The length of the time axis, in seconds."""
    return max(drawable(dashboard.seconds), MIN_S)


def _time_axis(seconds: float) -> Axis:
    """From zero to the exact end, so that a phase fills its charts."""
    size = step(seconds)
    axis = Axis(0.0, seconds, *FRAME.across).with_ticks((n * size for n in range(int(seconds / size) + 1)), "s")
    *ticks, (position, label) = axis.ticks
    return replace(axis, ticks=(*ticks, (position, f"{label} s")))


def _drawn(dashboard: Dashboard) -> Iterator[Gauge]:
    """Gauges with at least two samples of a device, and throttling where it occurred."""
    read = {track.gauge for track in dashboard.tracks if sum(value is not None for value in track.values) > 1}
    yield from (gauge for gauge in GAUGES[dashboard.kind] if gauge.name in read)
    if THROTTLED in read:
        yield Gauge(THROTTLED, "GPUs", "Throttled at the last sample")


def _panel(gauge: Gauge, dashboard: Dashboard, x: Axis, styles: dict[str, int]) -> Chart:
    scale, unit = (_GIB, "GiB") if gauge.unit == "B" else (1.0, gauge.unit)
    tracks = [
        (track, [None if value is None else drawable(value) / scale for value in track.values])
        for track in dashboard.tracks
        if track.gauge == gauge.name
    ]
    samples = [value for _, values in tracks for value in values if value is not None]
    y = linear([0.0, 100.0] if unit == "%" else [0.0, *samples], unit, *FRAME.upwards)
    shown = [(track, values) for track, values in tracks if track.role in ("device", "median")]
    new = [track.label for track, _ in shown if track.label not in styles]
    styles = styles | {label: n % 8 for n, label in enumerate(new, len(shown) - len(new))}

    def lines(values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
        return [[(x.at(at), y.at(value)) for at, value in points] for points in _segments(values, dashboard)]

    def path(values: Sequence[float | None]) -> str:
        """A line through the middle of each step; a single value is a short stroke."""
        return "".join(FRAME.path(points) + ("" if len(points) > 1 else "h2") for points in lines(values))

    curves = tuple(Curve(track.label, styles[track.label], path(values)) for track, values in shown)
    ends = {track.role: lines(values) for track, values in tracks if track.role in ("min", "max")}
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
        range=format_range(samples, unit),
    )


def _shade(number: int, span: Span, x: Axis) -> Shade:
    begin, end = (min(max(x.at(drawable(at)), x.start), x.end) for at in (span.begin, span.end))
    title = f"{number} {span.check}: {span.begin:.1f} to {span.end:.1f} s"
    return Shade(begin, round(end - begin, 1), str(number) if end - begin >= MIN_NUMBERED else "", title)


def _segments(values: Sequence[float | None], dashboard: Dashboard) -> Iterator[list[tuple[float, float]]]:
    """(time, value) points of each line, split at cuts of the time axis and at long gaps between samples."""
    segment: list[tuple[float, float]] = []
    longest, end = max(GAP_STEPS * dashboard.step_s, GAP_S), _end(dashboard)
    for number, value in enumerate(values):
        if value is None:
            continue
        at = min((number + 0.5) * dashboard.step_s, end)
        before = segment[-1][0] if segment else at
        if at - before > longest or any(before < cut <= at for cut in dashboard.cuts):
            yield segment
            segment = []
        segment.append((at, value))
    if segment:
        yield segment
