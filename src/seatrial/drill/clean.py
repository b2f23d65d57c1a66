"""Clean runs: the trials of drills without a fault, and the false alarms that these trials raise."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from pathlib import Path

from seatrial.drill.base import BAD_OUTCOMES, Drill, Needs
from seatrial.drill.evaluate import finding_cause
from seatrial.drill.injection import Injection
from seatrial.drill.runner import load_record, unmet_need
from seatrial.model import Frozen, SeatrialError, Trial, UsageError
from seatrial.util.quantiles import CONFIDENCE, binomial_tail


class Alarm(Frozen):
    """A verdict with a bad outcome, or a finding, of a clean run. ``run``: number of the clean run, from 1.

    For a finding ``check`` is "finding", ``metric`` is the cause of the finding, and ``outcome`` is empty.
    """

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
    """The result of ``runs`` clean runs. ``alarms``: those that match no pattern of ``ignored``.

    ``upper_bound``: with confidence CONFIDENCE, at most this share of all runs has a false alarm. ``seconds``: duration
    of each clean run.
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
    """Run the trials of all ``drills`` ``runs`` times, without a fault.

    After Ctrl-C the complete runs count; without one, KeyboardInterrupt is raised. Raises UsageError if the drills need
    different machines, SeatrialError if a trial cannot run here or leaves no record.
    """
    without_fault = clean_drills(drills)
    for drill in without_fault:
        if reason := unmet_need(drill.needs):
            raise SeatrialError(f"clean runs: {reason}")
    checks = tuple(dict.fromkeys(check for drill in without_fault for check in drill.checks))
    alarms: list[Alarm] = []
    seconds: list[float] = []
    for number in range(1, runs + 1):
        progress(f"clean run {number} of {runs}: {', '.join(checks)}")
        try:
            records = [_run(drill, folder / f"clean-{number}-{index}") for index, drill in enumerate(without_fault, 1)]
        except KeyboardInterrupt:
            if not seconds:
                raise
            break
        alarms += [alarm for record in records for alarm in list_alarms(record, number)]
        seconds.append(round(sum(record.seconds for record in records), 1))
    false_alarms = [alarm for alarm in alarms if not any(fnmatchcase(alarm.name, pattern) for pattern in ignored)]
    with_alarm = len({alarm.run for alarm in false_alarms})
    return CleanRuns(
        runs=len(seconds),
        checks=checks,
        ignored=tuple(ignored),
        runs_with_alarm=with_alarm,
        upper_bound=upper_bound(with_alarm, len(seconds)),
        alarms=tuple(false_alarms),
        seconds=tuple(seconds),
    )


def _run(drill: Drill, folder: Path) -> Trial:
    """Run the trial of a drill without a fault and return its record. Raises SeatrialError if there is none."""
    injection = Injection(drill, folder.absolute())
    injection.folder.mkdir(parents=True)
    try:
        injection.start_trial()
        injection.wait_for_end(drill.limit_s)
    finally:
        injection.close()
    record = load_record(injection.run_dir)
    if record is None:
        raise SeatrialError(f"clean run {folder.name} left no record; {injection.last_error()}")
    return record


def clean_drills(drills: Sequence[Drill]) -> list[Drill]:
    """Drills without a fault whose trials have the checks, options, thresholds and limits of ``drills``.

    Trials whose settings do not contradict each other are merged. Raises UsageError if the drills need different
    machines.
    """
    machines = {drill.machine for drill in drills}
    if len(machines) != 1:
        raise UsageError(f"clean runs need drills of one machine; these drills are of {', '.join(sorted(machines))}")
    without_fault: list[Drill] = []
    for drill in drills:
        for index, clean_drill in enumerate(without_fault):
            if merged := _merged(clean_drill, drill):
                without_fault[index] = merged
                break
        else:
            # a fault may need root or programs, its trial does not
            needs = Needs(gpus=drill.needs.gpus, nodes=drill.needs.nodes, cpus=drill.needs.cpus)
            clean = replace(drill, name="clean", title="no fault", needs=needs)
            without_fault.append(replace(clean, fault="", prepare=Drill.prepare, act=Drill.act))
    limit_s = sum(drill.limit_s for drill in drills)
    return [replace(clean_drill, limit_s=limit_s) for clean_drill in without_fault]


def _merged(first: Drill, second: Drill) -> Drill | None:
    """``first`` with the checks of ``second``.

    None if the settings that all checks share differ, or those of a check that both trials have.
    """
    by_check = ((first.checks, second.checks), (first.thresholds, second.thresholds))
    is_contradiction = any(one[name] != other[name] for one, other in by_check for name in one.keys() & other)
    if is_contradiction or _shared_settings(first) != _shared_settings(second):
        return None
    needs = replace(first.needs, cpus=max(first.needs.cpus, second.needs.cpus))
    thresholds = {**first.thresholds, **second.thresholds}
    return replace(first, checks={**first.checks, **second.checks}, thresholds=thresholds, needs=needs)


def _shared_settings(drill: Drill) -> tuple[object, ...]:
    """GPUs, nodes, launcher and settings that all checks of a drill's trial share."""
    return drill.needs.gpus, drill.needs.nodes, drill.launcher, drill.settings


def list_alarms(trial: Trial, run: int) -> Iterable[Alarm]:
    """The alarms of one trial in clean run number ``run``: all verdicts with a bad outcome, and all findings."""
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
        cause = finding_cause(finding)
        yield Alarm(run=run, check="finding", metric=cause, subject=finding.subject, outcome="", message=finding.title)


def upper_bound(events: int, runs: int) -> float:
    """The one-sided upper limit of the share of runs with an event, after ``events`` in ``runs`` (Clopper-Pearson).

    Without an event it is close to 3 / runs, the rule of three (Hanley and Lippman-Hand, JAMA 1983).
    """
    if events >= runs:
        return 1.0
    low, high = events / runs, 1.0
    for _ in range(60):  # bisection to the precision of a float
        share = (low + high) / 2
        low, high = (share, high) if binomial_tail(events + 1, runs, share) < CONFIDENCE else (low, share)
    return high
