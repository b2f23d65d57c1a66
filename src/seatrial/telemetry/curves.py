"""Curves of a dashboard: reduces the samples of many devices to a few tracks per gauge."""

from __future__ import annotations

import math
from array import array
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from statistics import fmean, median
from typing import Literal

from seatrial.model.telemetry import (
    CLOCKS_EVENT_REASONS,
    GAUGES,
    NOT_SAMPLED,
    POWER_CAP,
    THROTTLE_REASONS,
    THROTTLED,
    Kind,
    Track,
)
from seatrial.telemetry.files import DeviceSamples

MAX_TRACKS = 8  # up to so many devices, each has a track; for more: minimum, median, maximum and outliers
MAX_OUTLIERS = 2  # per gauge; each has a track
# An outlier is a device whose mean differs from the median of all means by so many robust standard deviations
# (1.4826 × median absolute deviation), and by this share of the median
OUTLIER_SIGMAS, OUTLIER_SHARE = 5.0, 0.05
# NVML reports only the current clocks event reasons. They count until the GPU's next sample, at most this long: a
# sampler that reads one GPU per second reads each of sixteen GPUs within this time.
REASON_VALID_S = 20.0
_NAN = math.nan  # a step without a sample
_LABELS = (POWER_CAP, *THROTTLE_REASONS, NOT_SAMPLED)
_NOT_SAMPLED_BIT, _SAMPLED_BIT = 1 << _LABELS.index(NOT_SAMPLED), 1 << len(_LABELS)

_BAND: dict[Literal["min", "median", "max"], Callable[[list[float]], float]] = {
    "min": min,
    "median": median,
    "max": max,
}


class Curves:
    """The gauges of all devices of one kind in one phase, as means over ``steps`` steps of ``step_s`` seconds."""

    def __init__(self, kind: Kind, steps: int, step_s: float) -> None:
        self.devices: set[str] = set()
        self._kind, self._steps, self._step_s = kind, steps, step_s
        self._means: dict[str, dict[str, array[float]]] = {gauge.name: {} for gauge in GAUGES[kind]}
        # GPU → its reasons in each step, as bits in the order of _LABELS, then _SAMPLED_BIT; 0 outside of the segments
        self._reasons: dict[str, array[int]] = {}

    def add(self, device: DeviceSamples, begin: float, end: float, axis_begin: float) -> None:
        """Add a device's samples from ``begin`` to ``end`` (Unix seconds); ``axis_begin``: ``begin`` on the axis."""
        first, last = bisect_left(device.time, begin), bisect_right(device.time, end)
        samples = [
            (index, step)
            for index in range(first, last)
            if 0 <= (step := self._step(device.time[index] - begin + axis_begin)) < self._steps
        ]
        if not samples:
            return
        self.devices.add(device.subject)
        for gauge, by_device in self._means.items():
            if means := self._step_means(device.column(gauge), samples):
                earlier = by_device.get(device.subject, means)
                pairs = zip(earlier, means, strict=True)
                by_device[device.subject] = array("f", (old if math.isnan(new) else new for old, new in pairs))
        if self._kind == "gpu":
            steps = range(self._step(axis_begin), min(self._step(axis_begin + end - begin) + 1, self._steps))
            self._add_reasons(device, samples, steps)

    def tracks(self) -> Iterator[Track]:
        """Yield the tracks of each gauge, then those of throttled GPUs."""
        for gauge in GAUGES[self._kind]:
            yield from _gauge_tracks(gauge.name, self._means[gauge.name], gauge.digits)
        yield from _throttle_tracks(self._reasons.values())

    def _step(self, seconds: float) -> int:
        return int(seconds // self._step_s)

    def _step_means(self, column: Sequence[float | None], samples: Sequence[tuple[int, int]]) -> array[float] | None:
        """Return the mean of ``samples`` (index, step) in each step, NaN in steps without one; None without values."""
        sums, counts = [0.0] * self._steps, [0] * self._steps
        for index, step in samples if column else ():
            value = column[index]
            if value is not None:
                sums[step] += value
                counts[step] += 1
        if not any(counts):
            return None
        return array("f", (total / count if count else _NAN for total, count in zip(sums, counts, strict=True)))

    def _add_reasons(self, device: DeviceSamples, samples: Sequence[tuple[int, int]], steps: range) -> None:
        """Set the reasons of ``steps``: the reasons of a sample hold until the next sample, at most REASON_VALID_S."""
        masks = device.column(CLOCKS_EVENT_REASONS)
        sampled = [(step, mask) for index, step in samples if masks and (mask := masks[index]) is not None]
        bits = {mask: _SAMPLED_BIT | _bits(device.throttle_reasons(mask)) for mask in {mask for _, mask in sampled}}
        by_step: dict[int, int] = {}
        for step, mask in sampled:
            by_step[step] = by_step.get(step, 0) | bits[mask]
        reasons = self._reasons.setdefault(device.subject, array("B", [0] * self._steps))
        latest, last_valid_step = _NOT_SAMPLED_BIT, -1
        for step in steps:
            if step in by_step:
                latest, last_valid_step = by_step[step], step + self._step(REASON_VALID_S)
            elif step > last_valid_step:
                latest = _NOT_SAMPLED_BIT
            if step in by_step or not reasons[step] & _SAMPLED_BIT:  # keep the samples of an earlier attempt
                reasons[step] = latest


def _bits(labels: Iterable[str]) -> int:
    return sum(1 << _LABELS.index(label) for label in labels)


def _throttle_tracks(reasons: Iterable[array[int]]) -> Iterator[Track]:
    """Yield the number of throttled GPUs by step for each reason that occurred; None in steps without a sample.

    Last comes the number of GPUs that were not sampled, if there is any reason and any such GPU.
    """
    steps = [Counter(step) for step in zip(*reasons, strict=True)]
    sampled = [any(value & _SAMPLED_BIT for value in step) for step in steps]
    counts = {
        label: [float(sum(count for value, count in step.items() if value & _bits([label]))) for step in steps]
        for label in _LABELS
    }
    not_sampled = counts.pop(NOT_SAMPLED)
    occurred = {reason: values for reason, values in counts.items() if any(values)}
    for reason, values in occurred.items():
        track = (value if any_sampled else None for value, any_sampled in zip(values, sampled, strict=True))
        yield Track(gauge=THROTTLED, label=reason, values=tuple(track))
    if occurred and any(not_sampled):
        yield Track(gauge=THROTTLED, label=NOT_SAMPLED, values=tuple(not_sampled))


def _gauge_tracks(gauge: str, by_device: dict[str, array[float]], digits: int) -> Iterator[Track]:
    """Yield a track per device, or with many devices minimum, median, maximum and outliers."""
    if len(by_device) <= MAX_TRACKS:
        for subject, values in by_device.items():
            yield Track(gauge=gauge, label=subject, values=_rounded(values, digits))
        return
    steps = [[value for value in step if not math.isnan(value)] for step in zip(*by_device.values(), strict=True)]
    for role, reduce in _BAND.items():
        curve = _rounded((reduce(step) if step else _NAN for step in steps), digits)
        yield Track(gauge=gauge, label=role, role=role, values=curve)
    means = {subject: fmean(v for v in values if not math.isnan(v)) for subject, values in by_device.items()}
    for subject in outliers(means):
        yield Track(gauge=gauge, label=subject, values=_rounded(by_device[subject], digits))


def outliers(means: dict[str, float]) -> list[str]:
    """Return the subjects whose mean is an outlier, at most MAX_OUTLIERS, farthest from the median first."""
    middle = median(means.values())
    distances = {subject: abs(mean - middle) for subject, mean in means.items()}
    limit = max(OUTLIER_SIGMAS * 1.4826 * median(distances.values()), OUTLIER_SHARE * abs(middle))
    distant = [subject for subject, distance in distances.items() if distance > limit]
    return sorted(distant, key=lambda subject: -distances[subject])[:MAX_OUTLIERS]


def _rounded(values: Iterable[float], digits: int) -> tuple[float | None, ...]:
    """Return the values with ``digits`` decimals, None for NaN."""
    return tuple(None if math.isnan(value) else round(value, digits) for value in values)
