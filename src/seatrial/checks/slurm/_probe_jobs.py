"""Where checks hand in jobs of their own: small, short, found again by one name, and gone when the check ends."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from pydantic import Field

from seatrial.checks.base import Context, Options
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Job
from seatrial.model import Fact, NotApplicable, SeatrialError

RUN_S = 120  # after so long we do not wait for the end of a job any more
POLL_S = 1.0
_MINUTES = 5  # --time of our jobs, which take seconds


class SubmitOptions(Options):
    """How our jobs are submitted."""

    partition: str | None = None
    account: str | None = None
    extra: tuple[str, ...] = Field(default=(), description="further words for srun and sbatch, such as --qos=test")
    wait_s: float = Field(default=300, gt=0, description="seconds that a job may wait for its start")


@dataclass(frozen=True)
class ProbeJobs:
    """Submits jobs under a name of their own, by which all of them are found again."""

    job_name: str
    submit_options: tuple[str, ...]
    wait_s: float
    progress: Callable[[str], None]

    def command(self, tool: str, *more: str, minutes: int = _MINUTES) -> list[str]:
        """One task, unless ``more`` says otherwise: Slurm takes the last word on an option.

        The job is removed by Slurm itself, should we be killed, when it has not started in time (--deadline).
        """
        deadline = f"--deadline=now+{int(self.wait_s) + 60 * (minutes + 1)}seconds"
        size = ["--nodes=1", "--ntasks=1", f"--time={minutes}", deadline, f"--job-name={self.job_name}"]
        outside = slurm.env_prefix_outside_job() or ["env"]
        return [*outside, f"SEATRIAL_PROBE={self.job_name}", tool, *size, *self.submit_options, *more]

    def submit(self, script: str, *more: str, minutes: int = _MINUTES) -> str:
        """A batch job's id. Raises SlurmUnavailable or SlurmRefused."""
        words = ["--parsable", "--output=/dev/null", *more, f"--wrap={script}"]
        return slurm.command_output(self.command("sbatch", *words, minutes=minutes)).strip().partition(";")[0]

    def start_idle_job(self, *size: str, wait_s: float | None = None) -> Job:
        """A job that runs, and does nothing. Raises SeatrialError with Slurm's reason where it does not start."""
        job_id = self.submit(f"sleep {60 * _MINUTES}", *size)
        job = self.wait_until(job_id, lambda job: not job.pending, 0, wait_s)
        if job.state != "RUNNING":
            raise SeatrialError(f"job {job_id} was not left to run: {job}. Run first: scontrol show job {job_id}")
        return job

    def run_step(self, job_id: str, size: tuple[str, ...], command: list[str]) -> str:
        """What a step of that job printed, a label before each line. Raises SlurmUnavailable or SlurmRefused."""
        words = ["srun", f"--jobid={job_id}", "--overlap", "--label", *size]
        return slurm.command_output([*slurm.env_prefix_outside_job(), *words, *command], RUN_S)

    def wait_until(self, job_id: str, until: Callable[[Job], bool], run_s: float, wait_s: float | None = None) -> Job:
        """The job once ``until`` holds or it has run for ``run_s``. Raises SeatrialError where it never starts."""
        submitted, started = time.monotonic(), None
        patience = self.wait_s if wait_s is None else wait_s
        while True:
            job, now = self.query(job_id), time.monotonic()
            if job.pending and now - submitted > patience:
                first = f"squeue --start --job {job_id}; sinfo"
                raise SeatrialError(f"job {job_id} waited {patience:g} s in vain: {job.reason}. Run first: {first}")
            started = None if job.pending else started or now
            if until(job) or (started and now - started > run_s):
                return job
            time.sleep(POLL_S)

    def wait_for_end(self, job_id: str, *fine: str) -> Job:
        """The job after its end. Raises SeatrialError unless it ran, and ended by itself or as in ``fine``."""
        job = self.wait_until(job_id, lambda job: job.ended, RUN_S)
        if job.state not in ("COMPLETED", "FAILED", *fine) or not job.nodes:
            raise SeatrialError(f"job {job_id} was not left to run: {job}. Run first: scontrol show job {job_id}")
        return job

    def query(self, job_id: str) -> Job:
        """The job as it is. Raises SeatrialError when Slurm has forgotten it."""
        job = slurm.job(job_id)
        if not job.has_state:
            raise SeatrialError(f"job {job_id} was lost from sight: {job.reason}")
        self.progress(f"job {job_id}: {job.state} {job.reason}")
        return job

    def cancel_all(self) -> None:
        """Cancel what is left of our jobs. Raises SlurmUnavailable."""
        slurm.command_output(["scancel", f"--name={self.job_name}"])


def condition_fact(name: str, why_not: str) -> Fact:
    """A fact that rules name in their ``where``: "yes", or the reason why they do not apply."""
    return Fact(name=name, value=f"no: {why_not}" if why_not else "yes")


def require_client() -> None:
    """Raises NotApplicable on a machine without Slurm."""
    if not slurm.installed():
        raise NotApplicable("no Slurm client (sinfo) on this machine")


@contextmanager
def open_probe_jobs(context: Context, options: SubmitOptions) -> Iterator[ProbeJobs]:
    """A desk whose jobs are cancelled in every way out; when we are killed, their time limit ends them."""
    named = {"partition": options.partition, "account": options.account}
    words = tuple(f"--{key}={value}" for key, value in named.items() if value)
    desk = ProbeJobs(f"seatrial-{uuid.uuid4().hex[:12]}", (*words, *options.extra), options.wait_s, context.progress)
    try:
        yield desk
    finally:
        desk.cancel_all()
