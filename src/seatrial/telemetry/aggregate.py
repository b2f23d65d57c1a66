"""Joins samples with the checks that ran at the same time, by the clock of each node, and summarises them."""

from __future__ import annotations

import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, median

from seatrial.model import Measurement
from seatrial.model.telemetry import (
    CLOCKS_EVENT_REASONS,
    HOST,
    POWER_CAP,
    SAMPLER_CPU_SECONDS,
    THROTTLE_REASONS,
    Dashboard,
    Kind,
    Load,
    Span,
    Telemetry,
)
from seatrial.telemetry.curves import Curves
from seatrial.telemetry.files import DeviceSamples

# Up to this number of GPUs the record has the load of each GPU in each check; with more, a selection (select_loads)
MAX_LOADS = 64
MAX_STEPS = 120  # values per curve; in a printed report each is about three pixels wide
MAX_PAUSE_S = 5.0  # a longer pause between two checks of a phase (start of a job, another phase) is cut from the axis
# A gap between samples is reported if it exceeds MAX_GAP_S plus 5 sampling periods. Shorter gaps are normal, since a
# sampler starts Python and NVML before its first sample.
MAX_GAP_S = 15.0
# A sample rate or CPU share is computed from samples over at least this time; the CPU clock is too coarse for less
MIN_SAMPLED_S = 10.0
# NVML API reference: utilisation is a mean over the last 1 to 1/6 s (nvmlUtilization_t), power over the last second
# except on GA100 and older (nvmlDeviceGetPowerUsage), so samples in the first second of a check show earlier load.
SKIPPED_S = 1.0
_BUSY_PERCENT = 50.0  # minimum GPU utilisation for sm_clock_mhz_min: an idle GPU lowers its clock
# Fields of Load; select_loads lists their minimum, median and maximum over the GPUs
_EXTREMES = ("sm_util_mean", "power_w_mean", "power_w_max", "temperature_c_max", "sm_clock_mhz_min")


@dataclass(frozen=True)
class CheckInterval:
    """Begin and end of a check on a node or GPU, in Unix seconds by the node's clock."""

    check: str
    begin: float
    end: float


Intervals = Mapping[str, Sequence[CheckInterval]]  # node or subject → its intervals in order of time


def check_intervals(
    measurements: Iterable[Measurement], group_by: Callable[[str], str] = lambda subject: subject.partition("/")[0]
) -> Intervals:
    """Return the interval of each check, from its first begin to its last end.

    ``group_by``: subject of a measurement → key of the result, by default the node.
    """
    groups: dict[str, dict[str, CheckInterval]] = {}  # key of the result → check → interval
    for measurement in measurements:
        if measurement.rank is not None and measurement.seconds > 0:  # errors recorded by run_job have no duration
            check = measurement.check
            interval_by_check = groups.setdefault(group_by(measurement.subject), {})
            earlier = interval_by_check.get(check, CheckInterval(check, math.inf, -math.inf))
            end = max(earlier.end, measurement.started + measurement.seconds)
            interval_by_check[check] = CheckInterval(check, min(earlier.begin, measurement.started), end)
    return {key: sorted(group.values(), key=lambda interval: interval.begin) for key, group in groups.items()}


@dataclass(frozen=True)
class Segment:
    """Part of a phase on a node, in Unix seconds by the node's clock. ``axis_begin``: its begin on the phase's axis."""

    begin: float
    end: float
    axis_begin: float


class PhaseAxis:
    """Time axis of a phase (a group of checks, such as collectives), in seconds, without the pauses between its checks.

    The axis consists of segments; no check ran in the pauses between them. On each node, a segment begins with the
    node's first check in the segment. On the axis, a segment is as long as on the slowest node.
    ``segments``: node → its segments. ``cuts``: where each segment begins on the axis. ``spans``: the checks of the
    node that ran most checks. ``seconds``: length of the axis.
    ``step_s``, ``step_count``: length and number of the steps of a curve.
    """

    def __init__(self, intervals: Intervals, hz: float) -> None:
        """``intervals``: node → intervals of the phase's checks, at least one."""
        self.segments: dict[str, list[Segment]] = {node: [] for node in intervals}
        self.cuts: list[float] = []
        self.spans: list[Span] = []
        self.seconds = 0.0
        for group in _groups_without_pause(max(intervals.values(), key=len)):
            self._append_segment({interval.check for interval in group}, intervals)
            axis_origin = group[0].begin - self.cuts[-1]  # Unix seconds at 0 of the axis
            for interval in group:
                begin, end = round(interval.begin - axis_origin, 2), round(interval.end - axis_origin, 2)
                self.spans.append(Span(check=interval.check, begin=begin, end=end))
        self.step_s = max(1 / hz, self.seconds / MAX_STEPS)
        self.step_count = math.floor(self.seconds / self.step_s) + 1

    def _append_segment(self, checks: set[str], intervals: Intervals) -> None:
        """Append the segment in which ``checks`` ran, on every node on which one of them ran."""
        longest = 0.0
        for node, node_intervals in intervals.items():
            if selected := [interval for interval in node_intervals if interval.check in checks]:
                segment = Segment(selected[0].begin, max(interval.end for interval in selected), self.seconds)
                self.segments[node].append(segment)
                longest = max(longest, segment.end - segment.begin)
        self.cuts.append(self.seconds)
        self.seconds += longest


def _groups_without_pause(intervals: Sequence[CheckInterval]) -> Iterator[list[CheckInterval]]:
    """Yield groups of successive intervals with pauses of at most MAX_PAUSE_S."""
    group: list[CheckInterval] = []
    for interval in intervals:
        if group and interval.begin > max(earlier.end for earlier in group) + MAX_PAUSE_S:
            yield group
            group = []
        group.append(interval)
    yield group


class TelemetryAggregator:
    """Summarises the samples of a run. Only the samples of one device at a time are in memory."""

    def __init__(self, phase_by_check: Mapping[str, str], measurements: Iterable[Measurement], hz: float) -> None:
        """``phase_by_check``: the checks of jobs with a sampler. Measurements of other checks are ignored."""
        sampled = [measurement for measurement in measurements if measurement.check in phase_by_check]
        not_skipped = [measurement for measurement in sampled if not measurement.skipped]
        self._intervals_by_node = check_intervals(sampled)
        self._not_skipped_by_node = check_intervals(not_skipped)
        self._not_skipped_by_subject = check_intervals(not_skipped, str)
        self._axes = {
            phase: PhaseAxis(group, hz) for phase, group in _by_phase(self._intervals_by_node, phase_by_check).items()
        }
        self._curves: dict[tuple[str, Kind], Curves] = {}
        self._loads: list[Load] = []
        self._intervals_by_gpu: dict[str, list[CheckInterval]] = {}
        self._sample_rates: list[float] = []
        self._host_times: dict[str, list[float]] = {}
        self._unreadable: dict[str, Counter[str]] = {}
        self._cpu_shares: list[float] = []
        self._max_gap_s = MAX_GAP_S + 5 / hz

    def add(self, device: DeviceSamples) -> None:
        """Add the samples of one device during one attempt of a job."""
        kind: Kind = "host" if device.device == HOST else "gpu"
        for gauge, reason in device.unreadable.items():
            self._unreadable.setdefault(f"{kind}.{gauge}", Counter())[reason] += 1
        if kind == "host":
            self._host_times.setdefault(device.node, []).extend(device.time)
            self._add_cpu_share(device)
        else:
            # For each check of the node: the interval on this GPU if there is one, otherwise the interval on the node
            gpu_intervals = self._not_skipped_by_subject.get(device.subject, ())
            gpu_interval_by_check = {interval.check: interval for interval in gpu_intervals}
            node_intervals = self._not_skipped_by_node.get(device.node, ())
            intervals = [gpu_interval_by_check.get(interval.check, interval) for interval in node_intervals]
            self._intervals_by_gpu[device.subject] = intervals
            self._loads += (load for interval in intervals if (load := load_during_check(device, interval)))
            seconds = device.time[-1] - device.time[0] + 1 / device.hz if device.time else 0.0
            if seconds >= MIN_SAMPLED_S:
                self._sample_rates.append(len(device.sampled_indices) / seconds)
        for phase, axis in self._axes.items():
            curves = self._curves.setdefault((phase, kind), Curves(kind, axis.step_count, axis.step_s))
            for segment in axis.segments.get(device.node, ()):
                curves.add(device, segment.begin, segment.end, segment.axis_begin)

    def _add_cpu_share(self, host: DeviceSamples) -> None:
        """Add the sampler's CPU time between its first and last sample, as a share of one core."""
        cpu_s = host.column(SAMPLER_CPU_SECONDS)
        seconds = host.time[-1] - host.time[0] if host.time else 0.0
        if seconds >= MIN_SAMPLED_S and cpu_s and cpu_s[0] is not None and cpu_s[-1] is not None:
            self._cpu_shares.append(max(0.0, cpu_s[-1] - cpu_s[0]) / seconds)

    def sampling_gaps(self) -> list[str]:
        """Return a message for each node whose checks ran without samples for longer than MAX_GAP_S + 5 periods."""
        messages = []
        for node, intervals in self._intervals_by_node.items():
            times = [-math.inf, *sorted(self._host_times.get(node, ())), math.inf]
            gaps = [(begin, end) for begin, end in pairwise(times) if end - begin > self._max_gap_s]
            longest_s = max((_overlap(intervals, begin, end) for begin, end in gaps), default=0.0)
            if longest_s > self._max_gap_s:
                messages.append(f"{node}: no telemetry samples for {longest_s:.0f} s while checks ran")
        return messages

    def summary(self) -> Telemetry:
        """Return the summary of all devices added so far."""
        sampled = {(load.check, load.gpu) for load in self._loads}
        unsampled_gpus: Counter[str] = Counter()  # check → number of GPUs
        for gpu, intervals in self._intervals_by_gpu.items():
            unsampled_gpus.update(interval.check for interval in intervals if (interval.check, gpu) not in sampled)
        return Telemetry(
            loads=tuple(select_loads(self._loads)),
            unsampled_gpus=dict(unsampled_gpus),
            dashboards=tuple(self._dashboards()),
            min_sample_rate_hz=round(min(self._sample_rates), 3) if self._sample_rates else None,
            max_sample_rate_hz=round(max(self._sample_rates), 3) if self._sample_rates else None,
            sampler_cpu_share=round(max(self._cpu_shares), 5) if self._cpu_shares else None,
            unreadable_gauges={gauge: _most_common(reasons) for gauge, reasons in self._unreadable.items()},
        )

    def _dashboards(self) -> Iterator[Dashboard]:
        """Yield a dashboard for each phase and kind of device that has samples."""
        for (phase, kind), curves in self._curves.items():
            if tracks := tuple(curves.tracks()):
                axis = self._axes[phase]
                yield Dashboard(
                    phase=phase,
                    kind=kind,
                    devices=len(curves.devices),
                    seconds=round(axis.seconds, 2),
                    step_s=round(axis.step_s, 3),
                    spans=tuple(axis.spans),
                    cuts=tuple(round(cut, 2) for cut in axis.cuts[1:]),
                    tracks=tracks,
                )


def load_during_check(device: DeviceSamples, interval: CheckInterval) -> Load | None:
    """Return the load of a GPU during a check; None without a sample after the first SKIPPED_S of the check."""
    begin, end = bisect_left(device.time, interval.begin + SKIPPED_S), bisect_right(device.time, interval.end)
    sampled = device.sampled_indices
    indices = sampled[bisect_left(sampled, begin) : bisect_left(sampled, end)]
    if not indices:
        return None

    def column(gauge: str) -> list[float | None]:
        values = device.column(gauge)
        return [values[index] for index in indices] if values else []

    def read_values(gauge: str) -> list[float]:
        return [value for value in column(gauge) if value is not None]

    pairs = zip(column("sm_util"), column("sm_clock_mhz"), strict=False)
    busy_clocks = [clock for util, clock in pairs if util is not None and clock is not None and util >= _BUSY_PERCENT]
    power, util, masks = read_values("power_w"), read_values("sm_util"), read_values(CLOCKS_EVENT_REASONS)
    counts: Counter[str] = Counter()  # reason → number of samples
    for mask, count in Counter(masks).items():
        counts.update(dict.fromkeys(device.throttle_reasons(mask), count))
    return Load(
        check=interval.check,
        gpu=device.subject,
        samples=len(indices),
        sm_util_mean=round(fmean(util), 1) if util else None,
        power_w_mean=round(fmean(power), 1) if power else None,
        power_w_max=max(power, default=None),
        temperature_c_max=max(read_values("temperature_c"), default=None),
        sm_clock_mhz_min=min(busy_clocks, default=None),
        throttled_share={
            reason: round(counts[reason] / len(masks), 3) for reason in (POWER_CAP, *THROTTLE_REASONS) if counts[reason]
        },
    )


def select_loads(loads: Sequence[Load]) -> Iterator[Load]:
    """Yield all loads if there are up to MAX_LOADS GPUs, otherwise a selection for each check.

    The selection has the median over the GPUs, and up to MAX_LOADS GPUs with extreme values or throttled clocks.
    """
    if len({load.gpu for load in loads}) <= MAX_LOADS:
        yield from loads
        return
    for check in dict.fromkeys(load.check for load in loads):
        check_loads = [load for load in loads if load.check == check]
        yield _median(check_loads)
        extremes = [extreme for name in _EXTREMES for extreme in _min_and_max(check_loads, name)]
        throttled = [load for load in check_loads if set(load.throttled_share) & set(THROTTLE_REASONS)]
        yield from list({load.gpu: load for load in (*extremes, *throttled)}.values())[:MAX_LOADS]


def _median(loads: Sequence[Load]) -> Load:
    """Return the median of each field over the GPUs, with the smallest number of samples."""
    medians = {}
    for name in _EXTREMES:
        values = [value for load in loads if (value := getattr(load, name)) is not None]
        if values:
            medians[name] = round(median(values), 1)
    samples = min(load.samples for load in loads)
    return Load(check=loads[0].check, gpu=f"median of {len(loads)}", samples=samples, **medians)


def _min_and_max(loads: Sequence[Load], name: str) -> list[Load]:
    """Return the loads with the smallest and the largest value of a field; empty if no load has a value."""
    with_value = [load for load in loads if getattr(load, name) is not None]
    return [pick(with_value, key=lambda load: getattr(load, name)) for pick in (min, max)] if with_value else []


def _by_phase(intervals: Intervals, phase_by_check: Mapping[str, str]) -> Mapping[str, Intervals]:
    """Return phase → node → intervals of the phase's checks."""
    by_phase: dict[str, dict[str, list[CheckInterval]]] = {}
    for node, node_intervals in intervals.items():
        for interval in node_intervals:
            by_phase.setdefault(phase_by_check[interval.check], {}).setdefault(node, []).append(interval)
    return by_phase


def _overlap(intervals: Sequence[CheckInterval], begin: float, end: float) -> float:
    """Return the seconds of the intervals that lie between ``begin`` and ``end``."""
    return sum(max(0.0, min(end, interval.end) - max(begin, interval.begin)) for interval in intervals)


def _most_common(reasons: Counter[str]) -> str:
    (reason, count), *others = reasons.most_common()
    return f"{reason} ({count}×)" + (f", other reasons: {len(others)}" if others else "")
