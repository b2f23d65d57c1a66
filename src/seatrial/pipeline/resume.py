"""Resumes a trial: loads the results of earlier sessions and plans the remaining checks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from seatrial import report
from seatrial.checks import catalog
from seatrial.launch import runs_as_root, select_launcher, trial_launcher
from seatrial.model import Job, Machine, Measurement, SeatrialError, Trial, Why
from seatrial.pipeline.plan import Plan
from seatrial.pipeline.planned_jobs import plan_request
from seatrial.pipeline.results import TrialResults
from seatrial.pipeline.run_directory import Request, load_trial
from seatrial.pipeline.this_host import ThisHost


def load_earlier_sessions(results: TrialResults, machine: Machine) -> None:
    """Load the results of earlier sessions, except those of checks that must be measured again.

    These are checks with an ERROR, and checks that left out a metric with a threshold of the trial because its samples
    varied too much. All checks are measured again if ``machine``, where the trial runs now, is not the machine of the
    measurements. Raises GpuExchanged if a GPU was exchanged between two of the measurements.
    """
    for message in trial_launcher(results.settings).cancel_earlier_jobs(results.run_dir.path):
        results.display.warn(message)
    results.run_dir.recover(results)
    for warning in results.warnings:
        results.display.warn(warning)
    thresholds = {name: check.expect for name, check in results.settings.checks.items()}
    discarded_checks = {
        measurement.check
        for measurement in results.measurements
        if measurement.error
        or any(
            each.why is Why.UNREADABLE and each.metric in thresholds.get(measurement.check, ())
            for each in measurement.absent
        )
    }
    machine_changed = results.machine != machine
    if machine_changed:
        discarded_checks = {measurement.check for measurement in results.measurements}
    if machine_changed and results.machine and discarded_checks:
        before, now = _description(results.machine, machine), _description(machine, results.machine)
        results.display.warn(f"machine changed from {before} to {now}: measuring all checks again")
        report.set_aside(results.run_dir.path)  # else a killed run would leave the ACCEPTED of the other machine
    if discarded_checks:
        results.discard(discarded_checks)
    if machine_changed:  # after the discard: a kill in between must not mix results of two machines
        results.run_dir.save(machine)
    usable, checks = results.measurements, results.settings.checks
    results.measurements = [measurement for measurement in usable if measurement.check in checks]
    results.localization = [measurement for measurement in usable if measurement.check not in checks]
    for measurement in (*usable, *results.retries):
        if measurement.gpu_uuid and "/gpu" in measurement.subject:
            results.gpus.setdefault(measurement.subject, measurement)
            results.refuse_other_gpu(measurement)


def _description(machine: Machine, other: Machine) -> str:
    """Return the machine's host name, and those of its GPUs and versions that differ from the other machine's."""
    differences = [item for item in (*machine.gpus, *machine.versions) if item not in (*other.gpus, *other.versions)]
    return "; ".join([machine.host or "nodes of a scheduler", *differences])


def startable_plan(request: Request, this_host: ThisHost, nodes: int, done: Sequence[str] = ()) -> Plan:
    """Return the plan for ``nodes`` without the checks ``done``. Raises UsageError if a launcher is not available."""
    plan = plan_request(request, this_host, nodes, done)
    for job in plan.jobs:
        select_launcher(request.config, job.placement)  # raises before any job starts
    return plan


def remaining_plan(plan: Plan, results: TrialResults, this_host: ThisHost, nodes: int) -> Plan:
    """Return the plan of the checks that are not complete, and show it. Incomplete measurements are discarded."""
    done = completed_checks(plan, results.measurements)
    partial = {measurement.check for measurement in results.measurements} - set(done)
    if partial:
        results.discard(partial)
    remaining = startable_plan(results.run_dir.request, this_host, nodes, done)
    remaining = replace(
        remaining, jobs=tuple(_without_measured_time(job, results.run_dir.path) for job in remaining.jobs)
    )
    if remaining.jobs or remaining.not_run:
        results.display.show_plan(
            remaining.jobs,
            results.run_dir.path,
            remaining.excluded_checks,
            remaining.checks_not_run,
            as_root=runs_as_root(results.settings),
        )
    return remaining


def _without_measured_time(job: Job, run_dir: Path) -> Job:
    """Return the job; the typical duration of its checks does not include what earlier sessions measured."""
    rest = {
        name: max(0.0, seconds - catalog()[name].measured_s(run_dir / "artifacts" / name))
        for name, seconds in job.typical.items()
    }
    return job.model_copy(update={"typical": rest})


def completed_checks(plan: Plan, measurements: Sequence[Measurement]) -> list[str]:
    """Return the checks that all ranks have measured, or that the plan does not run."""
    rank_counts = {name: job.process_count for job in plan.jobs for name in job.checks}
    not_run = plan.checks_not_run
    ranks_by_check: dict[str, set[int]] = {measurement.check: set() for measurement in measurements}
    for measurement in measurements:
        if measurement.rank is not None:  # None: an earlier plan could not run the check, and recorded SKIP or ERROR
            ranks_by_check[measurement.check].add(measurement.rank)
    return [name for name, ranks in ranks_by_check.items() if name in not_run or len(ranks) >= rank_counts.get(name, 1)]


def finished_record(run_dir: Path, trial: Trial) -> Trial | None:
    """Return the recorded trial if it and its reports are complete and have the verdicts and decision of ``trial``."""
    try:
        recorded = load_trial(run_dir)
        has_same_verdicts = recorded.verdicts == trial.as_stored().verdicts
        recorded = recorded.model_copy(update={"verdicts": trial.verdicts})  # trial.json has none with PASS
        texts = report.render_all(recorded)
        reports_are_complete = all((run_dir / name).read_text(encoding="utf-8") == text for name, text in texts.items())
    except (SeatrialError, OSError, UnicodeDecodeError):
        return None
    fields = ("measurements", "retries", "localization", "missing_nodes", "decision", "stop_reason")
    has_same_results = has_same_verdicts and all(getattr(recorded, name) == getattr(trial, name) for name in fields)
    return recorded if reports_are_complete and has_same_results else None
