"""What an earlier session left in the run directory, and what remains to be measured."""

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
    """Take in what an earlier run left in the directory, but for errors, and for what another machine measured."""
    for words in cancel_earlier_jobs(collected.settings, collected.run_dir.path):
        collected.show.warn(words)
    kept = collected.run_dir.recover()
    for complaint in kept.complaints:
        collected.show.warn(complaint)
    again = {one.check for one in kept.measurements if one.error}
    if kept.machine != here:
        again = {one.check for one in kept.measurements}
    if kept.machine != here and kept.machine and again:
        was, now = _description(kept.machine, here), _description(here, kept.machine)
        collected.show.warn(f"measured before on {was}, now on {now}: everything is measured again")
        report.set_aside(collected.run_dir.path)  # if we are killed, nobody is to find ACCEPTED here
    if again:
        collected.run_dir.discard_checks(again)
    if kept.machine != here:  # only now: killed between the two, we would take another machine's figures for ours
        collected.run_dir.save_machine(here)
    collected.measurements = [one for one in kept.measurements if one.check not in again]
    collected.repeats = [one for one in kept.repeats if one.check not in again]
    collected.results, collected.sessions = kept.results, kept.sessions


def _description(machine: Machine, other: Machine) -> str:
    """A machine by its name, and by what the other does not have."""
    differing = [one for one in (*machine.gpus, *machine.versions) if one not in (*other.gpus, *other.versions)]
    return "; ".join([machine.host or "nodes of Slurm's choice", *differing])


def checked_plan(request: Request, survey: Survey, done: Sequence[str] = ()) -> Plan:
    """The plan without the checks that are ``done``. Raises UsageError where a launcher misses something."""
    devices = survey.devices(request.config)
    plan = make_plan(request.config, catalog(), devices, only=request.only, skip=request.skip, done=done)
    for job in plan.jobs:
        launcher_for(request.config, job.placement)  # before anything starts: it says what is missing
    return plan


def remaining(plan: Plan, collected: Collected, survey: Survey) -> Plan:
    """The plan without what has been measured everywhere; what was measured here and there is measured again."""
    finished = done(plan, collected.measurements)
    partly = {one.check for one in collected.measurements} - set(finished)
    if partly:
        collected.run_dir.discard_checks(partly)
        collected.measurements = [one for one in collected.measurements if one.check not in partly]
        collected.repeats = [one for one in collected.repeats if one.check not in partly]
    left = checked_plan(collected.run_dir.request, survey, finished)
    collected.show.planned(left.jobs, collected.run_dir.path)
    return left


def done(plan: Plan, measurements: Sequence[Measurement]) -> list[str]:
    """Checks of which every place has been measured."""
    expected = {name: job.process_count for job in plan.jobs for name in job.checks}
    settled = {one.check for one in plan.settled}
    ranks: dict[str, set[int]] = {one.check: set() for one in measurements}
    for one in measurements:
        ranks[one.check] |= set() if one.rank is None else {one.rank}  # without one it was settled, by an earlier plan
    return [name for name, own in ranks.items() if name in settled or len(own) >= expected.get(name, 1)]
