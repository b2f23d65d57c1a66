"""One side of a comparison: the records of a machine, and what they say of each part."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from statistics import median

from seatrial.checks import catalog
from seatrial.judge.plausibility import TIME_UNITS
from seatrial.model import Outcome, Trial, ends
from seatrial.report.identity import Gpu, gpus_of
from seatrial.report.parts import parts, problems

Speed = tuple[str, str, str]  # check, metric and unit


@cache
def _compared(check: str) -> frozenset[str]:
    """The names of the speeds, or families, of a check that are compared.

    These are the rates and durations with a limit; of a check without limits, its first speed. Other metrics follow
    from them, such as the bus bandwidth at other sizes: to test them too would hide small losses.
    """
    declared = [
        each for each in catalog()[check].declared if each.speed and (each.unit in TIME_UNITS or "/s" in each.unit)
    ]
    limited = frozenset(each.name for each in declared if each.rules or each.key)
    return limited or frozenset(each.name for each in declared[:1])


def speed_values(trial: Trial) -> dict[Speed, dict[str, float]]:
    """Speed → subject → value; a retry is a second value of one run, so the median counts."""
    values: dict[Speed, dict[str, list[float]]] = {}
    for measurement in (*trial.measurements, *trial.retries):
        if check := catalog().get(measurement.check):
            for metric in measurement.metrics:
                if (declared := check.declaration(metric.name)) and declared.name in _compared(check.name):
                    speed = check.name, metric.name, metric.unit
                    values.setdefault(speed, {}).setdefault(metric.subject, []).append(metric.value)
    return {speed: {part: median(each) for part, each in by_part.items()} for speed, by_part in values.items()}


@dataclass
class Side:
    """Records by start time. A GPU has a key, under which it is found again in another node (see ``sides``).

    ``keys``: subject → key of each GPU of the last record. ``places``: key → last subject. ``values``: speed → key →
    one value for each record that has one. ``failing``: key → cause and worst figure of parts that fail in most
    records, and the checks that found them.
    """

    trials: Sequence[Trial]
    keys: dict[str, str] = field(default_factory=dict)
    gpus: dict[str, Gpu] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)
    values: dict[Speed, dict[str, list[float]]] = field(default_factory=dict)
    checks: set[str] = field(default_factory=set)
    failing: dict[str, tuple[str, set[str]]] = field(default_factory=dict)

    def name(self, key: str) -> str:
        """The last place of a part, with the serial number of a GPU."""
        serial = self.gpus.get(key, Gpu()).serial
        return self.places[key] + (f" (serial {serial})" if serial else "")


def sides(before: Sequence[Trial], after: Sequence[Trial]) -> tuple[Side, Side]:
    """Both sides; GPUs are matched by the first identity that all GPUs of all records have, else by place."""
    records = [gpus_of(trial).values() for trial in (*before, *after)]
    identity = ""
    for name in ("uuid", "serial"):
        found = [{getattr(gpu, name) for gpu in gpus} for gpus in records]
        if all(len(of_record - {""}) == len(gpus) for of_record, gpus in zip(found, records, strict=True)):
            identity = name
    return _side(before, identity), _side(after, identity)


def _side(trials: Sequence[Trial], identity: str) -> Side:
    side = Side(sorted(trials, key=lambda trial: trial.started))
    fails = Counter[str]()
    for trial in side.trials:
        gpus = gpus_of(trial)
        side.keys = {subject: getattr(gpu, identity) if identity else subject for subject, gpu in gpus.items()}
        side.gpus |= {side.keys[subject]: gpu for subject, gpu in gpus.items()}
        side.places |= {key: subject for subject, key in side.keys.items()}
        side.checks |= {each.check for each in trial.measurements if each.metrics}
        for speed, by_subject in speed_values(trial).items():
            for subject, value in by_subject.items():
                key = _part_key(subject, side.keys)
                side.places[key] = subject
                side.values.setdefault(speed, {}).setdefault(key, []).append(value)
        for problem in problems([part for part in parts(trial) if part.outcome is Outcome.FAIL]):
            failed = {check for each in problem.figures if each.outcome is Outcome.FAIL for check in each.checks}
            for part in problem.parts:
                key = _part_key(part.name, side.keys)
                side.places.setdefault(key, part.name)
                side.failing[key] = problem.text, failed
                fails[key] += 1
    side.failing = {key: failure for key, failure in side.failing.items() if 2 * fails[key] > len(trials)}
    return side


def _part_key(subject: str, keys: Mapping[str, str]) -> str:
    """The key of a subject, in which each GPU, also at the end of a link, is replaced by its own key."""
    return "->".join(keys.get(end, end) for end in ends(subject))
