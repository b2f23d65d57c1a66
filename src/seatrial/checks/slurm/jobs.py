"""slurm.jobs: environment, working directory, exit codes, signals and limits of short jobs with srun and sbatch.

The jobs run on one node and return results by exit codes and srun's output, so that no shared directory is needed.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator

from pydantic import Field

from seatrial.checks.base import Check, Context, RuleFact, SkipIf, facts, metrics
from seatrial.checks.slurm._probe_jobs import POLL_S, ProbeJobs, SubmitOptions, needs_slurm, open_probe_jobs
from seatrial.discover import slurm
from seatrial.discover.slurm_facts import Settings
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope, SeatrialError

METRICS = {
    "sbatch_exit_code": "",
    "sbatch_environment": "bool",
    "sbatch_directory": "bool",
    "signal_delivered": "bool",
    "srun_exit_code": "",
    "srun_environment": "bool",
    "srun_directory": "bool",
    "srun_seconds": "s",
    "memory_limited": "bool",
    "memory_limit_enforced": "bool",
    "time_limit_enforced": "bool",
}

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
RULES = (
    Rule(
        metric="sbatch_exit_code",
        evidence_facts=("batch_job",),
        expect=f"== {_EXIT_CODE}",
        meaning=f"Slurm does not report exit code {_EXIT_CODE} of the batch script: failed jobs look COMPLETED",
        fix="scontrol show job ID; on the node: journalctl -u slurmd -n 50; check Prolog, TaskProlog and Epilog",
    ),
    Rule(
        metric="sbatch_environment",
        expect="== 1 bool",
        meaning=_ENVIRONMENT_MEANING,
        fix=_ENVIRONMENT_FIX,
    ),
    Rule(
        metric="sbatch_directory",
        evidence_facts=("directory",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning=_DIRECTORY_MEANING,
        fix=_DIRECTORY_FIX,
    ),
    Rule(
        metric="signal_delivered",
        evidence_facts=("signalled_job",),
        expect="== 1 bool",
        meaning="signals of scancel do not reach the batch script: jobs cannot save a checkpoint before their end",
        fix="scontrol show config | grep -i proctrack; on the node: journalctl -u slurmd -n 50",
    ),
    Rule(
        metric="srun_exit_code",
        evidence_facts=("srun_output",),
        expect=f"== {_EXIT_CODE}",
        meaning=f"srun does not return exit code {_EXIT_CODE} of its task: scripts do not notice a failed rank",
        fix="srun -p PARTITION sh -c 'exit 7'; echo $?; "
        "check TaskEpilog, SrunEpilog and wrappers of srun (type -a srun)",
    ),
    Rule(
        metric="srun_environment",
        evidence_facts=("srun_output",),
        expect="== 1 bool",
        meaning=_ENVIRONMENT_MEANING,
        fix=_ENVIRONMENT_FIX,
    ),
    Rule(
        metric="srun_directory",
        evidence_facts=("srun_output", "directory"),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning=_DIRECTORY_MEANING,
        fix=_DIRECTORY_FIX,
    ),
    Rule(
        metric="memory_limited",
        evidence_facts=("memory_limit",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="job memory is not limited: a job with a memory leak affects the node and the other jobs on it",
        fix="SelectTypeParameters=CR_Core_Memory and TaskPlugin=task/affinity,task/cgroup in slurm.conf, "
        "ConstrainRAMSpace=yes in cgroup.conf; restart slurmctld and every slurmd",
    ),
    Rule(
        metric="memory_limit_enforced",
        evidence_facts=("memory_limit", "memory_job"),
        expect="== 1 bool",
        applies_if={"memory_limit_tested": "yes"},
        meaning=f"a job with --mem={_REQUESTED_MIB}M allocated {_ALLOCATED_BYTES // 2**20} MiB and was not killed, "
        "although memory limits are configured",
        fix="On the node: grep -i ConstrainRAMSpace /etc/slurm/cgroup.conf; journalctl -u slurmd | grep -i cgroup. "
        "If the node has swap: ConstrainSwapSpace=yes too",
    ),
    Rule(
        metric="time_limit_enforced",
        evidence_facts=("time_limit_job",),
        expect="== 1 bool",
        applies_if={"time_limit_tested": "yes"},
        meaning="a job still runs after --time, OverTimeLimit, KillWait and two minutes: hung jobs keep their nodes",
        fix="scontrol show config | grep -E 'OverTimeLimit|KillWait'; scontrol show partition | grep OverTimeLimit",
    ),
)


class JobsOptions(SubmitOptions):
    """Submit options, and whether the time limit is tested."""

    time_limit: bool = Field(default=False, description="also test the time limit: takes two minutes or more")


@needs_slurm
def measure(context: Context, options: JobsOptions) -> Iterator[Observation]:
    """Yield exit codes, environment, directory, signal delivery and limits of the probe jobs.

    Raises NotApplicable without Slurm client or configuration, SeatrialError with Slurm's reason if a probe job does
    not run.
    """
    settings = slurm.settings()
    yield Fact(name="directory", value=os.getcwd())
    with open_probe_jobs(context, options) as jobs:
        yield from _sbatch_metrics(jobs)
        yield from _signal_metric(jobs)
        yield from _srun_metrics(jobs)
        yield from _memory_metrics(jobs, settings)
        yield from _time_limit_metric(jobs, settings, options.time_limit)


def _sbatch_metrics(jobs: ProbeJobs) -> Iterator[Observation]:
    """Yield exit code, environment and directory of a batch job."""
    directory = shlex.quote(os.getcwd())
    # exit code: _EXIT_CODE, plus 1 without the environment, plus 2 in another directory
    script = (
        f'code={_EXIT_CODE}; test "$SEATRIAL_PROBE" = {jobs.job_name} || code=$((code + 1)); '
        f'test "$(pwd -P)" = {directory} || code=$((code + 2)); exit $code'
    )
    job = jobs.wait_for_end(jobs.submit(script))
    yield Fact(name="batch_job", value=job.model_dump(mode="json"))
    code = job.exit_code or 0
    failure_bits = code - _EXIT_CODE
    if 0 <= failure_bits <= 3:
        passed = {"sbatch_environment": not failure_bits & 1, "sbatch_directory": not failure_bits & 2}
        yield from metrics(METRICS, {"sbatch_exit_code": _EXIT_CODE, **passed})
    else:
        yield from metrics(METRICS, {"sbatch_exit_code": code})


def _signal_metric(jobs: ProbeJobs) -> Iterator[Observation]:
    """Yield whether SIGUSR1 from scancel reaches a batch script."""
    job_id = jobs.submit(f"trap 'exit {_SIGNAL_EXIT_CODE}' USR1; sleep 60 & wait")
    job = jobs.wait_until(job_id, lambda job: not job.pending, 0)
    deadline = time.monotonic() + 30  # a batch script starts within seconds
    while not job.ended and time.monotonic() < deadline:  # repeated, as the script may not have started yet
        slurm.command_output(["scancel", "--signal=USR1", "--batch", job_id])
        time.sleep(POLL_S)
        job = jobs.query(job_id)
    yield Fact(name="signalled_job", value=job.model_dump(mode="json"))
    # SIGUSR1 (10) terminates a shell that has not set its trap yet: the signal was delivered in this case too.
    yield from metrics(METRICS, {"signal_delivered": job.exit_code == _SIGNAL_EXIT_CODE or job.signal == 10})


def _srun_metrics(jobs: ProbeJobs) -> Iterator[Observation]:
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
    yield Fact(name="srun_output", value=[*lines, *result.err.splitlines()])
    values = {
        "srun_seconds": time.monotonic() - started,
        "srun_exit_code": result.code or 0,
        "srun_environment": f"probe={jobs.job_name}" in lines,
        "srun_directory": f"directory={os.getcwd()}" in lines,
    }
    yield from metrics(METRICS, values)


def _memory_metrics(jobs: ProbeJobs, settings: Settings) -> Iterator[Observation]:
    """Yield whether memory is limited and, if so, whether a job that exceeds its limit is killed."""
    mechanism, reason = _memory_limit_mechanism(settings)
    enforcement = mechanism or f"not enforced: {reason}"
    yield from facts({"memory_limit": enforcement, "memory_limit_tested": "yes" if mechanism else "no"})
    yield from metrics(METRICS, {"memory_limited": mechanism is not None})
    if not mechanism:
        return
    # tail keeps its whole input in memory. The script waits for tail, and ends when tail is killed
    size = _ALLOCATED_BYTES
    script = f"{{ head -c {size} /dev/zero; sleep {_ALLOCATED_S}; }} | tail -c {size} > /dev/null & wait $!"
    job = jobs.wait_for_end(
        jobs.submit(script, f"--mem={_REQUESTED_MIB}M", "--acctg-freq=task=1"), "OUT_OF_MEMORY", "CANCELLED"
    )
    yield Fact(name="memory_job", value=job.model_dump(mode="json"))
    # SIGKILL or SIGTERM ended the script (signal), or its last command (a shell then exits with 128 + the signal)
    killed_by_signal = job.signal in (9, 15) or job.exit_code in (128 + 9, 128 + 15)
    killed = job.state in ("OUT_OF_MEMORY", "CANCELLED") or killed_by_signal
    if not killed and job.state != "COMPLETED":
        raise SeatrialError(f"memory limit not tested: job {job.id} ended with state {job}")
    yield from metrics(METRICS, {"memory_limit_enforced": killed})


def _memory_limit_mechanism(settings: Settings) -> tuple[str | None, str]:
    """Return the mechanism that limits job memory, or None and the reason: slurm.conf(5), cgroup.conf(5)."""
    if not settings.memory_is_consumable:
        return None, "memory is not a consumable resource, SelectTypeParameters has no Memory"
    if "task/cgroup" in settings.task_plugin and settings.constrain_ram_space != "no":
        return "task/cgroup", ""
    if "OverMemoryKill" in settings.job_acct_gather_params:
        return "OverMemoryKill", ""
    return None, "neither task/cgroup with ConstrainRAMSpace nor OverMemoryKill is configured"


def _time_limit_metric(jobs: ProbeJobs, settings: Settings, enabled: bool) -> Iterator[Observation]:
    """Yield whether a job that exceeds its time limit is ended, if this test is ``enabled``."""
    yield Fact(name="time_limit_tested", value="yes" if enabled else "no")
    if not enabled:
        return
    grace_periods = (settings.over_time_limit_s, settings.kill_wait_s)
    grace_s = sum(seconds for seconds in grace_periods if isinstance(seconds, int))
    # --time=1 is 60 s. Slurm checks limits about twice a minute: such jobs were observed to end after 73 and 85 s
    run_s = 60 + grace_s + 120
    job = jobs.wait_until(jobs.submit("sleep 3600", minutes=1), lambda job: job.ended, run_s)
    yield Fact(name="time_limit_job", value=job.model_dump(mode="json"))
    if job.ended and job.state != "TIMEOUT":
        raise SeatrialError(f"time limit not tested: job {job.id} ended with state {job}")
    yield from metrics(METRICS, {"time_limit_enforced": job.ended})


CHECK = Check(
    name="slurm.jobs",
    title="Jobs with srun and sbatch: environment, exit codes, signals, limits",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    rule_facts={
        "memory_limit_tested": RuleFact(reason="Slurm enforces no memory limit"),
        "time_limit_tested": RuleFact(reason="the option time_limit is not set"),
    },
    measure=measure,
    limit_s=1800,
    options=JobsOptions,
    skip_if=(SkipIf.NO_SLURM,),
)
