"""Samples joined to the checks that ran meanwhile, by the clock of each node itself: two clocks are never compared."""

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

MAX_LOADS = 64  # GPUs of which the record has a line for each check; of more, the remarkable ones
MOST_STEPS = 120  # of a curve: about one for each three pixels of its print
MOST_BREAK_S = 5.0  # between two checks of a phase; a longer one is cut out: the start of a job, or another phase
SILENT_S = 15.0  # how long a sampler may say nothing, beside a few of its periods: it starts Python, and opens NVML
SHORT_S = 10.0  # under which a sampler's own share of a CPU is a matter of a few ticks of its clock
# NVML API reference: utilisation is of the last 1 to 1/6 s (nvmlUtilization_t), power of the last second but on GA100
# and older (nvmlDeviceGetPowerUsage). A look in the first second of a check tells of what ran before it.
SETTLE_S = 1.0
_BUSY = 50.0  # percent of utilisation
_EXTREMES = ("sm_util_mean", "power_w_mean", "power_w_max", "temperature_c_max", "sm_clock_mhz_min")


@dataclass(frozen=True)
class CheckInterval:
    """When a check ran on a node or a GPU: Unix seconds by its clock."""

    check: str
    begin: float
    end: float


Windows = Mapping[str, Sequence[CheckInterval]]  # of each node, or of each subject, in order of time


def check_intervals(
    measurements: Iterable[Measurement], place: Callable[[str], str] = lambda subject: subject.partition("/")[0]
) -> Windows:
    """From the first process of a place that began a check to the last that ended it; ``place``: of a subject."""
    found: dict[str, dict[str, CheckInterval]] = {}
    for one in measurements:
        if one.rank is not None and one.seconds > 0:  # an error that the launcher tells has no time of its own
            checks = found.setdefault(place(one.subject), {})
            earlier = checks.get(one.check, CheckInterval(one.check, math.inf, -math.inf))
            end = max(earlier.end, one.started + one.seconds)
            checks[one.check] = CheckInterval(one.check, min(earlier.begin, one.started), end)
    return {node: sorted(checks.values(), key=lambda window: window.begin) for node, checks in found.items()}


@dataclass(frozen=True)
class Piece:
    """A stretch of a phase on a node: Unix seconds by its clock, and where it begins on the axis of the phase."""

    begin: float
    end: float
    at: float


class Axis:
    """The time of one phase. Where other phases ran in between it is cut: there its checks go on at once.

    Each stretch lasts as long as on the slowest node, and begins on each node with the first of its checks there.
    """

    def __init__(self, windows: Windows, hz: float) -> None:
        """``windows``: those of the phase, none empty."""
        stretches = list(_stretches(max(windows.values(), key=len)))
        self.pieces: dict[str, list[Piece]] = {node: [] for node in windows}
        self.cuts: list[float] = []
        self.spans: list[Span] = []
        self.seconds = 0.0
        for stretch in stretches:
            self._append({one.check for one in stretch}, windows)
            zero = stretch[0].begin - self.cuts[-1]
            self.spans += (
                Span(check=one.check, begin=round(one.begin - zero, 2), end=round(one.end - zero, 2)) for one in stretch
            )
        self.step_s = max(1 / hz, self.seconds / MOST_STEPS)
        self.steps = math.floor(self.seconds / self.step_s) + 1

    def _append(self, checks: set[str], windows: Windows) -> None:
        longest = 0.0
        for node, own in windows.items():
            if ran := [one for one in own if one.check in checks]:
                piece = Piece(ran[0].begin, max(one.end for one in ran), self.seconds)
                self.pieces[node].append(piece)
                longest = max(longest, piece.end - piece.begin)
        self.cuts.append(self.seconds)
        self.seconds += longest


def _stretches(windows: Sequence[CheckInterval]) -> Iterator[list[CheckInterval]]:
    """Windows that follow each other within MOST_BREAK_S."""
    stretch: list[CheckInterval] = []
    for window in windows:
        if stretch and window.begin > max(one.end for one in stretch) + MOST_BREAK_S:
            yield stretch
            stretch = []
        stretch.append(window)
    yield stretch


class TelemetryAggregator:
    """Takes one device after another, so that the samples of a fleet are never in memory all at once."""

    def __init__(self, phases: Mapping[str, str], measurements: Iterable[Measurement], hz: float) -> None:
        """``phases``: of every check beside which there was a sampler. Other measurements are passed over."""
        ran = [one for one in measurements if one.check in phases]
        done = [one for one in ran if not one.skipped]
        self._windows, self._done, self._own = check_intervals(ran), check_intervals(done), check_intervals(done, str)
        self._axes = {phase: Axis(own, hz) for phase, own in _by_phase(self._windows, phases).items()}
        self._curves: dict[tuple[str, Kind], Curves] = {}
        self._loads: list[Load] = []
        self._gpus: dict[str, list[CheckInterval]] = {}
        self._rates: list[float] = []
        self._times: dict[str, list[float]] = {}
        self._unread: dict[str, Counter[str]] = {}
        self._shares: list[float] = []
        self._most_s = SILENT_S + 5 / hz

    def add(self, device: DeviceSamples) -> None:
        kind: Kind = "host" if device.device == HOST else "gpu"
        for gauge, why in device.unreadable.items():
            self._unread.setdefault(f"{kind}.{gauge}", Counter())[why] += 1
        if kind == "host":
            self._times.setdefault(device.node, []).extend(device.time)
            self._add_share(device)
        else:
            # of each check of its node that was not skipped: its own where it has a measurement, else the node's
            own = {window.check: window for window in self._own.get(device.subject, ())}
            windows = [own.get(window.check, window) for window in self._done.get(device.node, ())]
            self._gpus[device.subject] = windows
            self._loads += (one for window in windows for one in gpu_loads(device, window))
            seconds = device.time[-1] - device.time[0] + 1 / device.hz if device.time else 0.0
            if seconds >= SHORT_S:
                self._rates.append(len(device.sampled_indices) / seconds)
        for phase, axis in self._axes.items():
            curves = self._curves.setdefault((phase, kind), Curves(kind, axis.steps, axis.step_s))
            for piece in axis.pieces.get(device.node, ()):
                curves.add(device, piece.begin, piece.end, piece.at)

    def _add_share(self, host: DeviceSamples) -> None:
        """The share of one core that the sampler took, without its own start; nothing from so few samples."""
        used = host.column(SAMPLER_CPU_SECONDS)
        seconds = host.time[-1] - host.time[0] if host.time else 0.0
        if seconds >= SHORT_S and used and used[0] is not None and used[-1] is not None:
            self._shares.append(max(0.0, used[-1] - used[0]) / seconds)

    def sampling_gaps(self) -> list[str]:
        """For each node the longest time of its checks without a sample, where that is longer than it may be."""
        found = []
        for node, windows in self._windows.items():
            times = [-math.inf, *sorted(self._times.get(node, ())), math.inf]
            gaps = [_during(windows, a, b) for a, b in pairwise(times) if b - a > self._most_s]
            if gaps and max(gaps) > self._most_s:
                found.append(f"{node}: no telemetry for {max(gaps):.0f} s of its checks")
        return found

    def summary(self) -> Telemetry:
        looked = {(load.check, load.gpu) for load in self._loads}
        every = [(window.check, gpu) for gpu, windows in self._gpus.items() for window in windows]
        return Telemetry(
            loads=tuple(select_loads(self._loads)),
            unsampled_gpus=dict(Counter(check for check, gpu in every if (check, gpu) not in looked)),
            dashboards=tuple(self._dashboards()),
            min_sample_rate_hz=round(min(self._rates), 3) if self._rates else None,
            max_sample_rate_hz=round(max(self._rates), 3) if self._rates else None,
            sampler_cpu_share=round(max(self._shares), 5) if self._shares else None,
            unreadable_gauges={gauge: _commonest(whys) for gauge, whys in self._unread.items()},
        )

    def _dashboards(self) -> Iterator[Dashboard]:
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
                    cuts=tuple(round(at, 2) for at in axis.cuts[1:]),
                    tracks=tracks,
                )


def gpu_loads(device: DeviceSamples, window: CheckInterval) -> Iterator[Load]:
    """What a GPU did during a check; nothing where it was not looked at after the first second."""
    first, last = bisect_left(device.time, window.begin + SETTLE_S), bisect_right(device.time, window.end)
    looks = device.sampled_indices[
        bisect_left(device.sampled_indices, first) : bisect_left(device.sampled_indices, last)
    ]
    if not looks:
        return

    def column(gauge: str) -> list[float | None]:
        values = device.column(gauge)
        return [values[n] for n in looks] if values else []

    def read(gauge: str) -> list[float]:
        return [value for value in column(gauge) if value is not None]

    pairs = zip(column("sm_util"), column("sm_clock_mhz"), strict=False)
    busy = [clock for util, clock in pairs if util is not None and clock is not None and util >= _BUSY]
    power, util, masks = read("power_w"), read("sm_util"), read(CLOCKS_EVENT_REASONS)
    seen: Counter[str] = Counter()
    for mask, times in Counter(masks).items():
        seen.update(dict.fromkeys(device.throttle_reasons(mask), times))
    yield Load(
        check=window.check,
        gpu=device.subject,
        samples=len(looks),
        sm_util_mean=round(fmean(util), 1) if util else None,
        power_w_mean=round(fmean(power), 1) if power else None,
        power_w_max=max(power, default=None),
        temperature_c_max=max(read("temperature_c"), default=None),
        sm_clock_mhz_min=min(busy, default=None),
        throttled_share={
            reason: round(seen[reason] / len(masks), 3) for reason in (POWER_CAP, *THROTTLE_REASONS) if seen[reason]
        },
    )


def select_loads(loads: Sequence[Load]) -> Iterator[Load]:
    """All of them for a few GPUs; of many, for each check those with an extreme, and those with heat or power trouble,
    each a line up to MOST_LOADS, after one for all with the median of each value."""
    if len({load.gpu for load in loads}) <= MAX_LOADS:
        yield from loads
        return
    for check in dict.fromkeys(load.check for load in loads):
        own = [load for load in loads if load.check == check]
        yield _median(own)
        extremes = [end for name in _EXTREMES for end in _ends(own, name)]
        hot = [load for load in own if set(load.throttled_share) & set(THROTTLE_REASONS)]
        yield from list({load.gpu: load for load in (*extremes, *hot)}.values())[:MAX_LOADS]


def _median(own: Sequence[Load]) -> Load:
    middle = {name: [value for load in own if (value := getattr(load, name)) is not None] for name in _EXTREMES}
    values = {name: round(median(found), 1) for name, found in middle.items() if found}
    samples = min(load.samples for load in own)
    return Load(check=own[0].check, gpu=f"median of {len(own)}", samples=samples, **values)


def _ends(own: Sequence[Load], name: str) -> list[Load]:
    known = [load for load in own if getattr(load, name) is not None]
    return [end(known, key=lambda load: getattr(load, name)) for end in (min, max)] if known else []


def _by_phase(windows: Windows, phases: Mapping[str, str]) -> Mapping[str, Windows]:
    found: dict[str, dict[str, list[CheckInterval]]] = {}
    for node, own in windows.items():
        for window in own:
            found.setdefault(phases[window.check], {}).setdefault(node, []).append(window)
    return found


def _during(windows: Sequence[CheckInterval], begin: float, end: float) -> float:
    """Seconds of the checks that lie between two times."""
    return sum(max(0.0, min(end, window.end) - max(begin, window.begin)) for window in windows)


def _commonest(whys: Counter[str]) -> str:
    (why, count), *others = whys.most_common()
    return f"{why} ({count}×)" + (f", and {len(others)} other reasons" if others else "")
