"""slurm.jobs: environment, working directory, exit codes, signals and limits of short jobs with srun and sbatch.

The jobs run on one node and return results by exit codes and srun's output, so that no shared directory is needed.
"""

from __future__ import annotations

import os
import shlex
import time

from pydantic import Field

from seatrial.checks.check import Check, Context, SkipIf
from seatrial.checks.declare import Answers, absent, metric, unreadable, value, warning
from seatrial.checks.slurm._probe_jobs import POLL_S, ProbeJobs, SubmitOptions, needs_slurm, open_probe_jobs
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Settings
from seatrial.model import Phase, Scope, SeatrialError

_EXIT_CODE = 7  # exit code of a probe job whose tests passed; shells and Slurm do not use it
_SIGNAL_EXIT_CODE = 12  # the trap of the signalled job ends the script with this exit code
# The job that tests the memory limit requests _REQUESTED_MIB, well above the needs of slurmstepd. It allocates more,
# and keeps this memory for _ALLOCATED_S seconds: OverMemoryKill checks once per second (--acctg-freq=task=1)
_REQUESTED_MIB = 128
_ALLOCATED_BYTES = 512 * 2**20
_ALLOCATED_S = 20

_ENVIRONMENT_MEANING = (
    "environment variables of the submit host are not set in the job: NCCL_*, HF_HOME and a venv get lost too"
)
_ENVIRONMENT_FIX = (
    "env | grep -E '^(SBATCH|SRUN|SLURM)_EXPORT', and unset this variable; scontrol show config | grep -iE "
    "'TaskProlog|CliFilter'"
)
_DIRECTORY_MEANING = "the job does not start in the submit directory: relative paths of scripts and data are wrong"
_DIRECTORY_FIX = (
    "Does the directory exist on the node, readable by this user? srun -p PARTITION ls -ld DIRECTORY. "
    "Submit from a shared directory, or use --chdir"
)


class JobsOptions(SubmitOptions):
    """Submit options, and whether the time limit is tested."""

    time_limit: bool = Field(default=False, description="also test the time limit: takes two minutes or more")


@needs_slurm
def measure(context: Context, options: JobsOptions) -> Answers:
    """Yield exit codes, environment, directory, signal delivery and limits of the probe jobs.

    Raises NotApplicable without Slurm client or configuration, SeatrialError with Slurm's reason if a probe job does
    not run.
    """
    settings = slurm.settings()
    with open_probe_jobs(context, options) as jobs:
        yield from _sbatch_metrics(jobs)
        yield from _signal_metric(jobs)
        yield from _srun_metrics(jobs)
        yield from _memory_metrics(jobs, settings)
        yield from _time_limit_metric(jobs, settings, options.time_limit)


def _sbatch_metrics(jobs: ProbeJobs) -> Answers:
    """Yield exit code, environment and directory of a batch job."""
    directory = shlex.quote(os.getcwd())
    # exit code: _EXIT_CODE, plus 1 without the environment, plus 2 in another directory
    script = (
        f'code={_EXIT_CODE}; test "$SEATRIAL_PROBE" = {jobs.job_name} || code=$((code + 1)); '
        f'test "$(pwd -P)" = {directory} || code=$((code + 2)); exit $code'
    )
    job = jobs.wait_for_end(jobs.submit(script))
    code = job.exit_code or 0
    failure_bits = code - _EXIT_CODE
    is_known = 0 <= failure_bits <= 3
    yield value("sbatch_exit_code", _EXIT_CODE if is_known else code, evidence=job.model_dump(mode="json"))
    if is_known:
        yield value("sbatch_environment", not failure_bits & 1)
        yield value("sbatch_directory", not failure_bits & 2, evidence=os.getcwd())
    else:
        yield unreadable(("sbatch_environment", "sbatch_directory"), f"the batch script ended with exit code {code}")


def _signal_metric(jobs: ProbeJobs) -> Answers:
    """Yield whether SIGUSR1 from scancel reaches a batch script."""
    job_id = jobs.submit(f"trap 'exit {_SIGNAL_EXIT_CODE}' USR1; sleep 60 & wait")
    job = jobs.wait_until(job_id, lambda job: not job.pending, 0)
    deadline = time.monotonic() + 30  # a batch script starts within seconds
    while not job.ended and time.monotonic() < deadline:  # repeated, as the script may not have started yet
        slurm.command_output(["scancel", "--signal=USR1", "--batch", job_id])
        time.sleep(POLL_S)
        job = jobs.query(job_id)
    # SIGUSR1 (10) terminates a shell that has not set its trap yet: the signal was delivered in this case too.
    delivered = job.exit_code == _SIGNAL_EXIT_CODE or job.signal == 10
    yield value("signal_delivered", delivered, evidence=job.model_dump(mode="json"))


def _srun_metrics(jobs: ProbeJobs) -> Answers:
    """Yield exit code, environment, directory and duration (s) of a job with srun."""
    script = (
        f'echo "probe=$SEATRIAL_PROBE"; echo "directory=$(pwd -P)"; echo "node=$SLURMD_NODENAME"; exit {_EXIT_CODE}'
    )
    argv = jobs.command("srun", "/bin/sh", "-c", script)  # absolute path, as the job may have no PATH
    started = time.monotonic()
    result = jobs.run_srun(argv, 60)
    lines = result.out.splitlines()
    if not any(line.startswith("probe=") for line in lines):
        raise slurm.command_error(argv, result)
    output = [*lines, *result.err.splitlines()]
    yield value("srun_seconds", time.monotonic() - started)
    yield value("srun_exit_code", result.code or 0, evidence=output)
    yield value("srun_environment", f"probe={jobs.job_name}" in lines, evidence=output)
    at_directory = f"directory={os.getcwd()}" in lines
    yield value("srun_directory", at_directory, evidence={"output": output, "expected": os.getcwd()})


def _memory_metrics(jobs: ProbeJobs, settings: Settings) -> Answers:
    """Yield whether memory is limited and, if so, whether a job that exceeds its limit is killed."""
    mechanism, reason = _memory_limit_mechanism(settings)
    yield value("memory_limited", mechanism is not None, evidence=reason)
    if not mechanism:
        yield absent("memory_limit_enforced", reason)
        return
    # tail keeps its whole input in memory. The script waits for tail, and ends when tail is killed
    size = _ALLOCATED_BYTES
    script = f"{{ head -c {size} /dev/zero; sleep {_ALLOCATED_S}; }} | tail -c {size} > /dev/null & wait $!"
    job = jobs.wait_for_end(
        jobs.submit(script, f"--mem={_REQUESTED_MIB}M", "--acctg-freq=task=1"), "OUT_OF_MEMORY", "CANCELLED"
    )
    # SIGKILL or SIGTERM ended the script (signal), or its last command (a shell then exits with 128 + the signal)
    killed_by_signal = job.signal in (9, 15) or job.exit_code in (128 + 9, 128 + 15)
    killed = job.state in ("OUT_OF_MEMORY", "CANCELLED") or killed_by_signal
    if not killed and job.state != "COMPLETED":
        raise SeatrialError(f"memory limit not tested: job {job.id} ended with state {job}")
    evidence = {"memory_limit": mechanism, "memory_job": job.model_dump(mode="json")}
    yield value("memory_limit_enforced", killed, evidence=evidence)


def _memory_limit_mechanism(settings: Settings) -> tuple[str | None, str]:
    """Return the mechanism that limits job memory, or None and the reason: slurm.conf(5), cgroup.conf(5)."""
    if not settings.memory_is_consumable:
        return None, "memory is not a consumable resource, SelectTypeParameters has no Memory"
    if "task/cgroup" in settings.task_plugin and settings.constrain_ram_space != "no":
        return "task/cgroup", ""
    if "OverMemoryKill" in settings.job_acct_gather_params:
        return "OverMemoryKill", ""
    return None, "neither task/cgroup with ConstrainRAMSpace nor OverMemoryKill is configured"


def _time_limit_metric(jobs: ProbeJobs, settings: Settings, enabled: bool) -> Answers:
    """Yield whether a job that exceeds its time limit is ended, if this test is ``enabled``."""
    if not enabled:
        yield absent("time_limit_enforced", "the option time_limit is not set")
        return
    grace_periods = (settings.over_time_limit_s, settings.kill_wait_s)
    grace_s = sum(seconds for seconds in grace_periods if isinstance(seconds, int))
    # --time=1 is 60 s. Slurm checks limits about twice a minute: such jobs were observed to end after 73 and 85 s
    run_s = 60 + grace_s + 120
    job = jobs.wait_until(jobs.submit("sleep 3600", minutes=1), lambda job: job.ended, run_s)
    if job.ended and job.state != "TIMEOUT":
        raise SeatrialError(f"time limit not tested: job {job.id} ended with state {job}")
    yield value("time_limit_enforced", job.ended, evidence=job.model_dump(mode="json"))


CHECK = Check(
    name="slurm.jobs",
    title="Jobs with srun and sbatch: environment, exit codes, signals, limits",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    measure=measure,
    limit_s=1800,
    options=JobsOptions,
    skip_if=(SkipIf.NO_SLURM,),
    declared=(
        metric(
            "sbatch_exit_code",
            f"== {_EXIT_CODE}",
            f"Slurm does not report exit code {_EXIT_CODE} of the batch script: failed jobs look COMPLETED",
            "scontrol show job ID; on the node: journalctl -u slurmd -n 50; check Prolog, TaskProlog and Epilog",
            log_evidence=True,
        ),
        metric("sbatch_environment", "yes", _ENVIRONMENT_MEANING, _ENVIRONMENT_FIX),
        warning("sbatch_directory", "yes", _DIRECTORY_MEANING, _DIRECTORY_FIX),
        metric(
            "signal_delivered",
            "yes",
            "signals of scancel do not reach the batch script: jobs cannot save a checkpoint before their end",
            "scontrol show config | grep -i proctrack; on the node: journalctl -u slurmd -n 50",
        ),
        metric(
            "srun_exit_code",
            f"== {_EXIT_CODE}",
            f"srun does not return exit code {_EXIT_CODE} of its task: scripts do not notice a failed rank",
            "srun -p PARTITION sh -c 'exit 7'; echo $?; "
            "check TaskEpilog, SrunEpilog and wrappers of srun (type -a srun)",
            log_evidence=True,
        ),
        metric("srun_seconds", unit="s", meaning="duration of an srun command, with the wait for its job to start"),
        metric("srun_environment", "yes", _ENVIRONMENT_MEANING, _ENVIRONMENT_FIX),
        warning("srun_directory", "yes", _DIRECTORY_MEANING, _DIRECTORY_FIX),
        warning(
            "memory_limited",
            "yes",
            "job memory is not limited: a job with a memory leak affects the node and the other jobs on it",
            "SelectTypeParameters=CR_Core_Memory and TaskPlugin=task/affinity,task/cgroup in slurm.conf, "
            "ConstrainRAMSpace=yes in cgroup.conf; restart slurmctld and every slurmd",
        ),
        metric(
            "memory_limit_enforced",
            "yes",
            f"a job with --mem={_REQUESTED_MIB}M allocated {_ALLOCATED_BYTES // 2**20} MiB and was not killed, "
            "although memory limits are configured",
            "On the node: grep -i ConstrainRAMSpace /etc/slurm/cgroup.conf; journalctl -u slurmd | grep -i cgroup. "
            "If the node has swap: ConstrainSwapSpace=yes too",
        ),
        metric(
            "time_limit_enforced",
            "yes",
            "a job still runs after --time, OverTimeLimit, KillWait and two minutes: hung jobs keep their nodes",
            "scontrol show config | grep -E 'OverTimeLimit|KillWait'; scontrol show partition | grep OverTimeLimit",
        ),
    ),
)
