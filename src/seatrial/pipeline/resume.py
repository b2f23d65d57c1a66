"""Resumes a trial: loads the results of earlier sessions and plans the remaining checks."""

from __future__ import annotations

from collections.abc import Sequence

from seatrial import report
from seatrial.checks import catalog
from seatrial.launch import cancel_earlier_jobs, launcher_for
from seatrial.model import Machine, Measurement
from seatrial.pipeline.collect import Collected
from seatrial.pipeline.plan import Plan, make_plan
from seatrial.pipeline.run_directory import Request
from seatrial.pipeline.survey import Survey


def load_earlier_session(collected: Collected, here: Machine) -> None:
    """Load the measurements of earlier sessions, without errors and without those of another machine."""
    for message in cancel_earlier_jobs(collected.settings, collected.run_dir.path):
        collected.show.warn(message)
    saved = collected.run_dir.recover()
    for warning in saved.warnings:
        collected.show.warn(warning)
    discarded = {measurement.check for measurement in saved.measurements if measurement.error}
    if saved.machine != here:
        discarded = {measurement.check for measurement in saved.measurements}
    if saved.machine != here and saved.machine and discarded:
        before, now = _description(saved.machine, here), _description(here, saved.machine)
        collected.show.warn(f"machine changed from {before} to {now}: measuring all checks again")
        report.set_aside(collected.run_dir.path)  # an old ACCEPTED must not remain if this run is killed
    if discarded:
        collected.run_dir.discard_checks(discarded)
    if saved.machine != here:  # after discard_checks: a kill in between must not mix results of two machines
        collected.run_dir.save_machine(here)
    collected.measurements = [measurement for measurement in saved.measurements if measurement.check not in discarded]
    collected.retries = [measurement for measurement in saved.retries if measurement.check not in discarded]
    collected.results, collected.sessions = saved.results, saved.sessions


def _description(machine: Machine, other: Machine) -> str:
    """Return the machine's host name, GPUs and versions that differ from the other machine's."""
    differences = [item for item in (*machine.gpus, *machine.versions) if item not in (*other.gpus, *other.versions)]
    return "; ".join([machine.host or "nodes chosen by Slurm", *differences])


def checked_plan(request: Request, survey: Survey, done: Sequence[str] = ()) -> Plan:
    """Return the plan without the checks ``done``. Raises UsageError if a launcher is not available."""
    devices = survey.devices(request.config)
    plan = make_plan(request.config, catalog(), devices, only=request.only, skip=request.skip, done=done)
    for job in plan.jobs:
        launcher_for(request.config, job.placement)  # raises before any job starts
    return plan


def remaining_plan(plan: Plan, collected: Collected, survey: Survey) -> Plan:
    """Return the plan of the checks that some rank has not measured; discard their partial measurements."""
    done = completed_checks(plan, collected.measurements)
    partial = {measurement.check for measurement in collected.measurements} - set(done)
    if partial:
        collected.run_dir.discard_checks(partial)
        collected.measurements = [
            measurement for measurement in collected.measurements if measurement.check not in partial
        ]
        collected.retries = [measurement for measurement in collected.retries if measurement.check not in partial]
    remaining = checked_plan(collected.run_dir.request, survey, done)
    collected.show.planned(remaining.jobs, collected.run_dir.path)
    return remaining


def completed_checks(plan: Plan, measurements: Sequence[Measurement]) -> list[str]:
    """Return the checks that all ranks have measured, or that the plan does not run."""
    expected = {name: job.process_count for job in plan.jobs for name in job.checks}
    not_run = {measurement.check for measurement in plan.not_run}
    ranks: dict[str, set[int]] = {measurement.check: set() for measurement in measurements}
    for measurement in measurements:
        if measurement.rank is not None:  # without a rank: not run by an earlier plan
            ranks[measurement.check].add(measurement.rank)
    return [name for name, measured in ranks.items() if name in not_run or len(measured) >= expected.get(name, 1)]
