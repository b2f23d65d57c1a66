"""The pipeline: discover → plan → launch → collect → judge → diagnose → report. ``run`` reads from top to bottom."""

from __future__ import annotations

import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from seatrial import __version__, report, telemetry
from seatrial.analysis import trial_insights
from seatrial.checks import catalog
from seatrial.diagnose import diagnose
from seatrial.diagnose.throttling import throttling_findings
from seatrial.judge import checks_to_retry, judge, plausibility
from seatrial.launch import launcher_for
from seatrial.launch.watch import run_job
from seatrial.model import (
    Baseline,
    Decision,
    DecisionValue,
    Finding,
    Insight,
    Job,
    JobState,
    Measurement,
    Session,
    Timing,
    Trial,
    Verdict,
    worst,
)
from seatrial.model.telemetry import Telemetry
from seatrial.pipeline.collect import Collected, Show
from seatrial.pipeline.plan import Plan, retry_jobs
from seatrial.pipeline.rejudge import baseline_of, decision_of
from seatrial.pipeline.resume import checked_plan, load_earlier_session, remaining
from seatrial.pipeline.run_directory import RunDir
from seatrial.pipeline.survey import Survey, cpu_only, discover, scope_of
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
        plan = checked_plan(run_dir.request, survey)
        baseline = baseline_of(collected.settings)
        plausibility.validate_thresholds(collected.settings, catalog(), survey.models(collected.settings), baseline)
    with _until_stopped(collected):
        load_earlier_session(collected, survey.machine(collected.settings))
        left = remaining(plan, collected, survey)
        for measurement in left.settled:
            collected.measured(measurement)
        for job in left.jobs:
            _run_job(_on_the_same_nodes(job, collected), collected)
        for job in _repeats(plan, collected, baseline):
            _run_job(_on_the_same_nodes(job, collected), collected)
    # judge and write to the end: a Ctrl-C in these seconds would leave files that say something else than we do
    with signals.signals_deferred():
        collected.sort()
        said = _said(plan, collected, baseline)
        return _reported(_record(collected, plan, survey, said, begun), collected)


def show_outcome(collected: Collected, check: str) -> None:
    """Show the outcome of a check as it stands: a FAIL that is to be measured again is not final."""
    config = collected.settings.model_copy(update={"checks": {check: collected.settings.checks[check]}})
    first, repeats = (
        [one for one in every if one.check == check] for every in (collected.measurements, collected.repeats)
    )
    to_come = None if collected.settings.retry and not repeats else repeats
    verdicts = judge(config, collected.jobs, first, catalog(), {}, retries=to_come)
    outcome = worst(verdict.outcome for verdict in verdicts)
    reason = next((verdict.message for verdict in verdicts if verdict.outcome is outcome), "")
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
        verdicts = judge(settings, plan.jobs, measurements, catalog(), plan.left_out, baseline, retries=repeats)
        insights = trial_insights(settings, measurements, catalog(), baseline)
    with collected.timed("diagnose"):
        findings = diagnose(collected.results, measurements, repeats, verdicts, catalog(), collected.run_dir.path)
    with collected.timed("telemetry"):
        sampled = _sampled(plan, collected)
    return _Said(baseline, verdicts, insights, (*findings, *throttling_findings(sampled)), sampled)


def _sampled(plan: Plan, collected: Collected) -> Telemetry | None:
    """What the samplers saw, beside all jobs of the trial, those of earlier sessions too."""
    phases = {name: str(check.phase) for name, check in catalog().items()}
    found = telemetry.summarize_run(collected.run_dir.path, plan.jobs, collected.measurements, phases)
    for complaint in found.warnings if found else ():
        collected.show.warn(complaint)
    return found


def _repeats(plan: Plan, collected: Collected, baseline: Baseline | None) -> list[Job]:
    """The jobs that measure once more what fell short, and has not been measured a second time everywhere."""
    settings, known = collected.settings, catalog()
    if not settings.retry:
        return []
    reasons = checks_to_retry(settings, collected.measurements, collected.repeats, known, baseline)
    if any(one.check in reasons for one in collected.repeats):
        collected.run_dir.discard_retries(reasons)
        collected.repeats = [one for one in collected.repeats if one.check not in reasons]
    jobs = list(retry_jobs(plan.jobs, reasons, settings.limits.startup_s))
    for job in jobs:
        collected.show.retry_started(job, reasons)
    return jobs


def _on_the_same_nodes(job: Job, collected: Collected) -> Job:
    """``job``, asking for the nodes of the jobs before it: of other nodes it would say nothing about these."""
    used = [one.nodelist for one in collected.results if one.nodelist and one.state is JobState.COMPLETED]
    if job.placement == "control" or not used or not collected.measurements:
        return job
    return job.model_copy(update={"nodelist": used[-1]})


def _run_job(job: Job, collected: Collected) -> None:
    launcher = launcher_for(collected.settings, job.placement)
    for result in run_job(launcher, job, collected.run_dir.path, collected.settings.limits, catalog(), collected):
        collected.finished(result)
        measured = collected.repeats if job.retry else collected.measurements
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
        collected.show.warn(
            f"{collected.stopped}. What was measured so far is kept; go on with "
            f"seatrial run --resume {collected.run_dir.path}"
        )


def _record(collected: Collected, plan: Plan, survey: Survey, said: _Said, begun: float) -> Trial:
    request, settings = collected.run_dir.request, collected.settings
    trouble = survey.gpu_error(settings)
    seconds = _check_seconds(list(settings.checks), collected.measurements)
    more = _check_seconds(list(settings.checks), collected.repeats)
    seconds |= {f"{name} (retry)": value for name, value in more.items()}
    now = Session(
        started=time.time() - (time.monotonic() - begun),
        seconds=time.monotonic() - begun,
        command=("seatrial", *sys.argv[1:]),
        stop_reason=collected.stopped,
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
        excluded_checks=plan.left_out,
        stop_reason=collected.stopped,
        gpu_error=trouble,
        baseline=said.baseline,
        sessions=sessions,
        results=tuple(collected.results),
        measurements=tuple(collected.measurements),
        retries=tuple(collected.repeats),
        verdicts=said.verdicts,
        findings=said.findings,
        insights=said.insights,
        telemetry=said.telemetry,
        timings=(*overhead, *(Timing(name=k, kind="check", seconds=v) for k, v in seconds.items())),
        decision=decision_of(
            settings,
            collected.measurements,
            said.verdicts,
            plan.left_out,
            (collected.stopped, trouble),
            scope=scope_of(settings, plan, survey),
            cpu_only=cpu_only(settings, survey),
        ),
    )


def _reported(trial: Trial, collected: Collected) -> Trial:
    """Write the reports. A record that could not be written accepts nothing, and no file says otherwise."""
    try:
        collected.run_dir.save_session(trial.sessions[-1])
        with collected.timed("report"):
            report.render_all(trial)
        # made once more, so that the reports show what they took themselves
        trial = trial.model_copy(update={"timings": (*trial.timings, collected.timings[-1])})
        report.write_all(trial, collected.run_dir.path)
    except (OSError, report.NotWritten) as error:
        collected.show.warn(f"the reports are not whole: {error}")
        if trial.decision.value is DecisionValue.ACCEPTED:
            reason = f"the record of the trial could not be written: {error}"
            incomplete = Decision(
                value=DecisionValue.INCOMPLETE,
                reason=reason,
                tested_hardware=trial.decision.tested_hardware,
                cpu_only=trial.decision.cpu_only,
            )
            trial = trial.model_copy(update={"decision": incomplete})
        report.write_some(trial, collected.run_dir.path)
    return trial
