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

MAX_TRACKS = 8  # up to this number of devices, each has a track; for more: minimum, median, maximum and outliers
MAX_OUTLIERS = 2  # per gauge; each has a track
# An outlier is a device whose mean differs from the median of all means by more than OUTLIER_SIGMAS robust standard
# deviations (1.4826 × median absolute deviation), and by more than OUTLIER_SHARE of the median
OUTLIER_SIGMAS, OUTLIER_SHARE = 5.0, 0.05
# NVML reports only the current clocks event reasons. They count until the GPU's next sample, but at most this long. A
# sampler that reads one GPU per second reads each of sixteen GPUs within this time.
REASON_VALID_S = 20.0
_NAN = math.nan  # a step without a sample
# The state of a GPU in one step is a sum of bits: one for each label that applies (bit 0 is the first label), and
# _SAMPLED_BIT if the GPU was sampled in this step
_LABELS = (POWER_CAP, *THROTTLE_REASONS, NOT_SAMPLED)
_NOT_SAMPLED_BIT, _SAMPLED_BIT = 1 << _LABELS.index(NOT_SAMPLED), 1 << len(_LABELS)

# Tracks of a gauge with many devices → how each value is computed from the values of the devices
_BAND: dict[Literal["min", "median", "max"], Callable[[list[float]], float]] = {
    "min": min,
    "median": median,
    "max": max,
}


_Samples = Sequence[tuple[int, int]]  # index of each sample in the columns, and number of its step in the curves


class Curves:
    """The gauges of all devices of one kind in one phase, as means over ``step_count`` steps of ``step_s`` seconds."""

    def __init__(self, kind: Kind, step_count: int, step_s: float) -> None:
        self.devices: set[str] = set()
        self._kind, self._step_count, self._step_s = kind, step_count, step_s
        # gauge → device → means, one for each step
        self._means: dict[str, dict[str, array[float]]] = {gauge.name: {} for gauge in GAUGES[kind]}
        # GPU → its state in each step, as bits (see _LABELS); 0 outside of the segments
        self._states: dict[str, array[int]] = {}

    def add(self, device: DeviceSamples, begin: float, end: float, axis_begin: float) -> None:
        """Add a device's samples from ``begin`` to ``end`` (Unix seconds); ``axis_begin``: ``begin`` on the axis."""
        samples = []
        for index in range(bisect_left(device.time, begin), bisect_right(device.time, end)):
            step = self._step(device.time[index] - begin + axis_begin)
            if 0 <= step < self._step_count:
                samples.append((index, step))
        if not samples:
            return
        self.devices.add(device.subject)
        for gauge, means_by_device in self._means.items():
            if means := self._step_means(device.column(gauge), samples):
                earlier = means_by_device.get(device.subject, means)
                pairs = zip(earlier, means, strict=True)
                means_by_device[device.subject] = array("f", (old if math.isnan(new) else new for old, new in pairs))
        if self._kind == "gpu":
            end_step = min(self._step(axis_begin + end - begin) + 1, self._step_count)
            self._add_states(device, samples, range(self._step(axis_begin), end_step))

    def tracks(self) -> Iterator[Track]:
        """Yield the tracks of each gauge, then those of throttled GPUs."""
        for gauge in GAUGES[self._kind]:
            yield from _gauge_tracks(gauge.name, self._means[gauge.name], gauge.digits)
        yield from _throttle_tracks(self._states.values())

    def _step(self, axis_s: float) -> int:
        """Return the number of the step at ``axis_s`` seconds on the axis."""
        return int(axis_s // self._step_s)

    def _step_means(self, column: Sequence[float | None], samples: _Samples) -> array[float] | None:
        """Return the mean of the column in each step, NaN in steps without a value; None if there is no value."""
        if not column:
            return None
        sums, counts = [0.0] * self._step_count, [0] * self._step_count
        for index, step in samples:
            value = column[index]
            if value is not None:
                sums[step] += value
                counts[step] += 1
        if not any(counts):
            return None
        return array("f", (total / count if count else _NAN for total, count in zip(sums, counts, strict=True)))

    def _add_states(self, device: DeviceSamples, samples: _Samples, steps: range) -> None:
        """Set the states of ``steps``: the reasons of a sample hold until the next sample, at most REASON_VALID_S."""
        masks = device.column(CLOCKS_EVENT_REASONS)
        state_by_mask = {
            mask: _SAMPLED_BIT | _bits(device.throttle_reasons(mask)) for mask in set(masks) if mask is not None
        }
        sampled_states: dict[int, int] = {}  # step → state
        for index, step in samples if masks else ():
            mask = masks[index]
            if mask is not None:
                sampled_states[step] = sampled_states.get(step, 0) | state_by_mask[mask]
        states = self._states.setdefault(device.subject, array("B", [0] * self._step_count))
        latest, last_valid_step = _NOT_SAMPLED_BIT, -1
        for step in steps:
            if step in sampled_states:
                latest, last_valid_step = sampled_states[step], step + self._step(REASON_VALID_S)
            elif step > last_valid_step:
                latest = _NOT_SAMPLED_BIT
            if step in sampled_states or not states[step] & _SAMPLED_BIT:  # keep the samples of an earlier attempt
                states[step] = latest


def _bits(labels: Iterable[str]) -> int:
    return sum(1 << _LABELS.index(label) for label in labels)


def _throttle_tracks(states: Iterable[array[int]]) -> Iterator[Track]:
    """Yield the number of throttled GPUs by step for each reason that occurred; None in steps without a sample.

    Last comes the number of GPUs that were not sampled, if a reason occurred and a GPU was not sampled.
    """
    # one counter for each step: state → number of GPUs
    steps = [Counter(step_states) for step_states in zip(*states, strict=True)]
    any_sampled = [any(state & _SAMPLED_BIT for state in step) for step in steps]
    gpu_counts: dict[str, list[float]] = {}  # label → number of GPUs in each step
    for label in _LABELS:
        bit = _bits([label])
        gpu_counts[label] = [float(sum(count for state, count in step.items() if state & bit)) for step in steps]
    not_sampled = gpu_counts.pop(NOT_SAMPLED)
    occurred = {reason: counts for reason, counts in gpu_counts.items() if any(counts)}
    for reason, counts in occurred.items():
        values = (count if sampled else None for count, sampled in zip(counts, any_sampled, strict=True))
        yield Track(gauge=THROTTLED, label=reason, values=tuple(values))
    if occurred and any(not_sampled):
        yield Track(gauge=THROTTLED, label=NOT_SAMPLED, values=tuple(not_sampled))


def _gauge_tracks(gauge: str, means_by_device: dict[str, array[float]], digits: int) -> Iterator[Track]:
    """Yield a track per device, or with many devices minimum, median, maximum and outliers."""
    if len(means_by_device) <= MAX_TRACKS:
        for subject, means in means_by_device.items():
            yield Track(gauge=gauge, label=subject, values=_rounded(means, digits))
        return
    device_means = zip(*means_by_device.values(), strict=True)  # for each step, the means of all devices
    steps = [[mean for mean in step if not math.isnan(mean)] for step in device_means]
    for role, reduce in _BAND.items():
        curve = _rounded((reduce(step) if step else _NAN for step in steps), digits)
        yield Track(gauge=gauge, label=role, role=role, values=curve)
    mean_by_device = {
        subject: fmean(mean for mean in means if not math.isnan(mean)) for subject, means in means_by_device.items()
    }
    for subject in outliers(mean_by_device):
        yield Track(gauge=gauge, label=subject, values=_rounded(means_by_device[subject], digits))


def outliers(mean_by_subject: dict[str, float]) -> list[str]:
    """Return the subjects whose mean is an outlier, at most MAX_OUTLIERS, farthest from the median first."""
    median_mean = median(mean_by_subject.values())
    distances = {subject: abs(mean - median_mean) for subject, mean in mean_by_subject.items()}
    limit = max(OUTLIER_SIGMAS * 1.4826 * median(distances.values()), OUTLIER_SHARE * abs(median_mean))
    distant = [subject for subject, distance in distances.items() if distance > limit]
    return sorted(distant, key=lambda subject: -distances[subject])[:MAX_OUTLIERS]


def _rounded(values: Iterable[float], digits: int) -> tuple[float | None, ...]:
    """Return the values with ``digits`` decimals, None for NaN."""
    return tuple(None if math.isnan(value) else round(value, digits) for value in values)
