"""Probe jobs: small, short Slurm jobs that a check submits under one job name and cancels when it ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from typing import TYPE_CHECKING, TypeVar

from pydantic import Field, JsonValue

from seatrial.checks.check import Context, Options
from seatrial.checks.declare import Answers
from seatrial.config.schema import JobPlacement
from seatrial.config.slurm_options import option_lines, placement_options
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import JobRecord
from seatrial.discover.slurm_messages import first_commands
from seatrial.discover.slurm_nodes import PendingJob, placement_of_smaller_job
from seatrial.model import NotApplicable, SeatrialError
from seatrial.util.processes import CommandResult

if TYPE_CHECKING:
    from seatrial.discover.slurm_task import Task

RUN_TIMEOUT_S = 120  # limit for the end of a running probe job
POLL_S = 1.0
NO_CLIENT = "no Slurm client (sinfo) on this machine"
NO_CLUSTER = "this machine belongs to no Slurm cluster: no slurm.conf, no slurmd, no controller announced in DNS"
_TIME_LIMIT_MIN = 5  # --time of probe jobs; most take seconds

_Options = TypeVar("_Options", bound=Options)
_Measure = Callable[[Context, _Options], Answers]


class SubmitOptions(JobPlacement, Options):
    """Submit options of probe jobs; by default partition, account and nodes of the trial's jobs (slurm.*)."""

    extra: tuple[str, ...] = Field(default=(), description="further options of srun and sbatch, such as --comment=test")
    wait_s: float = Field(default=300, gt=0, description="maximum seconds until a job starts")


@dataclass(frozen=True)
class ProbeJobs:
    """Submits, follows and cancels the probe jobs of one check, all with the same unique job name.

    ``extra``: further options of srun and sbatch. ``wait_s``: maximum seconds until a job starts. ``progress``: shows a
    line of progress.
    """

    job_name: str
    placement: JobPlacement
    extra: tuple[str, ...]
    wait_s: float
    progress: Callable[[str], None]

    def command(self, tool: str, *more: str, minutes: int = _TIME_LIMIT_MIN) -> list[str]:
        """Return the srun or sbatch command line for one task; options in ``more`` override the others.

        --deadline makes Slurm remove the job if it is still pending after seatrial was killed.
        """
        deadline = f"--deadline=now+{int(self.wait_s) + 60 * (minutes + 1)}seconds"
        size = ["--nodes=1", "--ntasks=1", f"--time={minutes}", deadline, f"--job-name={self.job_name}"]
        env_prefix = slurm.env_prefix_outside_job() or ["env"]
        placement = option_lines(placement_options(self.placement), quote=str)
        return [*env_prefix, f"SEATRIAL_PROBE={self.job_name}", tool, *size, *placement, *self.extra, *more]

    def submit(self, script: str, *more: str, minutes: int = _TIME_LIMIT_MIN) -> str:
        """Submit a batch script and return the job id. Raises SlurmUnavailable or SlurmRefused."""
        arguments = ["--parsable", "--output=/dev/null", *more, f"--wrap={script}"]
        return slurm.submit(self.command("sbatch", *arguments, minutes=minutes))

    def start_idle_job(self, *size: str, wait_s: float | None = None) -> JobRecord:
        """Start a job that sleeps, and return it when it runs. Raises SeatrialError with Slurm's reason otherwise."""
        job_id = self.submit(f"sleep {60 * _TIME_LIMIT_MIN}", *size)
        job = self.wait_until(job_id, lambda job: not job.pending, 0, wait_s)
        if job.state != "RUNNING":
            raise SeatrialError(f"job {job_id} did not run: state {job}. Next: scontrol show job {job_id}")
        return job

    def run_step(self, job_id: str, size: tuple[str, ...], command: list[str]) -> str:
        """Run a step in the job and return its output, labelled by task. Raises SlurmUnavailable or SlurmRefused."""
        srun = ["srun", f"--jobid={job_id}", "--overlap", "--label", *size]
        return slurm.command_output([*slurm.env_prefix_outside_job(), *srun, *command], RUN_TIMEOUT_S)

    def run_srun(self, argv: Sequence[str], run_s: float) -> CommandResult:
        """Run srun, which submits a job and waits for its end, at most ``run_s`` seconds after ``wait_s``.

        Raises SlurmUnavailable after this time, SeatrialError if the job never starts.
        """
        from concurrent.futures import ThreadPoolExecutor, wait

        started, pending = time.monotonic(), PendingJob(self.placement)
        with ThreadPoolExecutor(1) as executor:
            result = executor.submit(slurm.run_command, argv, self.wait_s + run_s)
            try:
                while not result.done():
                    for job in map(self.query, slurm.queued_jobs(self.job_name)):
                        if job.pending:
                            self._require_start(pending, job, time.monotonic() - started, self.wait_s)
                    wait([result], POLL_S)
            except BaseException:  # leaving the executor waits for srun, which ends when its job is cancelled
                self.cancel_all()
                raise
            return result.result()

    def wait_until(
        self, job_id: str, condition: Callable[[JobRecord], bool], run_s: float, wait_s: float | None = None
    ) -> JobRecord:
        """Return the job when it satisfies ``condition``, or when it has run for ``run_s`` seconds.

        Raises SeatrialError if the job never starts, or if it is pending for longer than ``wait_s``; default:
        ``wait_s`` of the probe jobs.
        """
        submitted, started, pending = time.monotonic(), None, PendingJob(self.placement)
        while True:
            job, now = self.query(job_id), time.monotonic()
            if job.pending:
                self._require_start(pending, job, now - submitted, self.wait_s if wait_s is None else wait_s)
            started = None if job.pending else started or now
            if condition(job) or (started and now - started > run_s):
                return job
            time.sleep(POLL_S)

    def _require_start(self, pending: PendingJob, job: JobRecord, waited_s: float, timeout_s: float) -> None:
        """Show what a pending job waits for. Raises SeatrialError if it never starts or has waited ``timeout_s``."""
        needed = job.node_count or 1
        never_starts, reason = pending.never_starts(job, waited_s, needed), pending.reason(job, needed)
        self.progress(f"job {job.id} waits for its start: {reason}")
        if never_starts:
            commands = first_commands(job.id, job.reason)
            raise SeatrialError(f"job {job.id} is {job.state}: {reason}; waiting will not help. Next: {commands}")
        if waited_s > timeout_s:
            raise SeatrialError(
                f"job {job.id} still pending after {timeout_s:g} s: {reason}. "
                f"Next: squeue --start --job {job.id}; sinfo"
            )

    def wait_for_end(self, job_id: str, *allowed_states: str) -> JobRecord:
        """Return the job when it has ended.

        Raises SeatrialError if the job never had a node, or if its state is not COMPLETED, FAILED or one of
        ``allowed_states``.
        """
        job = self.wait_until(job_id, lambda job: job.ended, RUN_TIMEOUT_S)
        if job.state not in ("COMPLETED", "FAILED", *allowed_states) or not job.nodes:
            raise SeatrialError(f"job {job_id} did not run: state {job}. Next: scontrol show job {job_id}")
        return job

    def query(self, job_id: str) -> JobRecord:
        """Return the job's current state. Raises SeatrialError if Slurm does not know the job any more."""
        job = slurm.job(job_id)
        if not job.has_state:
            raise SeatrialError(f"state of job {job_id} unknown: {job.reason}")
        if not job.pending:
            self.progress(f"job {job_id}: {job.state} {job.reason}")
        return job

    def cancel_all(self) -> None:
        """Cancel all probe jobs of this check. Raises SlurmUnavailable."""
        slurm.command_output(["scancel", f"--name={self.job_name}"])


def task_evidence(task: Task, devices_confined: bool) -> dict[str, JsonValue]:
    """Return what a task sees; ``devices_confined``: whether device cgroups restrict it."""
    return {
        "cpus": list(task.cpus),
        "gpus": list(task.gpus(devices_confined) or ()),
        "accessible_devices": list(task.accessible_devices),
        "cuda_visible_devices": task.cuda_visible_devices,
        "nvidia_smi_error": task.listing_error,
    }


def needs_slurm(measure: _Measure[_Options]) -> _Measure[_Options]:
    """Decorator: ``measure`` raises NotApplicable on a machine without Slurm's client or without Slurm's configuration.

    The outcome is then SKIP, or ERROR if Slurm starts the jobs of the trial.
    """

    @wraps(measure)
    def measure_with_slurm(context: Context, options: _Options) -> Answers:
        if not slurm.installed():
            raise NotApplicable(NO_CLIENT)
        try:
            yield from measure(context, options)
        except slurm.NotConfigured as error:
            raise NotApplicable(NO_CLUSTER) from error

    return measure_with_slurm


@contextmanager
def open_probe_jobs(context: Context, options: SubmitOptions, nodes: int = 1) -> Iterator[ProbeJobs]:
    """Yield ProbeJobs, whose jobs have ``nodes`` nodes each, and cancel all its jobs on exit.

    If seatrial is killed, their time limit ends them.
    """
    placement = placement_of_smaller_job(options, nodes)
    job_name = f"seatrial-{uuid.uuid4().hex[:12]}"
    jobs = ProbeJobs(job_name, placement, options.extra, options.wait_s, context.progress)
    try:
        yield jobs
    finally:
        jobs.cancel_all()
