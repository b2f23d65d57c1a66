"""The curves of a dashboard: samples of many devices → for each gauge a few tracks that show what there is to see."""

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

MOST_LINES = 8  # devices that have a track each; of more: least, median, greatest, and who keeps away from the rest
MOST_ODD = 2
# An odd device's mean is so many standard deviations from the others' median (1.4826 × MAD estimates one), and so far
ODD_SIGMAS, ODD_SHARE = 5.0, 0.05
# How long a GPU's reasons for lower clocks are taken to hold while it waits for its next look: NVML tells them of the
# moment only, and a sampler that can afford one GPU a second comes round a node of sixteen in less
REASON_VALID_S = 20.0
_NAN = math.nan  # a step without a sample
_LABELS = (POWER_CAP, *THROTTLE_REASONS, NOT_SAMPLED)
_UNKNOWN, _KNOWN = 1 << _LABELS.index(NOT_SAMPLED), 1 << len(_LABELS)

_OF_ALL: dict[Literal["min", "median", "max"], Callable[[list[float]], float]] = {
    "min": min,
    "median": median,
    "max": max,
}


class Curves:
    """The gauges of all devices of one kind in one phase, as means over ``steps`` equal steps."""

    def __init__(self, kind: Kind, steps: int, step_s: float) -> None:
        self.devices: set[str] = set()
        self._kind, self._steps, self._step_s = kind, steps, step_s
        self._found: dict[str, dict[str, array[float]]] = {gauge.name: {} for gauge in GAUGES[kind]}
        # What each GPU said last, in each step: bits by _LABELS, and _KNOWN; 0 where it had no part in the phase
        self._said: dict[str, array[int]] = {}

    def add(self, device: DeviceSamples, begin: float, end: float, at: float) -> None:
        """Take in the samples of a device from ``begin`` to ``end``, Unix seconds; the first stands at ``at``."""
        first, last = bisect_left(device.time, begin), bisect_right(device.time, end)
        inside = [
            (n, place)
            for n in range(first, last)
            if 0 <= (place := self._place(device.time[n] - begin + at)) < self._steps
        ]
        if not inside:
            return
        self.devices.add(device.subject)
        for gauge, found in self._found.items():
            if means := self._means(device.column(gauge), inside):
                earlier = found.get(device.subject, means)
                pairs = zip(earlier, means, strict=True)
                found[device.subject] = array("f", (a if math.isnan(b) else b for a, b in pairs))
        if self._kind == "gpu":
            steps = range(self._place(at), min(self._place(at + end - begin) + 1, self._steps))
            self._note(device, inside, steps)

    def tracks(self) -> Iterator[Track]:
        for gauge in GAUGES[self._kind]:
            yield from _tracks(gauge.name, self._found[gauge.name], gauge.digits)
        yield from _throttled(self._said.values())

    def _place(self, seconds: float) -> int:
        return int(seconds // self._step_s)

    def _means(self, column: Sequence[float | None], inside: Sequence[tuple[int, int]]) -> array[float] | None:
        sums, counts = [0.0] * self._steps, [0] * self._steps
        for n, place in inside if column else ():
            value = column[n]
            if value is not None:
                sums[place] += value
                counts[place] += 1
        if not any(counts):
            return None
        return array("f", (total / count if count else _NAN for total, count in zip(sums, counts, strict=True)))

    def _note(self, device: DeviceSamples, inside: Sequence[tuple[int, int]], steps: range) -> None:
        """What a GPU said holds until it is looked at again, for LASTS_S at most. Before and after, nobody knows."""
        masks = device.column(CLOCKS_EVENT_REASONS)
        looks = [(place, mask) for n, place in inside if masks and (mask := masks[n]) is not None]
        meanings = {mask: _KNOWN | _bits(device.throttle_reasons(mask)) for mask in {mask for _, mask in looks}}
        seen: dict[int, int] = {}
        for place, mask in looks:
            seen[place] = seen.get(place, 0) | meanings[mask]
        said = self._said.setdefault(device.subject, array("B", [0] * self._steps))
        latest, until = _UNKNOWN, -1
        for place in steps:
            if place in seen:
                latest, until = seen[place], place + self._place(REASON_VALID_S)
            elif place > until:
                latest = _UNKNOWN
            if place in seen or not said[place] & _KNOWN:  # known: from beside another attempt
                said[place] = latest


def _bits(labels: Iterable[str]) -> int:
    return sum(1 << _LABELS.index(label) for label in labels)


def _throttled(said: Iterable[array[int]]) -> Iterator[Track]:
    """How many GPUs were throttled, by reason, where any was; no number where nobody knows of any GPU."""
    steps = [Counter(step) for step in zip(*said, strict=True)]
    known = [any(value & _KNOWN for value in step) for step in steps]
    counts = {
        label: [float(sum(times for value, times in step.items() if value & _bits([label]))) for step in steps]
        for label in _LABELS
    }
    unknown = counts.pop(NOT_SAMPLED)
    given = {reason: values for reason, values in counts.items() if any(values)}
    for reason, values in given.items():
        sure = (value if anybody else None for value, anybody in zip(values, known, strict=True))
        yield Track(gauge=THROTTLED, label=reason, values=tuple(sure))
    if given and any(unknown):
        yield Track(gauge=THROTTLED, label=NOT_SAMPLED, values=tuple(unknown))


def _tracks(gauge: str, found: dict[str, array[float]], digits: int) -> Iterator[Track]:
    if len(found) <= MOST_LINES:
        for subject, values in found.items():
            yield Track(gauge=gauge, label=subject, values=_plain(values, digits))
        return
    steps = [[value for value in step if not math.isnan(value)] for step in zip(*found.values(), strict=True)]
    for role, value in _OF_ALL.items():
        curve = _plain((value(step) if step else _NAN for step in steps), digits)
        yield Track(gauge=gauge, label=role, role=role, values=curve)
    means = {subject: fmean(v for v in values if not math.isnan(v)) for subject, values in found.items()}
    for subject in odd(means):
        yield Track(gauge=gauge, label=subject, values=_plain(found[subject], digits))


def odd(means: dict[str, float]) -> list[str]:
    """Who keeps furthest away from the rest, if anybody does: at most MOST_ODD subjects."""
    middle = median(means.values())
    away = {subject: abs(mean - middle) for subject, mean in means.items()}
    limit = max(ODD_SIGMAS * 1.4826 * median(away.values()), ODD_SHARE * abs(middle))
    far = [subject for subject, distance in away.items() if distance > limit]
    return sorted(far, key=lambda subject: -away[subject])[:MOST_ODD]


def _plain(values: Iterable[float], digits: int) -> tuple[float | None, ...]:
    """For the record: no more digits than were measured."""
    return tuple(None if math.isnan(value) else round(value, digits) for value in values)
