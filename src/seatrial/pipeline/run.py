"""The pipeline: discover → plan → launch → collect → judge → diagnose → report. ``run`` reads from top to bottom."""

from __future__ import annotations

import os
import socket
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from seatrial import __version__, report, telemetry
from seatrial.analysis import read
from seatrial.checks import catalog
from seatrial.config import layers
from seatrial.config.layers import CheckSchema, Resolved
from seatrial.config.schema import Config
from seatrial.diagnose import diagnose, relocated
from seatrial.diagnose.throttling import throttled
from seatrial.judge import judge, plausibility, site_baseline, to_repeat
from seatrial.judge.decision import decide
from seatrial.judge.unjudged import unjudged
from seatrial.launch import by_slurm, elsewhere, end_earlier_jobs, launcher_for
from seatrial.launch.watch import run_job
from seatrial.model import (
    REHEARSAL,
    Baseline,
    Decision,
    Finding,
    Insight,
    Job,
    JobState,
    Machine,
    Measurement,
    Session,
    Timing,
    Trial,
    UsageError,
    Verb,
    Verdict,
    first_fault,
    worst,
)
from seatrial.model.telemetry import Telemetry
from seatrial.pipeline.collect import Collected, Show
from seatrial.pipeline.plan import Plan, again, make_plan
from seatrial.pipeline.run_directory import Request, RunDir, load_trial
from seatrial.pipeline.survey import Survey, discover
from seatrial.util import processes, signals

INTERRUPTED = "interrupted"


def run(run_dir: RunDir, show: Show) -> Trial:
    """Carry out the trial that ``run_dir`` was made for, or what is left of it. The reports lie in it afterwards.

    An interruption or a full disk ends the measuring, not the reporting: what is known is judged and written.
    """
    collected = Collected(run_dir, run_dir.request.config, show, show_outcome)
    collected.timings.append(Timing(name="start of the command", kind="overhead", seconds=processes.age_s()))
    begun = time.monotonic() - processes.age_s()
    with collected.timed("discover"):
        survey = discover()
    with collected.timed("plan"):
        plan = _plan(collected, survey)
        baseline = _site(collected.settings)
        plausibility.refuse(collected.settings, catalog(), survey.models(collected.settings), baseline)
    with _until_stopped(collected):
        _take_up(collected, survey.machine(collected.settings))
        left = _left_of(plan, collected, survey)
        for measurement in left.settled:
            collected.measured(measurement)
        for job in left.jobs:
            _run_job(_on_the_same_nodes(job, collected), collected)
        for job in _repeats(plan, collected, baseline):
            _run_job(_on_the_same_nodes(job, collected), collected)
    # judge and write to the end: a Ctrl-C in these seconds would leave files that say something else than we do
    with signals.uninterrupted():
        collected.put_in_order()
        said = _said(plan, collected, baseline)
        return _reported(_record(collected, plan, survey, said, begun), collected)


def show_outcome(collected: Collected, check: str) -> None:
    """Show the outcome of a check as it stands: a FAIL that is to be measured again is not final."""
    config = collected.settings.model_copy(update={"checks": {check: collected.settings.checks[check]}})
    first, repeats = (
        [one for one in every if one.check == check] for every in (collected.measurements, collected.repeats)
    )
    to_come = None if collected.settings.retry and not repeats else repeats
    verdicts = judge(config, collected.jobs, first, catalog(), {}, repeats=to_come)
    outcome = worst(verdict.outcome for verdict in verdicts)
    reason = next((verdict.reason for verdict in verdicts if verdict.outcome is outcome), "")
    collected.show.judged(check, outcome, reason, max(one.seconds for one in repeats or first))


@dataclass(frozen=True)
class _Said:
    """What the measurements say: judged, diagnosed, and beside what was sampled."""

    baseline: Baseline | None
    verdicts: tuple[Verdict, ...]
    insights: tuple[Insight, ...]
    findings: tuple[Finding, ...]
    telemetry: Telemetry | None


def _said(plan: Plan, collected: Collected, baseline: Baseline | None) -> _Said:
    settings, measurements, repeats = collected.settings, collected.measurements, collected.repeats
    with collected.timed("judge"):
        verdicts = judge(settings, plan.jobs, measurements, catalog(), plan.left_out, baseline, repeats=repeats)
        insights = read(settings, measurements, verdicts, catalog(), baseline)
    with collected.timed("diagnose"):
        findings = diagnose(collected.results, measurements, repeats, verdicts, catalog(), collected.run_dir.path)
    with collected.timed("telemetry"):
        sampled = _sampled(plan, collected)
    return _Said(baseline, verdicts, insights, (*findings, *throttled(sampled)), sampled)


@dataclass(frozen=True)
class Preview:
    """What a run would do: its plan, and each job's rendered command."""

    plan: Plan
    rendered: tuple[tuple[Job, str], ...]


def preview(request: Request) -> Preview:
    """Plan and render, and start nothing. Raises UsageError."""
    settings, survey = request.config, discover()
    plausibility.refuse(settings, catalog(), survey.models(settings), _site(settings))
    plan = make_plan(settings, catalog(), survey.devices(settings), only=request.only, skip=request.skip)
    rendered = ((job, launcher_for(settings, job.placement).render(job, Path("RUN")).text) for job in plan.jobs)
    return Preview(plan, tuple(rendered))


def prepare(request: Request, path: Path) -> Preview:
    """A run directory for jobs that a person starts: all that their workers need. Raises UsageError.

    What they leave there is taken up by ``run`` on the same directory.
    """
    run_dir = RunDir.create(path, request)
    survey = discover()
    plausibility.refuse(request.config, catalog(), survey.models(request.config), _site(request.config))
    plan = make_plan(request.config, catalog(), survey.devices(request.config), only=request.only, skip=request.skip)
    run_dir.keep_machine(survey.machine(request.config))
    rendered = []
    for job in plan.jobs:
        if job.placement != "control":  # which runs here, when the others have ended
            folder = run_dir.path / "jobs" / job.name
            folder.mkdir(parents=True)
            (folder / "job.json").write_text(job.model_dump_json(indent=2), encoding="utf-8")
            text = launcher_for(request.config, job.placement).render(job, run_dir.path).text
            (folder / "torchrun.sh").write_text(text, encoding="utf-8")
            rendered.append((job, text))
    return Preview(plan, tuple(rendered))


def resolve(trial: str, overrides: Sequence[tuple[str, str, Any]]) -> Resolved:
    """The config of the trial called ``trial``. Raises UsageError."""
    known = {name: CheckSchema(check.options, check.metrics) for name, check in catalog().items()}
    return layers.resolve(trial, overrides=overrides, environ=os.environ, known=known)


def learn(name: str, paths: Sequence[Path]) -> str:
    """The baseline of these runs, judged by the rules of today, as the text of its file. Raises UsageError."""
    learned = site_baseline.learn(name, {str(path): rejudge(load_trial(path)) for path in paths}, catalog())
    plausibility.refuse_site(learned, catalog())
    return site_baseline.dump(learned)


def rejudge(trial: Trial, baseline: Path | None = None) -> Trial:
    """An old record with the rules of today, and another site baseline if one is given: nothing is measured again.

    Raises UsageError when its config is not one of this version, or the baseline asks for what no hardware can do.
    """
    try:
        settings = Config.model_validate(trial.config)
    except ValidationError as error:
        raise UsageError(f"the record is not to be judged by this version: config.{first_fault(error)}") from error
    known = site_baseline.load(baseline, catalog()) if baseline else trial.baseline
    if baseline and known:
        plausibility.refuse_site(known, catalog())
    verdicts = judge(settings, trial.jobs, trial.measurements, catalog(), trial.left_out, known, repeats=trial.repeats)
    obstacles = (trial.stopped, trial.trouble)
    decision = _decide(settings, trial.measurements, verdicts, trial.left_out, trial.decision.scope, obstacles)
    told = read(settings, trial.measurements, verdicts, catalog(), known)
    findings = relocated(trial, verdicts, catalog())
    return trial.model_copy(
        update={
            "verdicts": verdicts,
            "decision": decision,
            "baseline": known,
            "insights": told,
            "findings": findings,
        }
    )


def _site(settings: Config) -> Baseline | None:
    return site_baseline.load(Path(settings.baseline), catalog()) if settings.baseline else None


def _sampled(plan: Plan, collected: Collected) -> Telemetry | None:
    """What the samplers saw, beside all jobs of the trial, those of earlier sessions too."""
    phases = {name: str(check.phase) for name, check in catalog().items()}
    found = telemetry.of_run(collected.run_dir.path, plan.jobs, collected.measurements, phases)
    for complaint in found.complaints if found else ():
        collected.show.complain(complaint)
    return found


def _take_up(collected: Collected, here: Machine) -> None:
    """Take in what an earlier run left in the directory, but for errors, and for what another machine measured."""
    for words in end_earlier_jobs(collected.settings, collected.run_dir.path):
        collected.show.complain(words)
    kept = collected.run_dir.recover()
    for complaint in kept.complaints:
        collected.show.complain(complaint)
    again = {one.check for one in kept.measurements if one.error}
    if kept.machine != here:
        again = {one.check for one in kept.measurements}
    if kept.machine != here and kept.machine and again:
        was, now = _told_apart(kept.machine, here), _told_apart(here, kept.machine)
        collected.show.complain(f"measured before on {was}, now on {now}: everything is measured again")
        report.set_aside(collected.run_dir.path)  # if we are killed, nobody is to find ACCEPTED here
    if again:
        collected.run_dir.forget(again)
    if kept.machine != here:  # only now: killed between the two, we would take another machine's figures for ours
        collected.run_dir.keep_machine(here)
    collected.measurements = [one for one in kept.measurements if one.check not in again]
    collected.repeats = [one for one in kept.repeats if one.check not in again]
    collected.results, collected.sessions = kept.results, kept.sessions


def _told_apart(machine: Machine, other: Machine) -> str:
    """A machine by its name, and by what the other does not have."""
    own = [one for one in (*machine.gpus, *machine.system) if one not in (*other.gpus, *other.system)]
    return "; ".join([machine.host or "nodes of Slurm's choice", *own])


def _plan(collected: Collected, survey: Survey, done: Sequence[str] = ()) -> Plan:
    request = collected.run_dir.request
    devices = survey.devices(request.config)
    plan = make_plan(request.config, catalog(), devices, only=request.only, skip=request.skip, done=done)
    for job in plan.jobs:
        launcher_for(request.config, job.placement)  # before anything starts: it says what is missing
    return plan


def _left_of(plan: Plan, collected: Collected, survey: Survey) -> Plan:
    """The plan without what has been measured everywhere; what was measured here and there is measured again."""
    done = _done(plan, collected.measurements)
    partly = {one.check for one in collected.measurements} - set(done)
    if partly:
        collected.run_dir.forget(partly)
        collected.measurements = [one for one in collected.measurements if one.check not in partly]
        collected.repeats = [one for one in collected.repeats if one.check not in partly]
    left = _plan(collected, survey, done)
    collected.show.planned(left.jobs, collected.run_dir.path)
    return left


def _done(plan: Plan, measurements: Sequence[Measurement]) -> list[str]:
    """Checks of which every place has been measured."""
    expected = {name: job.places for job in plan.jobs for name in job.checks}
    settled = {one.check for one in plan.settled}
    ranks: dict[str, set[int]] = {one.check: set() for one in measurements}
    for one in measurements:
        ranks[one.check] |= set() if one.rank is None else {one.rank}  # without one it was settled, by an earlier plan
    return [name for name, own in ranks.items() if name in settled or len(own) >= expected.get(name, 1)]


def _repeats(plan: Plan, collected: Collected, baseline: Baseline | None) -> list[Job]:
    """The jobs that measure once more what fell short, and has not been measured a second time everywhere."""
    settings, known = collected.settings, catalog()
    if not settings.retry:
        return []
    reasons = to_repeat(settings, collected.measurements, collected.repeats, known, baseline)
    if any(one.check in reasons for one in collected.repeats):
        collected.run_dir.forget_repeats(reasons)
        collected.repeats = [one for one in collected.repeats if one.check not in reasons]
    jobs = list(again(plan.jobs, reasons, settings.limits.startup_s))
    for job in jobs:
        collected.show.repeating(job, reasons)
    return jobs


def _on_the_same_nodes(job: Job, collected: Collected) -> Job:
    """``job``, asking for the nodes of the jobs before it: of other nodes it would say nothing about these."""
    used = [one.nodes for one in collected.results if one.nodes and one.state is JobState.COMPLETED]
    if job.placement == "control" or not used or not collected.measurements:
        return job
    return job.model_copy(update={"nodelist": used[-1]})


def _run_job(job: Job, collected: Collected) -> None:
    launcher = launcher_for(collected.settings, job.placement)
    for result in run_job(launcher, job, collected.run_dir.path, collected.settings.limits, catalog(), collected):
        collected.finished(result)
        measured = collected.repeats if job.again else collected.measurements
        measuring = sum(_check_seconds(job.checks, measured).values())
        overhead = max(0.0, result.seconds - measuring)
        name = f"start and end of job {job.name}"
        collected.timings.append(Timing(name=name, kind="overhead", seconds=overhead))


def _check_seconds(checks: Sequence[str], measurements: Sequence[Measurement]) -> dict[str, float]:
    """How long each check took: its slowest place, since the others wait for it."""
    return {
        name: max(one.seconds for one in measurements if one.check == name)
        for name in checks
        if any(one.check == name for one in measurements)
    }


@contextmanager
def _until_stopped(collected: Collected) -> Iterator[None]:
    """End measuring, but not the trial, on Ctrl-C and on a disk that takes no more."""
    try:
        yield
    except KeyboardInterrupt:
        collected.stopped = INTERRUPTED
    except OSError as error:
        collected.stopped = f"{error.strerror or error}: {error.filename or collected.run_dir.path}"
        collected.show.complain(
            f"{collected.stopped}. What was measured so far is kept; go on with "
            f"seatrial run --resume {collected.run_dir.path}"
        )


def _record(collected: Collected, plan: Plan, survey: Survey, said: _Said, begun: float) -> Trial:
    request, settings = collected.run_dir.request, collected.settings
    trouble = survey.obstacle(settings)
    seconds = _check_seconds(list(settings.checks), collected.measurements)
    more = _check_seconds(list(settings.checks), collected.repeats)
    seconds |= {f"{name}, again": value for name, value in more.items()}
    now = Session(
        started=time.time() - (time.monotonic() - begun),
        seconds=time.monotonic() - begun,
        command=("seatrial", *sys.argv[1:]),
        stopped=collected.stopped,
        overhead=tuple(collected.timings),
    )
    sessions = (*collected.sessions, now)
    overhead = [timing for session in sessions for timing in session.overhead]
    return Trial(
        seatrial=__version__,
        name=settings.name,
        command=request.command,
        host=socket.gethostname(),
        started=request.started,
        seconds=sum(session.seconds for session in sessions),
        config=settings.model_dump(mode="json"),
        origins=request.origins,
        environment=survey.facts,
        jobs=plan.jobs,
        left_out=plan.left_out,
        stopped=collected.stopped,
        trouble=trouble,
        baseline=said.baseline,
        sessions=sessions,
        results=tuple(collected.results),
        measurements=tuple(collected.measurements),
        repeats=tuple(collected.repeats),
        verdicts=said.verdicts,
        findings=said.findings,
        insights=said.insights,
        telemetry=said.telemetry,
        timings=(*overhead, *(Timing(name=k, kind="check", seconds=v) for k, v in seconds.items())),
        decision=_decide(
            settings,
            collected.measurements,
            said.verdicts,
            plan.left_out,
            _scope(settings, plan, survey),
            (collected.stopped, trouble),
        ),
    )


def _reported(trial: Trial, collected: Collected) -> Trial:
    """Write the reports. A record that could not be written accepts nothing, and no file says otherwise."""
    try:
        collected.run_dir.keep_session(trial.sessions[-1])
        with collected.timed("report"):
            report.render_all(trial)
        # made once more, so that the reports show what they took themselves
        trial = trial.model_copy(update={"timings": (*trial.timings, collected.timings[-1])})
        report.write_all(trial, collected.run_dir.path)
    except (OSError, report.NotWritten) as error:
        collected.show.complain(f"the reports are not whole: {error}")
        if trial.decision.value is Verb.ACCEPTED:
            reason = f"the record of the trial could not be written: {error}"
            incomplete = Decision(value=Verb.INCOMPLETE, reason=reason, scope=trial.decision.scope)
            trial = trial.model_copy(update={"decision": incomplete})
        report.write_some(trial, collected.run_dir.path)
    return trial


def _decide(
    settings: Config,
    measurements: Sequence[Measurement],
    verdicts: Sequence[Verdict],
    left_out: Mapping[str, str],
    scope: str,
    obstacles: Sequence[str],
) -> Decision:
    required = {name: check.required for name, check in settings.checks.items()}
    return decide(required, verdicts, left_out, scope, obstacles, unjudged(catalog(), measurements, verdicts))


def _scope(settings: Config, plan: Plan, survey: Survey) -> str:
    """Of what the decision speaks, and of what it does not."""
    nodes = f"{settings.cluster.nodes} node" + ("s" if settings.cluster.nodes > 1 else "")
    devices = survey.devices(settings)
    if devices.trouble:
        return f"{nodes}; {devices.trouble}"
    if not devices.usable_gpus:
        there = f"no GPU used, though there are {survey.gpus.present}" if survey.gpus.present else "no GPU"
        return f"{REHEARSAL}: {nodes}, {there}; this says nothing about GPUs or a fabric"
    used = next((job.ranks_per_node for job in plan.jobs if job.placement == "ranks"), 0)
    if not used:
        return f"{nodes}; no check of this trial computes on a GPU"
    if by_slurm(settings):
        return f"{nodes} of a Slurm cluster, {used} GPUs each"
    if elsewhere(settings):
        return f"{nodes} of a person's choice, {used} GPUs each"
    visible = survey.visible(settings)
    models = " + ".join(sorted({one.name or "unknown GPU" for one in visible[:used]}))
    rest = f" of {len(visible)}" if used < len(visible) else ""
    unpromised = "" if settings.cluster.gpus_per_node else "; nobody said how many were promised (--gpus-per-node)"
    return f"{nodes}, {used} × {models}{rest}{unpromised}"
