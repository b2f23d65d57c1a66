"""The pipeline: discover → plan → launch → collect → judge → diagnose → report."""

from __future__ import annotations

import shlex
import socket
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace

from seatrial import __version__, report, telemetry
from seatrial.checks import catalog
from seatrial.diagnose import diagnose
from seatrial.diagnose.signatures import check_signatures
from seatrial.diagnose.throttling import throttling_findings
from seatrial.judge import checks_to_retry, judge, plausibility
from seatrial.judge.retry import MAX_RETRIES, complete_retries
from seatrial.launch import select_launcher, trial_launcher
from seatrial.launch.watch import run_job
from seatrial.model import (
    Baseline,
    Decision,
    DecisionValue,
    Job,
    JobState,
    Measurement,
    Session,
    Timing,
    Trial,
    worst,
)
from seatrial.pipeline.localization import localize
from seatrial.pipeline.node_environments import node_environments
from seatrial.pipeline.plan import LOCALIZATION_JOB, Plan, jobs_as_run, retry_jobs
from seatrial.pipeline.preview import planned_notes
from seatrial.pipeline.rejudge import judged_run, load_baseline, with_findings, with_verdicts
from seatrial.pipeline.results import Display, JobNotStarted, TrialResults
from seatrial.pipeline.resume import finished_record, load_earlier_sessions, remaining_plan, startable_plan
from seatrial.pipeline.run_directory import RunDir
from seatrial.pipeline.this_host import ThisHost, discover
from seatrial.util import processes, signals
from seatrial.util.gc_pause import gc_paused
from seatrial.util.grouping import grouped
from seatrial.util.secrets import redacted

INTERRUPTED = "interrupted"


def run(run_dir: RunDir, display: Display) -> Trial:
    """Run the trial of ``run_dir``, or its remaining checks, and write the reports into it.

    After Ctrl-C, an OSError (such as a full disk) or a failed preflight, the measurements so far are still judged and
    reported. If nothing is left to measure and the record is complete, the recorded trial is returned and no file is
    changed; ``run_dir.is_unchanged`` is then true.
    """
    settings = run_dir.request.config
    results = TrialResults(run_dir, settings, display, show_completed_check)
    results.add_overhead("start of the command", processes.age_s())
    process_start = time.monotonic() - processes.age_s()
    with results.timed("discover"):
        this_host = discover()
    with results.timed("plan"):
        trial_launcher(settings).require_access()
        nodes = _nodes_to_test(results)
        plan = startable_plan(run_dir.request, this_host, nodes)
        baseline = load_baseline(settings)
        gpu_models = this_host.gpu_models(settings)
        plausibility.validate_thresholds(settings, catalog(), gpu_models, baseline)
        check_signatures()  # an invalid file of the site must be reported now, not after hours of measurements

    def run_job_on_same_nodes(job: Job) -> None:
        _run_job(_on_same_nodes(job, results, nodes), results)

    nothing_measured = False
    with _record_stop_reason(results):
        load_earlier_sessions(results, this_host.machine(settings))
        remaining = remaining_plan(plan, results, this_host, nodes)
        if remaining.jobs:
            for line in planned_notes(settings, plan, this_host, baseline):
                display.show_note(line)
        results.add_not_run(remaining.not_run)
        if settings.launcher == "torchrun":  # the user starts all jobs, before seatrial is called again
            from seatrial.launch.torchrun import write_scripts

            write_scripts(settings, remaining.jobs, run_dir.path)
        for job in remaining.jobs:
            run_job_on_same_nodes(job)
        _discard_incomplete_retries(results)
        if settings.retry:
            for number in range(1, MAX_RETRIES + 1):
                reasons = checks_to_retry(settings, results.measurements, results.retries, catalog(), number, baseline)
                for job in retry_jobs(jobs_as_run(plan.jobs, results.jobs), reasons, number):
                    display.retry_started(job, reasons)
                    run_job_on_same_nodes(job)
        localize(plan, results, baseline, nodes, run_job_on_same_nodes)
        nothing_measured = not (results.jobs or remaining.not_run)
    plan = replace(plan, jobs=jobs_as_run(plan.jobs, results.jobs))
    # a Ctrl-C between two report files would leave files that contradict each other
    with signals.stop_signals_ignored():
        results.sort()
        trial = _assessed(_record(results, plan, this_host), results, baseline)
        if nothing_measured and (recorded := finished_record(results.run_dir.path, trial)):
            run_dir.is_unchanged = True
            return recorded
        # the first rendering is only timed: the reports that are written have this time, and name a failure
        with results.timed("report"), suppress(report.NotWritten):
            report.render_all(trial)
        return _write_reports(_with_durations(trial, results, process_start), results)


def show_completed_check(results: TrialResults, check: str) -> None:
    """Judge a check whose first measurements or retry are complete, and show its outcome.

    As long as a further retry is needed, only the first measurements are judged.
    """
    settings = results.settings.model_copy(update={"checks": {check: results.settings.checks[check]}})
    first_measurements, retries = _of_check(check, results)
    next_retry = max((measurement.retry for measurement in retries), default=0) + 1
    retry_pending = settings.retry and checks_to_retry(settings, first_measurements, retries, catalog(), next_retry)
    jobs = results.jobs[::-1]  # the last job first: after the loss of a node, a check runs in a smaller job
    judged = judge(settings, jobs, first_measurements, catalog(), {}, retries=None if retry_pending else retries)
    verdicts = [verdict for verdict in judged if verdict.check == check]  # without other checks of the same jobs
    outcome = worst(verdict.outcome for verdict in verdicts)
    reason = next((verdict.message for verdict in verdicts if verdict.outcome is outcome), "")
    seconds = max(measurement.seconds for measurement in retries or first_measurements)
    results.display.show_outcome(check, outcome, reason, seconds)


def _record(results: TrialResults, plan: Plan, this_host: ThisHost) -> Trial:
    """Return the record of what was measured, without verdicts, findings and durations."""
    request, settings, secrets = results.run_dir.request, results.settings, results.secrets
    nodes = node_environments(results.run_dir.path, settings.container)
    return Trial(
        seatrial=__version__,
        name=settings.name,
        command=redacted(request.command, secrets),
        host=socket.gethostname(),
        started=request.started,
        seconds=0,
        config=redacted(settings.model_dump(mode="json"), secrets),
        origins=request.origins,
        environment=redacted(this_host.facts | {"nodes": nodes}, secrets),
        jobs=tuple(job.without_secrets() for job in plan.jobs),
        excluded_checks=plan.excluded_checks,
        stop_reason=results.stop_reason,
        gpu_error=this_host.gpu_error(settings),
        missing_nodes=tuple(results.missing_nodes.values()),
        results=tuple(results.job_results),
        measurements=tuple(results.measurements),
        retries=tuple(results.retries),
        localization=tuple(results.localization),
        verdicts=(),
        findings=(),
        timings=(),
        decision=Decision(value=DecisionValue.INCOMPLETE, reason="not judged"),
    )


def _assessed(trial: Trial, results: TrialResults, baseline: Baseline | None) -> Trial:
    """Return the record with verdicts, insights, findings, decision and telemetry summary."""
    settings, run_dir = results.settings, results.run_dir.path
    with results.timed("judge"), gc_paused():
        trial = with_verdicts(trial, settings, baseline)
    with results.timed("diagnose"):
        run = judged_run(trial, settings)
        trial = with_findings(trial, run, diagnose(run, trial.results, trial.retries, run_dir))
    with results.timed("telemetry"):
        phases = {name: str(check.phase) for name, check in catalog().items()}
        summary = telemetry.summarize_run(run_dir, trial.jobs, trial.measurements, phases)
    for warning in summary.warnings if summary else ():
        results.display.warn(warning)
    findings = (*trial.findings, *throttling_findings(summary, catalog(), trial.findings))
    shown = tuple(finding.without_secrets(results.secrets) for finding in findings)
    return trial.model_copy(update={"findings": shown, "telemetry": summary})


def _of_check(check: str, results: TrialResults) -> tuple[list[Measurement], list[Measurement]]:
    """Return the first measurements of a check, and those of its retries."""
    first = [measurement for measurement in results.measurements if measurement.check == check]
    return first, [measurement for measurement in results.retries if measurement.check == check]


def _discard_incomplete_retries(results: TrialResults) -> None:
    """Discard the retries of each check whose last retry an earlier session did not complete."""
    incomplete = set()
    for check in {measurement.check for measurement in results.retries}:
        first_measurements, retries = _of_check(check, results)
        if len(complete_retries(first_measurements, retries)) < max(measurement.retry for measurement in retries):
            incomplete.add(check)
    if incomplete:
        results.run_dir.discard_retries(incomplete)
        results.discard_retries(incomplete)


def _nodes_to_test(results: TrialResults) -> int:
    """Return the number of nodes to test: all of the trial, or the available ones if cluster.min_nodes allows it."""
    settings = results.settings
    if settings.cluster.min_nodes is None:
        return settings.cluster.nodes
    shortage = trial_launcher(settings).node_shortage()
    if shortage is None:
        return settings.cluster.nodes
    results.add_missing_nodes(shortage.missing)
    for node in shortage.missing:
        results.display.warn(f"missing node {node}")
    return shortage.usable if shortage.usable >= settings.cluster.min_nodes else settings.cluster.nodes


def _on_same_nodes(job: Job, results: TrialResults, nodes: int) -> Job:
    """Return ``job`` with the node list of the last completed job, so that all jobs test the same nodes.

    If nodes were lost, the job has no node list and excludes the lost nodes; it uses fewer nodes if cluster.min_nodes
    allows it. The job has no preflight if an earlier job of this session passed its preflight. ``nodes``: the number of
    nodes of the plan.
    """
    if results.preflight_passed:
        job = job.model_copy(update={"preflight": None})
    if results.lost_nodes and job.placement != "control":
        min_nodes, nodes_left = results.settings.cluster.min_nodes, nodes - len(results.lost_nodes)
        if min_nodes and min_nodes <= nodes_left < job.nodes and not job.retry:
            job = job.on_fewer_nodes(nodes_left)
        return job.model_copy(update={"exclude": ",".join(results.lost_nodes)})
    completed = [result for result in results.job_results if result.nodelist and result.state is JobState.COMPLETED]
    if job.placement == "control" or not completed or not results.measurements:
        return job
    return job.model_copy(update={"nodelist": completed[-1].nodelist})


def _run_job(job: Job, results: TrialResults) -> None:
    launcher = select_launcher(results.settings, job.placement)
    settings = results.settings
    run_dir = results.run_dir.path
    min_nodes = None if job.name == LOCALIZATION_JOB else settings.cluster.min_nodes
    for result in run_job(launcher, job, run_dir, settings.limits, catalog(), results, min_nodes):
        result = results.add_job_result(result)
        if result.refused:
            continue
        if result.state is JobState.COMPLETED and job.preflight is not None:
            results.preflight_passed = True
        measurements = results.retries if job.retry else [*results.measurements, *results.localization]
        check_seconds = sum(_check_seconds(job.checks, measurements).values())
        results.add_overhead(f"start and end of the job {job.name!r}", max(0.0, result.seconds - check_seconds))
    # not raised in the loop: there, run_job raises KeyboardInterrupt if the attempt was also interrupted
    last = results.job_results[-1]
    if last.state is JobState.REFUSED:
        raise JobNotStarted(f"preflight failed on {last.failed_subject}: {last.cause}")
    if last.state is JobState.REJECTED:
        what = "is started by the user" if last.launcher == "torchrun" else "was rejected"
        raise JobNotStarted(f"job {last.job} {what}: {last.cause_without_command}")


def _check_seconds(checks: Sequence[str], measurements: Sequence[Measurement]) -> dict[str, float]:
    """Return the seconds of each check on its slowest rank, for which the other ranks wait."""
    seconds = grouped((measurement.check, measurement.seconds) for measurement in measurements)
    return {name: max(seconds[name]) for name in checks if name in seconds}


@contextmanager
def _record_stop_reason(results: TrialResults) -> Iterator[None]:
    """Set ``results.stop_reason`` on Ctrl-C, an OSError, or if nodes or the scheduler refused a job."""
    try:
        yield
    except KeyboardInterrupt as stop:
        results.stop_reason = INTERRUPTED
        if text := str(stop):  # the objects that a launcher could not remove
            results.display.warn(text)
    except JobNotStarted as stop:  # the summary, which follows at once, shows the reason
        results.stop_reason = str(stop)
    except OSError as error:
        path = results.run_dir.path
        results.stop_reason = f"{error.strerror or error}: {error.filename or path}"
        results.display.warn(f"{results.stop_reason}. Measurements so far are saved; run: seatrial run --resume {path}")


def _with_durations(trial: Trial, results: TrialResults, process_start: float) -> Trial:
    """Return the record with all sessions. ``process_start``: of this session, in seconds of time.monotonic()."""
    seconds = time.monotonic() - process_start
    session = Session(
        started=time.time() - seconds,
        seconds=seconds,
        command=redacted(("seatrial", *sys.argv[1:]), results.secrets),
        stop_reason=results.stop_reason,
        overhead=tuple(results.timings),
    )
    sessions = (*results.sessions, session)
    overhead = [timing for session in sessions for timing in session.overhead]
    return trial.model_copy(
        update={
            "seconds": sum(session.seconds for session in sessions),
            "sessions": sessions,
            "timings": (*overhead, *_check_timings(results)),
        }
    )


def _check_timings(results: TrialResults) -> list[Timing]:
    """Return the time of each check, of its retries, and of the search for slow nodes."""
    names = list(results.settings.checks)
    seconds_by_name = _check_seconds(names, results.measurements)
    for name, seconds in _check_seconds(names, results.retries).items():
        seconds_by_name[f"{name} (retry)"] = seconds
    localization_checks = [measurement.check for measurement in results.localization]
    seconds_by_name |= _check_seconds(localization_checks, results.localization)
    return [Timing(name=name, kind="check", seconds=seconds) for name, seconds in seconds_by_name.items()]


def _write_reports(trial: Trial, results: TrialResults) -> Trial:
    """Write the reports and return the trial; an ACCEPTED trial whose record cannot be written is INCOMPLETE."""
    try:
        results.run_dir.save(trial.sessions[-1])
        trial = trial.model_copy(update={"manifest": results.run_dir.manifest()})
        report.write_all(trial, results.run_dir.path)
    except (OSError, report.NotWritten) as error:
        path = shlex.quote(str(results.run_dir.path))
        command = f"findmnt -T {path}; df -h {path}; df -i {path}"
        results.display.warn(f"some reports could not be written: {error}. Run first: {command}")
        if trial.decision.value is DecisionValue.ACCEPTED:
            reason = f"the record of the trial could not be written: {error}"
            incomplete = Decision(
                value=DecisionValue.INCOMPLETE,
                reason=reason,
                tested_hardware=trial.decision.tested_hardware,
                cpu_only=trial.decision.cpu_only,
            )
            trial = trial.model_copy(update={"decision": incomplete})
        report.write_some(trial, results.run_dir.path)
    return trial
