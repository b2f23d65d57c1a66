"""GPU and CPU dashboards of each phase: small charts with a common time axis and the intervals of the checks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from statistics import median

from seatrial.model import Trial
from seatrial.model.telemetry import GAUGES, THROTTLED, Dashboard, Gauge, Load, Span, Telemetry
from seatrial.report.charts import STYLES, Axis, Chart, Curve, Frame, drawable, linear, tick_distance
from seatrial.report.formatting import format_range, natural_key
from seatrial.report.view import CheckView
from seatrial.util.text import plural

# Twice the size that a phone displays, so that integer coordinates are exact to half a pixel
FRAME = Frame(width=660, height=240, left=84, right=14, top=30, bottom=36, font=21, decimals=0)
MIN_NUMBERED_WIDTH = 20.0  # a check that is narrower in the chart has no number
# A line is interrupted if there is no sample for GAP_STEPS steps and for GAP_S seconds. Shorter gaps are late samples,
# or GPUs that the sampler reads in turn.
GAP_STEPS, GAP_S = 3, 10.0
MIN_COUNT_AXIS = 4.0  # an axis that counts GPUs ends here or higher, so that its ticks are whole numbers
MIN_STEPS_PER_POINT = 1.5  # a smaller number of steps per point is stated as 1
MIN_AXIS_S = 0.1  # minimum length of the time axis
_GIB = 2.0**30
_TITLES = {"gpu": "GPU dashboard", "host": "CPU dashboard"}
_DEVICES = {"gpu": "GPU", "host": "node"}


@dataclass(frozen=True)
class Shade:
    """The interval of a check, in SVG units. ``number``: number of the check in the phase; empty if it does not fit."""

    x: float
    width: float
    number: str
    title: str


@dataclass(frozen=True)
class DashboardView:
    """All panels of one kind in one phase."""

    title: str
    summary: str  # devices, duration and time step
    spans: tuple[Span, ...]
    shades: tuple[Shade, ...]
    panels: tuple[Chart, ...]
    cuts: tuple[float, ...]  # positions of omitted pauses, in SVG units
    legend: tuple[Curve, ...]  # entries for all panels: the devices, or the median of many; empty for one device
    band_label: str  # empty without a band
    loads: tuple[Load, ...]  # load of each GPU during each check of this phase; empty for hosts
    not_sampled: str  # checks with GPUs that were not sampled, with the number of these GPUs


def dashboards(telemetry: Telemetry | None, phase: str, checks: Sequence[str]) -> list[DashboardView]:
    """The dashboards of a phase, GPUs first; a dashboard is omitted if no curve has two values."""
    if telemetry is None:
        return []
    loads = tuple(load for load in telemetry.loads if load.check in checks)
    counts = telemetry.unsampled_gpus
    not_sampled = ", ".join(f"{check} ({plural(counts[check], 'GPU')})" for check in checks if check in counts)
    dashboards_of_phase = [dashboard for dashboard in telemetry.dashboards if dashboard.phase == phase]
    views = [
        _view(dashboard, loads, not_sampled) if dashboard.kind == "gpu" else _view(dashboard, (), "")
        for dashboard in sorted(dashboards_of_phase, key=lambda dashboard: dashboard.kind)
    ]
    return [view for view in views if view.panels]


def missing_dashboards(trial: Trial, phase: str, checks: Sequence[CheckView]) -> str:
    """Why a sampled phase lacks the GPU or CPU dashboard; empty if none is missing or the phase was not sampled."""
    jobs = [job for job in trial.jobs if job.telemetry_hz]
    sampled = {name for job in jobs for name in job.checks}
    measured = [
        check
        for check in checks
        if check.name in sampled
        and any(measurement.seconds and not measurement.skipped for measurement in check.measurements)
    ]
    if not trial.telemetry or not measured:
        return ""
    titles = {view.title for view in dashboards(trial.telemetry, phase, [])}
    kinds = ("gpu", "host") if any(job.device == "cuda" for job in jobs) else ("host",)
    missing = [_TITLES[kind] for kind in kinds if _TITLES[kind] not in titles]
    if not missing:
        return ""
    seconds = sum(check.seconds for check in measured)
    return f"No {' and no '.join(missing)}: fewer than two samples in the {seconds:.1f} s of its checks."


def _view(dashboard: Dashboard, loads: tuple[Load, ...], not_sampled: str) -> DashboardView:
    x = _time_axis(_axis_seconds(dashboard))
    has_band = any(track.role != "device" for track in dashboard.tracks)
    devices = {track.label for track in dashboard.tracks if track.role == "device" and track.gauge != THROTTLED}
    labels = ["median"] if has_band else sorted(devices, key=natural_key)
    styles = {label: n % STYLES for n, label in enumerate(labels)}
    devices_text = plural(dashboard.devices, _DEVICES[dashboard.kind])
    summary = f"{devices_text}, {dashboard.seconds:.0f} s, one point per {_point_distance_s(dashboard):.3g} s"
    return DashboardView(
        title=_TITLES[dashboard.kind],
        summary=summary,
        spans=dashboard.spans,
        shades=tuple(_shade(number, span, x) for number, span in enumerate(dashboard.spans, 1)),
        panels=tuple(_panel(gauge, dashboard, x, styles) for gauge in _drawn_gauges(dashboard)),
        cuts=tuple(x.position(drawable(cut)) for cut in dashboard.cuts),
        legend=tuple(Curve(label, n) for label, n in styles.items()) if has_band or len(styles) > 1 else (),
        band_label=f"all {dashboard.devices}" if has_band else "",
        loads=loads,
        not_sampled=not_sampled,
    )


def _point_distance_s(dashboard: Dashboard) -> float:
    """Seconds between the points of a typical curve: more than a step if the sampler reads the GPUs in turn."""
    point_counts = [sum(value is not None for value in track.values) for track in dashboard.tracks]
    steps = max((len(track.values) for track in dashboard.tracks), default=0)
    drawn = [count for count in point_counts if count > 1]
    steps_per_point = steps / median(drawn) if drawn else 1.0
    # below the minimum, the steps without a sample are single ones, such as the last of a phase
    return dashboard.step_s * (round(steps_per_point, 1) if steps_per_point >= MIN_STEPS_PER_POINT else 1.0)


def _axis_seconds(dashboard: Dashboard) -> float:
    """The length of the time axis, in seconds."""
    return max(drawable(dashboard.seconds), MIN_AXIS_S)


def _time_axis(seconds: float) -> Axis:
    """An axis from zero to exactly ``seconds``, so that a phase fills its charts."""
    distance = tick_distance(seconds)
    ticks_s = (n * distance for n in range(int(seconds / distance) + 1))
    axis = Axis(0.0, seconds, *FRAME.x_range).with_ticks(ticks_s, "s")
    *ticks, (position, label) = axis.ticks
    return replace(axis, ticks=(*ticks, (position, f"{label} s")))


def _drawn_gauges(dashboard: Dashboard) -> Iterator[Gauge]:
    """The gauges with at least two values in a curve, with THROTTLED last if GPUs were throttled."""
    drawn = {track.gauge for track in dashboard.tracks if sum(value is not None for value in track.values) > 1}
    yield from (gauge for gauge in GAUGES[dashboard.kind] if gauge.name in drawn)
    if THROTTLED in drawn:
        yield Gauge(THROTTLED, "", "Number of GPUs throttled, by reason")


def _panel(gauge: Gauge, dashboard: Dashboard, x: Axis, styles: dict[str, int]) -> Chart:
    scale, unit = (_GIB, "GiB") if gauge.unit == "B" else (1.0, gauge.unit)
    tracks = [
        (track, [None if value is None else drawable(value) / scale for value in track.values])
        for track in dashboard.tracks
        if track.gauge == gauge.name
    ]
    samples = [value for _track, values in tracks for value in values if value is not None]
    min_end = [MIN_COUNT_AXIS] if gauge.name == THROTTLED else []
    y = linear([0.0, 100.0] if unit == "%" else [0.0, *samples, *min_end], unit, *FRAME.y_range)
    drawn = [(track, values) for track, values in tracks if track.role in ("device", "median")]
    not_in_legend = [track.label for track, _ in drawn if track.label not in styles]  # outliers, throttle reasons
    styles = styles | {label: n % STYLES for n, label in enumerate(not_in_legend, len(drawn) - len(not_in_legend))}

    def lines(values: Sequence[float | None]) -> list[list[tuple[float, float]]]:
        """The unbroken lines of a curve, each as its points in SVG units."""
        return [
            [(x.position(time), y.position(value)) for time, value in points] for points in _segments(values, dashboard)
        ]

    def path(values: Sequence[float | None]) -> str:
        """The SVG path of a curve through the middle of each step; a single value is a short horizontal line."""
        return "".join(FRAME.path(points) + ("" if len(points) > 1 else "h2") for points in lines(values))

    curves = tuple(Curve(track.label, styles[track.label], path(values)) for track, values in drawn)
    bounds = {track.role: lines(values) for track, values in tracks if track.role in ("min", "max")}
    areas = zip(bounds.get("min", ()), bounds.get("max", ()), strict=False)
    return Chart(
        frame=FRAME,
        title=gauge.title,
        x=x,
        y=y,
        x_label="",
        y_label=unit,
        curves=curves,
        band="".join(FRAME.area(low, high) for low, high in areas),
        legend=tuple(curve for curve in curves if curve.label in not_in_legend),
        range_text=format_range(samples, unit),
    )


def _shade(number: int, span: Span, x: Axis) -> Shade:
    positions = (x.position(drawable(time)) for time in (span.begin, span.end))
    begin, end = (min(max(position, x.start), x.end) for position in positions)
    title = f"{number} {span.check}: {span.begin:.1f} to {span.end:.1f} s"
    return Shade(begin, round(end - begin, 1), str(number) if end - begin >= MIN_NUMBERED_WIDTH else "", title)


def _segments(values: Sequence[float | None], dashboard: Dashboard) -> Iterator[list[tuple[float, float]]]:
    """The (time, value) points of each unbroken line: a curve is split at cuts of the time axis and at long gaps."""
    segment: list[tuple[float, float]] = []
    max_gap_s, end = max(GAP_STEPS * dashboard.step_s, GAP_S), _axis_seconds(dashboard)
    for step, value in enumerate(values):
        if value is None:
            continue
        time = min((step + 0.5) * dashboard.step_s, end)
        previous = segment[-1][0] if segment else time
        if time - previous > max_gap_s or any(previous < cut <= time for cut in dashboard.cuts):
            yield segment
            segment = []
        segment.append((time, value))
    if segment:
        yield segment
