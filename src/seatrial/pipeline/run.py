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
from seatrial.pipeline.rejudge import load_baseline, make_decision
from seatrial.pipeline.resume import checked_plan, load_earlier_session, remaining_plan
from seatrial.pipeline.run_directory import RunDir
from seatrial.pipeline.survey import Survey, discover
from seatrial.util import processes, signals

INTERRUPTED = "interrupted"


def run(run_dir: RunDir, show: Show) -> Trial:
    """Run the trial of ``run_dir``, or its remaining checks, and write the reports into it.

    After Ctrl-C or an OSError (such as a full disk), the measurements so far are still judged and reported.
    """
    collected = Collected(run_dir, run_dir.request.config, show, show_outcome)
    collected.timings.append(Timing(name="start of the command", kind="overhead", seconds=processes.age_s()))
    start_clock = time.monotonic() - processes.age_s()
    with collected.timed("discover"):
        survey = discover()
    with collected.timed("plan"):
        plan = checked_plan(run_dir.request, survey)
        baseline = load_baseline(collected.settings)
        gpu_models = survey.gpu_models(collected.settings)
        plausibility.validate_thresholds(collected.settings, catalog(), gpu_models, baseline)
    with _stop_handled(collected):
        load_earlier_session(collected, survey.machine(collected.settings))
        remaining = remaining_plan(plan, collected, survey)
        for measurement in remaining.not_run:
            collected.measured(measurement)
        for job in remaining.jobs:
            _run_job(_on_same_nodes(job, collected), collected)
        for job in _retry_jobs(plan, collected, baseline):
            _run_job(_on_same_nodes(job, collected), collected)
    # a Ctrl-C between two files would leave reports that contradict each other
    with signals.signals_deferred():
        collected.sort()
        assessment = _assess(plan, collected, baseline)
        return _write_reports(_trial(collected, plan, survey, assessment, start_clock), collected)


def show_outcome(collected: Collected, check: str) -> None:
    """Show the outcome of a check after its first measurement or after its retry; a retry can replace a FAIL."""
    config = collected.settings.model_copy(update={"checks": {check: collected.settings.checks[check]}})
    first = [measurement for measurement in collected.measurements if measurement.check == check]
    retries = [measurement for measurement in collected.retries if measurement.check == check]
    retry_pending = collected.settings.retry and not retries
    judged = judge(config, collected.jobs, first, catalog(), {}, retries=None if retry_pending else retries)
    verdicts = [verdict for verdict in judged if verdict.check == check]  # the jobs contain other checks, too
    outcome = worst(verdict.outcome for verdict in verdicts)
    reason = next((verdict.message for verdict in verdicts if verdict.outcome is outcome), "")
    collected.show.judged(check, outcome, reason, max(measurement.seconds for measurement in retries or first))


@dataclass(frozen=True)
class _Assessment:
    """Verdicts, insights, findings and telemetry summary of the measurements."""

    baseline: Baseline | None
    verdicts: tuple[Verdict, ...]
    insights: tuple[Insight, ...]
    findings: tuple[Finding, ...]
    telemetry: Telemetry | None


def _assess(plan: Plan, collected: Collected, baseline: Baseline | None) -> _Assessment:
    settings, measurements, retries = collected.settings, collected.measurements, collected.retries
    with collected.timed("judge"):
        verdicts = judge(settings, plan.jobs, measurements, catalog(), plan.excluded_checks, baseline, retries=retries)
        insights = trial_insights(settings, measurements, catalog(), baseline)
    with collected.timed("diagnose"):
        findings = diagnose(collected.results, measurements, retries, verdicts, catalog(), collected.run_dir.path)
    with collected.timed("telemetry"):
        summary = _telemetry_summary(plan, collected)
    return _Assessment(baseline, verdicts, insights, (*findings, *throttling_findings(summary)), summary)


def _telemetry_summary(plan: Plan, collected: Collected) -> Telemetry | None:
    """Return the telemetry summary of all jobs of the trial, including earlier sessions; show its warnings."""
    phases = {name: str(check.phase) for name, check in catalog().items()}
    summary = telemetry.summarize_run(collected.run_dir.path, plan.jobs, collected.measurements, phases)
    for warning in summary.warnings if summary else ():
        collected.show.warn(warning)
    return summary


def _retry_jobs(plan: Plan, collected: Collected, baseline: Baseline | None) -> list[Job]:
    """Return the jobs that retry checks with failed performance metrics; discard incomplete earlier retries."""
    settings = collected.settings
    if not settings.retry:
        return []
    reasons = checks_to_retry(settings, collected.measurements, collected.retries, catalog(), baseline)
    if any(measurement.check in reasons for measurement in collected.retries):
        collected.run_dir.discard_retries(reasons)
        collected.retries = [measurement for measurement in collected.retries if measurement.check not in reasons]
    jobs = list(retry_jobs(plan.jobs, reasons, settings.limits.startup_s))
    for job in jobs:
        collected.show.retry_started(job, reasons)
    return jobs


def _on_same_nodes(job: Job, collected: Collected) -> Job:
    """Return ``job`` with the nodes of the last completed job, so that all jobs test the same nodes."""
    completed = [result for result in collected.results if result.nodelist and result.state is JobState.COMPLETED]
    if job.placement == "control" or not completed or not collected.measurements:
        return job
    return job.model_copy(update={"nodelist": completed[-1].nodelist})


def _run_job(job: Job, collected: Collected) -> None:
    launcher = launcher_for(collected.settings, job.placement)
    for result in run_job(launcher, job, collected.run_dir.path, collected.settings.limits, catalog(), collected):
        collected.finished(result)
        measurements = collected.retries if job.retry else collected.measurements
        check_seconds = sum(_check_seconds(job.checks, measurements).values())
        overhead = max(0.0, result.seconds - check_seconds)
        name = f"start and end of job {job.name}"
        collected.timings.append(Timing(name=name, kind="overhead", seconds=overhead))


def _check_seconds(checks: Sequence[str], measurements: Sequence[Measurement]) -> dict[str, float]:
    """Return the seconds of each check on its slowest rank, since the others wait for it."""
    seconds: dict[str, list[float]] = {name: [] for name in checks}
    for measurement in measurements:
        if measurement.check in seconds:
            seconds[measurement.check].append(measurement.seconds)
    return {name: max(values) for name, values in seconds.items() if values}


@contextmanager
def _stop_handled(collected: Collected) -> Iterator[None]:
    """On Ctrl-C or a full disk, leave the context and set ``collected.stop_reason``."""
    try:
        yield
    except KeyboardInterrupt:
        collected.stop_reason = INTERRUPTED
    except OSError as error:
        path = collected.run_dir.path
        collected.stop_reason = f"{error.strerror or error}: {error.filename or path}"
        collected.show.warn(
            f"{collected.stop_reason}. Measurements so far are saved; run: seatrial run --resume {path}"
        )


def _trial(collected: Collected, plan: Plan, survey: Survey, assessment: _Assessment, start_clock: float) -> Trial:
    request, settings = collected.run_dir.request, collected.settings
    gpu_error = survey.gpu_error(settings)
    seconds = _check_seconds(list(settings.checks), collected.measurements)
    retry_seconds = _check_seconds(list(settings.checks), collected.retries)
    seconds |= {f"{name} (retry)": value for name, value in retry_seconds.items()}
    session = Session(
        started=time.time() - (time.monotonic() - start_clock),
        seconds=time.monotonic() - start_clock,
        command=("seatrial", *sys.argv[1:]),
        stop_reason=collected.stop_reason,
        overhead=tuple(collected.timings),
    )
    sessions = (*collected.sessions, session)
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
        excluded_checks=plan.excluded_checks,
        stop_reason=collected.stop_reason,
        gpu_error=gpu_error,
        baseline=assessment.baseline,
        sessions=sessions,
        results=tuple(collected.results),
        measurements=tuple(collected.measurements),
        retries=tuple(collected.retries),
        verdicts=assessment.verdicts,
        findings=assessment.findings,
        insights=assessment.insights,
        telemetry=assessment.telemetry,
        timings=(*overhead, *(Timing(name=k, kind="check", seconds=v) for k, v in seconds.items())),
        decision=make_decision(
            settings,
            collected.measurements,
            assessment.verdicts,
            plan.excluded_checks,
            jobs=plan.jobs,
            environment=survey.facts,
            stop_reason=collected.stop_reason,
            gpu_error=gpu_error,
        ),
    )


def _write_reports(trial: Trial, collected: Collected) -> Trial:
    """Write the reports and return the trial; an ACCEPTED trial whose record cannot be written is INCOMPLETE."""
    try:
        collected.run_dir.save_session(trial.sessions[-1])
        with collected.timed("report"):
            report.render_all(trial)
        # render again, so that the reports include their own rendering time
        trial = trial.model_copy(update={"timings": (*trial.timings, collected.timings[-1])})
        report.write_all(trial, collected.run_dir.path)
    except (OSError, report.NotWritten) as error:
        collected.show.warn(f"some reports could not be written: {error}")
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
