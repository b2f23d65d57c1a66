"""Tests that a training job ends on all nodes in time when a rank fails, and that the report names this rank.

Starts three runs of ``train.failing_job`` with `seatrial run`, as a user would: in each run a rank fails by an
exception, SIGKILL or SIGSTOP. After each run the check reads the Slurm queue, and measures ``nodes.leftovers`` on the
nodes of the job. On one host the three runs are concurrent, since they measure no speed; under Slurm they run one after
another.
"""

from __future__ import annotations

import os
import re
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import get_args

import yaml
from pydantic import Field, JsonValue

from seatrial.checks.check import Check, Context, Needs, Options
from seatrial.checks.declare import Answer, Answers, absent, metric, value
from seatrial.checks.faults import failing_job, leftovers
from seatrial.checks.faults.failing_job import Fault, FaultRecord
from seatrial.config.layers import ENV_PREFIX
from seatrial.config.schema import CheckSettings, Config
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import JobRecord
from seatrial.model import (
    Artifact,
    JobResult,
    JobState,
    Measurement,
    NotApplicable,
    Outcome,
    Phase,
    Scope,
    SeatrialError,
    Trial,
    Verdict,
)
from seatrial.util import processes
from seatrial.util.files import atomic_write
from seatrial.util.input_files import MAX_RECORD_BYTES, read_json, read_text
from seatrial.util.secrets import PRIVATE

FAULTS: tuple[Fault, ...] = get_args(Fault)
# Fault → text that the verdict of the failing rank must contain: the cause of the failure (launch/root_cause.py)
_CAUSES: dict[Fault, str] = {"error": failing_job.ERROR_MESSAGE, "kill": "SIGKILL", "stop": "no heartbeat"}
# The launcher sets them for this process. The runs that this check starts must not inherit them.
_LAUNCHER_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
_POLL_S = 0.2
_CANCEL_S = 120.0  # an interrupted run fetches results, cancels its Slurm job, and waits up to a minute for its end
_MAX_CLOCK_SKEW_S = 1.0  # between the failing node and this host, as times of both are subtracted


class FailureOptions(Options):
    """The rank that fails, and the time limit for the end of its job."""

    rank: int | None = Field(
        default=None, ge=0, description="rank that fails; default: the last rank, on the last node"
    )
    # torchrun, Slurm and seatrial need a few seconds; the rest is for an Epilog that checks GPUs.
    teardown_s: float = Field(
        default=30, gt=0, description="maximum seconds from the detection of the failure to the end of the job"
    )
    # Ranks write a heartbeat each second. The trial's limit is longer, so that a short stall does not end a long run.
    heartbeat_timeout_s: float = Field(
        default=15,
        gt=0,
        description="seconds without a heartbeat after which a rank counts as hung, instead of a longer "
        "limits.heartbeat_timeout_s of the trial",
    )


@dataclass(frozen=True)
class TrialRunner:
    """Runs trials of one check with the configuration of the current trial, and reads their records."""

    folder: Path
    config: Config  # configuration of the current trial
    progress: Callable[[str], None]

    def run(self, name: str, check: Check, limit_s: float, **options: JsonValue) -> Trial:
        """Run a trial ``name`` of one check and return its record. Raises SeatrialError if there is no record."""
        with self.start(name, check, limit_s, **options) as wait_for_record:
            return wait_for_record()

    @contextmanager
    def start(self, name: str, check: Check, limit_s: float, **options: JsonValue) -> Iterator[Callable[[], Trial]]:
        """Context manager: starts a trial; yields a function that waits for its end and returns its record.

        The function raises SeatrialError if the trial leaves no record. A trial that still runs at the exit is
        terminated.
        """
        self.progress(f"run {name}")
        settings = CheckSettings(limit_s=limit_s, options=options)
        config = self.config.model_copy(update={"name": name, "checks": {check.name: settings}})
        trial_file, stdout, stderr = (self.folder / f"{name}{ending}" for ending in (".yaml", ".out", ".err"))
        text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
        atomic_write(trial_file, text.encode(), mode=PRIVATE)
        program = [sys.executable, "-m", "seatrial", "run", str(trial_file), "--out", str(self.folder / name)]
        child = processes.start(["env", *_env_unset_args(), *program], env={}, stdout=stdout, stderr=stderr)

        def wait_for_record() -> Trial:
            while (code := child.poll()) is None:
                time.sleep(_POLL_S)
            try:
                return Trial.model_validate_json(read_text(self.folder / name / "trial.json", MAX_RECORD_BYTES))
            except (OSError, ValueError) as error:
                lines = stderr.read_text(encoding="utf-8", errors="replace").strip().splitlines() or ["empty"]
                raise SeatrialError(
                    f"run {name}: exit code {code}, no trial.json; last line of stderr: {lines[-1]}"
                ) from error

        try:
            yield wait_for_record
        finally:
            processes.stop(child, grace_s=_CANCEL_S)

    def on_nodes(self, nodes: str) -> TrialRunner:
        """Return a runner for a Slurm node list such as ``node[1-4]``; if ``nodes`` is empty, for the trial's nodes."""
        slurm_settings = self.config.slurm.model_copy(update={"nodelist": nodes or self.config.slurm.nodelist})
        return TrialRunner(self.folder, self.config.model_copy(update={"slurm": slurm_settings}), self.progress)


def measure(context: Context, options: FailureOptions) -> Answers:
    """Yield root cause, end time and leftovers of one run per fault.

    Raises SeatrialError if a run fails to start or leaves no record, NotApplicable for a single rank.
    """
    request = read_json(context.run_dir / "run.json")
    folder = context.artifacts_dir / time.strftime("%Y%m%d-%H%M%S")
    folder.mkdir()
    runner = TrialRunner(folder, _with_short_timeout(request["config"], options), context.progress)
    # longer than the heartbeat timeout, so that this timeout, and not the limit, ends the run with a stopped rank
    limit_s = runner.config.limits.heartbeat_timeout_s + failing_job.CHECK.limit_s
    batches = [(fault,) for fault in FAULTS] if runner.config.uses_slurm else [FAULTS]
    for concurrent_faults in batches:
        with ExitStack() as stack:
            wait_by_fault = {
                fault: stack.enter_context(
                    runner.start(fault, failing_job.CHECK, limit_s, fault=fault, rank=options.rank)
                )
                for fault in concurrent_faults
            }
            for fault, wait_for_record in wait_by_fault.items():
                yield from _fault_observations(context, runner, fault, wait_for_record(), options.teardown_s)
                report = (folder / fault / "report.html").relative_to(context.run_dir)
                yield Artifact(path=str(report), title=f"report of the run with fault {fault!r}")


def _with_short_timeout(config: JsonValue, options: FailureOptions) -> Config:
    """Return the configuration of the current trial, with the heartbeat timeout of ``options`` if it is shorter."""
    trial = Config.model_validate(config)
    timeout_s = min(trial.limits.heartbeat_timeout_s, options.heartbeat_timeout_s)
    return trial.model_copy(update={"limits": trial.limits.model_copy(update={"heartbeat_timeout_s": timeout_s})})


def _fault_observations(
    context: Context, runner: TrialRunner, fault: Fault, trial: Trial, teardown_s: float
) -> Answers:
    """Yield the observations on the report of the ended ``trial``, and on its leftover jobs and processes."""
    injected = _read_fault(
        runner.folder / fault / "artifacts" / failing_job.CHECK.name / failing_job.RECORD_FILE, trial
    )
    result = trial.results[-1]
    uses_slurm = result.launcher == "slurm"
    kill_wait_s = slurm.settings().kill_wait_s if uses_slurm else 0
    limit_parts_s = {
        "teardown_s": teardown_s,
        # time between SIGTERM and SIGKILL: slurm.conf(5)
        "KillWait": float(kill_wait_s) if isinstance(kill_wait_s, int) else 0.0,
        # only the heartbeat timeout detects a stopped process
        "heartbeat_timeout_s": runner.config.limits.heartbeat_timeout_s if fault == "stop" else 0.0,
    }
    yield from report_observations(injected, trial, limit_parts_s)
    if uses_slurm:
        yield allocation_observation(fault, slurm.job(result.scheduler_id))
    else:
        yield absent(f"leftover_jobs.{fault}", f"the launcher {result.launcher} has no queue")
    run_dir = str(runner.folder / fault)
    if result.launcher == "local":  # this process sees all processes of the host, including those of containers
        yield from leftover_observations(fault, [leftovers.measurement(context, run_dir)], 1)
        return
    check = leftovers.CHECK
    leftovers_trial = runner.on_nodes(result.nodelist).run(f"{fault}-leftovers", check, check.limit_s, run=run_dir)
    yield from leftover_observations(fault, leftovers_trial.measurements, leftovers_trial.jobs[-1].nodes)


def report_observations(injected: FaultRecord, trial: Trial, limit_parts_s: dict[str, float]) -> Answers:
    """Yield whether the report names the failing rank, and the seconds from the fault to the end of the job. Pure.

    ``limit_parts_s``: name → seconds; their sum is the limit of the seconds. Raises SeatrialError if the time of the
    fault is not within the job: the clocks of the failing rank's node and of this host then differ too much.
    """
    result = trial.results[-1]
    ended = result.started + result.seconds
    if not result.started - _MAX_CLOCK_SKEW_S <= injected.time <= ended + _MAX_CLOCK_SKEW_S:
        raise SeatrialError(
            f"clock skew: fault at {injected.time:.1f} by the clock of {injected.node}, job from {result.started:.1f} "
            f"to {ended:.1f} by the clock of this host. Next, on both: date +%s.%N; chronyc tracking"
        )
    verdicts = [verdict for verdict in trial.verdicts if verdict.check == failing_job.CHECK.name]
    end_s, limit_s = max(0.0, ended - injected.time), sum(limit_parts_s.values())
    limit_text = " + ".join(f"{name} {seconds:g} s" for name, seconds in limit_parts_s.items() if seconds)
    record = {
        "failing_rank": f"rank {injected.rank} ({injected.subject}, pid {injected.pid})",
        "root_cause": result.failed_subject,
        "cause": result.cause,
        "state": result.state.value,
        "ended": f"{end_s:.1f} s after the fault; limit {limit_s:g} s: {limit_text}",
        "report": [f"{verdict.outcome} {verdict.subject}: {verdict.message}" for verdict in verdicts],
    }
    fault = injected.fault
    names_rank = _names_only_failing_rank(injected, result, verdicts)
    yield value(f"root_cause_named.{fault}", names_rank, evidence=record)
    yield value(f"job_end_s.{fault}", end_s)
    yield value(f"ended_in_time.{fault}", end_s <= limit_s, evidence=record)


def allocation_observation(fault: Fault, job: JobRecord) -> Answer:
    """Return whether the job of the ended run still has an allocation. Pure.

    A job without a state has no allocation: Slurm has removed the job from its list.
    """
    evidence = f"job {job.id} on {job.nodes or 'no node'}: {job}"
    return value(f"leftover_jobs.{fault}", job.has_state and not job.ended, evidence=evidence)


def leftover_observations(fault: Fault, measurements: Sequence[Measurement], node_count: int) -> Answers:
    """Yield the leftover processes per node. Pure. Raises SeatrialError if a node did not report."""
    counts = [each for measurement in measurements if not measurement.error for each in measurement.metrics]
    if len({count.subject for count in counts}) != node_count:
        errors = [measurement.error for measurement in measurements if measurement.error]
        raise SeatrialError(
            f"nodes.leftovers after run {fault}: {len(counts)} of {node_count} nodes reported; "
            f"errors: {'; '.join(errors) or 'none'}"
        )
    for count in counts:
        yield value(f"leftover_processes.{fault}", count.value, count.subject, evidence=count.evidence)


def _names_only_failing_rank(injected: FaultRecord, result: JobResult, verdicts: Sequence[Verdict]) -> bool:
    """Return whether the job result has the fault's state, and result and verdicts name only the failing rank.

    Each verdict is an ERROR of this rank that names it and the cause; there is at least one.
    """
    expected_state = JobState.HUNG if injected.fault == "stop" else JobState.FAILED
    expected_texts = (result.failed_subject, _CAUSES[injected.fault])
    return (
        re.findall(r"\brank (\d+)", result.failed_subject) == [str(injected.rank)]
        and injected.subject in result.failed_subject
        and result.state is expected_state
        and bool(verdicts)
        and all(
            (verdict.outcome, verdict.subject) == (Outcome.ERROR, injected.subject)
            and all(text in verdict.detail for text in expected_texts)
            for verdict in verdicts
        )
    )


def _read_fault(path: Path, trial: Trial) -> FaultRecord:
    """Return the record of the failing rank.

    Raises NotApplicable if the run was skipped, and SeatrialError if the run ended before the fault.
    """
    if path.exists() and not trial.stop_reason:
        return FaultRecord.model_validate_json(path.read_text(encoding="utf-8"))
    for measurement in trial.measurements:
        if measurement.skipped:
            raise NotApplicable(measurement.skipped)
    errors = [measurement.error for measurement in trial.measurements if measurement.error]
    reason = "; ".join(errors) or trial.stop_reason or trial.decision.reason
    raise SeatrialError(f"run {trial.name} ended before the fault: {reason}")


def _env_unset_args() -> list[str]:
    """Return arguments of env(1) that unset the variables that the new run must not inherit.

    These are the launcher's variables; seatrial's settings, which the trial file has already; and
    GLOO_SOCKET_IFNAME=lo, which works on one node only.
    """
    names = [name for name in os.environ if name in _LAUNCHER_VARIABLES or name.startswith(ENV_PREFIX)]
    names += ["GLOO_SOCKET_IFNAME"] if os.environ.get("GLOO_SOCKET_IFNAME") == "lo" else []
    return [f"--unset={name}" for name in names]


def _metrics(fault: Fault) -> Iterator[metric]:
    """Yield the metrics of the run with ``fault``."""
    yield metric(
        f"root_cause_named.{fault}",
        "yes",
        "the report does not name the failing rank, its node and the cause, or names other ranks too: a healthy node "
        "may be drained instead of the faulty one",
        f"Open the report of the run {fault!r} (artifacts), and RUN/artifacts/train.failure/*/{fault}/jobs/ranks/"
        "attempt1: launcher.err, logs, rank*.jsonl. If a running rank has no heartbeat, raise "
        "options.heartbeat_timeout_s and limits.heartbeat_timeout_s",
    )
    yield metric(
        f"ended_in_time.{fault}",
        "yes",
        "the job did not end in time after a rank failed: it holds its nodes without progress",
        "scontrol show config | grep -E 'KillWait|UnkillableStep|Epilog|ProctrackType'; measure the time of the "
        "Epilog; raise teardown_s if the Epilog needs more",
    )
    yield metric(
        f"leftover_jobs.{fault}",
        "== 0",
        "the allocation was not released: its nodes are not available to other jobs",
        "squeue --all --states=all; scancel ID. If the job stays COMPLETING, on its nodes: journalctl -u slurmd -n 50, "
        "and ps -eo pid,stat,wchan,cmd | grep ' D'",
        unit="count",
    )
    (leftover,) = leftovers.CHECK.declared
    yield metric(f"leftover_processes.{fault}", "== 0", leftover.meaning, leftover.fix, unit="count")
    yield metric(f"job_end_s.{fault}", unit="s", meaning="time from the fault to the end of the job")


CHECK = Check(
    name="train.failure",
    title="Failure of a training rank: end of the job and root cause",
    phase=Phase.DISTRIBUTED,
    scope=Scope.CONTROL,  # its runs use all nodes, so that no other job of this trial may run
    measure=measure,
    declared=tuple(each for fault in FAULTS for each in _metrics(fault)),
    needs=Needs(min_ranks=2),  # each run that it starts needs two ranks
    limit_s=1800,  # six Slurm jobs; three start torch
    options=FailureOptions,
)
