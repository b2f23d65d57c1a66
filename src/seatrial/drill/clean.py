"""Clean runs: the trials of drills without a fault, and the alarms that they raise nevertheless."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from pydantic import JsonValue

from seatrial.drill.base import BAD_OUTCOMES, Drill, DrillTrial
from seatrial.drill.injection import Injection
from seatrial.drill.runner import record_of, why_not_here
from seatrial.model import Frozen, SeatrialError, Trial, UsageError

CONFIDENCE = 0.95


class Alarm(Frozen):
    """A bad verdict or a finding of a clean run; ``outcome`` is empty for a finding."""

    run: int
    check: str
    metric: str
    subject: str
    outcome: str
    message: str

    @property
    def name(self) -> str:
        """``CHECK:METRIC``, which the patterns of ignored alarms match."""
        return f"{self.check}:{self.metric}"


class CleanRuns(Frozen):
    """The alarms of ``runs`` clean runs. ``ignored``: patterns of alarms that are not counted.

    ``upper_bound``: largest share of runs with a false alarm that these runs allow, with confidence CONFIDENCE.
    """

    runs: int
    checks: tuple[str, ...]
    ignored: tuple[str, ...]
    runs_with_alarm: int
    upper_bound: float
    alarms: tuple[Alarm, ...]
    seconds: tuple[float, ...]


def run_clean(
    drills: Sequence[Drill], runs: int, ignored: Sequence[str], folder: Path, progress: Callable[[str], None]
) -> CleanRuns:
    """Run one trial with the checks of all ``drills`` ``runs`` times, without a fault.

    Raises UsageError if the drills need different machines, SeatrialError if one cannot run here or leaves no record.
    """
    trial = clean_trial(drills)
    if reason := why_not_here(trial.needs):
        raise SeatrialError(f"clean runs: {reason}")
    alarms: list[Alarm] = []
    seconds = []
    for number in range(1, runs + 1):
        progress(f"clean run {number} of {runs}: {', '.join(trial.trial.checks)}")
        injection = Injection(trial, (folder / f"clean-{number}").absolute())
        injection.folder.mkdir(parents=True)
        try:
            injection.start_trial()
            injection.wait_for_end(trial.limit_s)
        finally:
            injection.close()
        record = record_of(injection.run_dir)
        if record is None:
            raise SeatrialError(f"clean run {number} left no record; {injection.last_error()}")
        alarms += alarms_of(record, number)
        seconds.append(round(record.seconds, 1))
    false_alarms = [alarm for alarm in alarms if not any(fnmatchcase(alarm.name, pattern) for pattern in ignored)]
    with_alarm = len({alarm.run for alarm in false_alarms})
    return CleanRuns(
        runs=runs,
        checks=tuple(trial.trial.checks),
        ignored=tuple(ignored),
        runs_with_alarm=with_alarm,
        upper_bound=upper_bound(with_alarm, runs),
        alarms=tuple(false_alarms),
        seconds=tuple(seconds),
    )


def clean_trial(drills: Sequence[Drill]) -> Drill:
    """A drill without a fault, whose trial has the checks of all ``drills``. Raises UsageError for several machines."""
    machines = {drill.machine for drill in drills}
    if len(machines) != 1:
        raise UsageError(f"clean runs need drills of one machine; these drills are of {', '.join(sorted(machines))}")
    checks: dict[str, dict[str, JsonValue]] = {}
    for drill in drills:
        for name, options in drill.trial.checks.items():
            checks.setdefault(name, dict(options))
    largest = max(drills, key=lambda drill: (drill.needs.nodes, drill.needs.gpus))
    return replace(
        largest,
        name="clean",
        title="no fault",
        fault="",
        trial=DrillTrial(checks=checks, launcher=largest.trial.launcher),
        limit_s=sum(drill.limit_s for drill in drills),
    )


def alarms_of(trial: Trial, run: int) -> Iterable[Alarm]:
    """All verdicts with a bad outcome, and all findings."""
    for verdict in trial.verdicts:
        if verdict.outcome in BAD_OUTCOMES:
            yield Alarm(
                run=run,
                check=verdict.check,
                metric=verdict.metric,
                subject=verdict.subject,
                outcome=verdict.outcome.value,
                message=verdict.summary or verdict.detail,
            )
    for finding in trial.findings:
        yield Alarm(run=run, check="finding", metric="", subject=finding.subject, outcome="", message=finding.title)


def upper_bound(events: int, runs: int) -> float:
    """The one-sided upper limit of the share of runs with an event, after ``events`` in ``runs`` (Clopper and Pearson).

    Without an event it is close to 3 / runs, the rule of three (Hanley and Lippman-Hand, JAMA 1983).
    """
    if events >= runs:
        return 1.0
    low, high = events / runs, 1.0
    for _ in range(60):
        share = (low + high) / 2
        at_most = sum(math.comb(runs, k) * share**k * (1 - share) ** (runs - k) for k in range(events + 1))
        low, high = (share, high) if at_most > 1 - CONFIDENCE else (low, share)
    return high
