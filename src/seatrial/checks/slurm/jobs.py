"""slurm.jobs: do srun and sbatch really run jobs as they are meant to? On one node, briefly, and nothing stays.

Results come back by exit codes and srun's output alone, so that no directory has to be shared.
"""

from __future__ import annotations

import os
import shlex
import time
from collections.abc import Iterator

from pydantic import Field

from seatrial.checks.base import Check, Context, facts, metrics
from seatrial.checks.slurm._probe_jobs import POLL_S, ProbeJobs, SubmitOptions, open_probe_jobs, require_client
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

_EXIT_CODE = 7  # what our jobs end with when all is well; a failing shell or Slurm itself does not
_SIGNALLED = 12
_MEMORY_MIB = 128  # what the job asks for, well over slurmstepd's own need
_HOARD = 512 * 2**20  # and bytes that it takes
_HOARD_S = 20  # so long does it hold them: OverMemoryKill looks every second where a job asks for that

_ENVIRONMENT = (
    "a variable that is set where the job is submitted does not arrive in it: nor will NCCL_*, HF_HOME or a venv",
    "env | grep -E '^(SBATCH|SRUN|SLURM)_EXPORT', and unset it; scontrol show config | grep -iE 'TaskProlog|CliFilter'",
)
_DIRECTORY = (
    "the job starts in another directory than it was submitted from: relative paths of scripts and data lead astray",
    "Is that directory there on the node, for this user? srun -N1 ls -ld DIRECTORY. Submit from a shared one, or give "
    "--chdir",
)
RULES = (
    Rule(
        metric="sbatch_exit_code",
        evidence_facts=("batch_job",),
        expect=f"== {_EXIT_CODE}",
        meaning=f"sbatch must tell of the exit code {_EXIT_CODE} of its script, or failures pass for successes",
        fix="scontrol show job ID; on the node: journalctl -u slurmd -n 50; look at Prolog, TaskProlog and Epilog",
    ),
    Rule(
        metric="sbatch_environment",
        expect="== 1 bool",
        meaning=_ENVIRONMENT[0],
        fix=_ENVIRONMENT[1],
    ),
    Rule(
        metric="sbatch_directory",
        evidence_facts=("directory",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning=_DIRECTORY[0],
        fix=_DIRECTORY[1],
    ),
    Rule(
        metric="signal_delivered",
        evidence_facts=("signalled_job",),
        expect="== 1 bool",
        meaning="a signal that scancel sends does not reach the batch script: no job can save a checkpoint before its end",
        fix="scontrol show config | grep -i proctrack; on the node: journalctl -u slurmd -n 50",
    ),
    Rule(
        metric="srun_exit_code",
        evidence_facts=("srun_output",),
        expect=f"== {_EXIT_CODE}",
        meaning=f"srun must return the exit code {_EXIT_CODE} of its task, or a crashed rank passes for a success",
        fix="srun -N1 sh -c 'exit 7'; echo $?; look at TaskEpilog, SrunEpilog and wrappers of srun (type -a srun)",
    ),
    Rule(
        metric="srun_environment",
        evidence_facts=("srun_output",),
        expect="== 1 bool",
        meaning=_ENVIRONMENT[0],
        fix=_ENVIRONMENT[1],
    ),
    Rule(
        metric="srun_directory",
        evidence_facts=("srun_output", "directory"),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning=_DIRECTORY[0],
        fix=_DIRECTORY[1],
    ),
    Rule(
        metric="memory_limited",
        evidence_facts=("memory_limit",),
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        meaning="nothing holds a job to the memory it asked for: one that leaks takes the node down, and its neighbours",
        fix="SelectTypeParameters=CR_Core_Memory and TaskPlugin=task/affinity,task/cgroup in slurm.conf, "
        "ConstrainRAMSpace=yes in cgroup.conf; restart slurmctld and every slurmd",
    ),
    Rule(
        metric="memory_limit_enforced",
        evidence_facts=("memory_limit", "memory_job"),
        expect="== 1 bool",
        applies_if={"memory_limit_tested": "yes"},
        meaning=f"a job that asked for {_MEMORY_MIB} MiB took {_HOARD // 2**20} MiB and lived, though limits are set up",
        fix="On the node: grep -i ConstrainRAMSpace /etc/slurm/cgroup.conf; journalctl -u slurmd | grep -i cgroup. "
        "With swap on the node, ConstrainSwapSpace=yes too",
    ),
    Rule(
        metric="time_limit_enforced",
        evidence_facts=("time_limit_job",),
        expect="== 1 bool",
        applies_if={"time_limit_tested": "yes"},
        meaning="a job outlived its --time: one that hangs would hold its nodes for ever",
        fix="scontrol show config | grep -E 'OverTimeLimit|KillWait'; scontrol show partition | grep OverTimeLimit",
    ),
)


class JobsOptions(SubmitOptions):
    """What is tried, and how it is submitted."""

    time_limit: bool = Field(default=False, description="try the time limit too: takes two minutes, or more")


def measure(context: Context, options: JobsOptions) -> Iterator[Observation]:
    """Raises NotApplicable without a Slurm client, SeatrialError with Slurm's reason where a job cannot be tried."""
    require_client()
    settings = slurm.settings()
    yield Fact(name="directory", value=os.getcwd())
    with open_probe_jobs(context, options) as desk:
        yield from _batch(desk)
        yield from _signal(desk)
        yield from _interactive(desk)
        yield from _memory(desk, settings)
        yield from _time_limit(desk, settings, options.time_limit)


def _batch(desk: ProbeJobs) -> Iterator[Observation]:
    here = shlex.quote(os.getcwd())
    script = (
        f'code={_EXIT_CODE}; test "$SEATRIAL_PROBE" = {desk.job_name} || code=$((code + 1)); '
        f'test "$(pwd -P)" = {here} || code=$((code + 2)); exit $code'
    )
    job = desk.wait_for_end(desk.submit(script))
    yield Fact(name="batch_job", value=job.model_dump(mode="json"))
    code = job.exit_code or 0
    faults = code - _EXIT_CODE
    if not 0 <= faults <= 3:
        yield from metrics(METRICS, {"sbatch_exit_code": code})
    else:
        arrived = {"sbatch_environment": not faults & 1, "sbatch_directory": not faults & 2}
        yield from metrics(METRICS, {"sbatch_exit_code": _EXIT_CODE, **arrived})


def _signal(desk: ProbeJobs) -> Iterator[Observation]:
    job_id = desk.submit(f"trap 'exit {_SIGNALLED}' USR1; sleep 60 & wait")
    job = desk.wait_until(job_id, lambda job: not job.pending, 0)
    deadline = time.monotonic() + 30
    while not job.ended and time.monotonic() < deadline:  # again and again: the script may not have begun yet
        slurm.command_output(["scancel", "--signal=USR1", "--batch", job_id])
        time.sleep(POLL_S)
        job = desk.query(job_id)
    yield Fact(name="signalled_job", value=job.model_dump(mode="json"))
    # SIGUSR1 ends a shell that has not set its trap yet: then the job's own signal is 10.
    yield from metrics(METRICS, {"signal_delivered": job.exit_code == _SIGNALLED or job.signal == 10})


def _interactive(desk: ProbeJobs) -> Iterator[Observation]:
    script = (
        f'echo "probe=$SEATRIAL_PROBE"; echo "directory=$(pwd -P)"; echo "node=$SLURMD_NODENAME"; exit {_EXIT_CODE}'
    )
    argv = desk.command("srun", "/bin/sh", "-c", script)  # by its path: without an environment there is no PATH
    desk.progress("srun")
    started = time.monotonic()
    answer = slurm.run_command(argv, desk.wait_s + 60)
    lines = answer.out.splitlines()
    if not any(line.startswith("probe=") for line in lines):
        raise slurm.command_error(argv, answer)
    yield Fact(name="srun_output", value=[*lines, *answer.err.splitlines()])
    values = {
        "srun_seconds": time.monotonic() - started,
        "srun_exit_code": answer.code or 0,
        "srun_environment": f"probe={desk.job_name}" in lines,
        "srun_directory": f"directory={os.getcwd()}" in lines,
    }
    yield from metrics(METRICS, values)


def _memory(desk: ProbeJobs, settings: Settings) -> Iterator[Observation]:
    limiter, why_not = _memory_limiter(settings)
    enforced = limiter or f"not enforced: {why_not}"
    yield from facts({"memory_limit": enforced, "memory_limit_tested": "yes" if limiter else "no"})
    yield from metrics(METRICS, {"memory_limited": limiter is not None})
    if not limiter:
        return
    # tail keeps all that it reads, since it cannot know where the end is; when it is killed, the script ends.
    script = f"{{ head -c {_HOARD} /dev/zero; sleep {_HOARD_S}; }} | tail -c {_HOARD} > /dev/null & wait $!"
    job = desk.wait_for_end(
        desk.submit(script, f"--mem={_MEMORY_MIB}M", "--acctg-freq=task=1"), "OUT_OF_MEMORY", "CANCELLED"
    )
    yield Fact(name="memory_job", value=job.model_dump(mode="json"))
    by_signal = job.signal in (9, 15) or job.exit_code in (128 + 9, 128 + 15)  # of the script, or its last command
    killed = job.state in ("OUT_OF_MEMORY", "CANCELLED") or by_signal
    if not killed and job.state != "COMPLETED":
        raise SeatrialError(f"the memory limit could not be tried: job {job.id} ended as {job}")
    yield from metrics(METRICS, {"memory_limit_enforced": killed})


def _memory_limiter(settings: Settings) -> tuple[str | None, str]:
    """What holds jobs to their memory: slurm.conf(5), SelectTypeParameters and JobAcctGatherParams; cgroup.conf(5)."""
    if not settings.memory_is_consumable:
        return None, "memory is not handed out to jobs, SelectTypeParameters has no Memory"
    if "task/cgroup" in settings.task_plugin and settings.constrain_ram_space != "no":
        return "task/cgroup", ""
    if "OverMemoryKill" in settings.job_acct_gather_params:
        return "OverMemoryKill", ""
    return None, "neither task/cgroup with ConstrainRAMSpace nor OverMemoryKill is configured"


def _time_limit(desk: ProbeJobs, settings: Settings, wanted: bool) -> Iterator[Observation]:
    yield Fact(name="time_limit_tested", value="yes" if wanted else "no")
    if not wanted:
        return
    grace = sum(s for s in (settings.over_time_limit_s, settings.kill_wait_s) if isinstance(s, int))
    # Slurm looks at limits twice a minute or so: a job of one minute was seen to end after 73 and 85 s.
    job = desk.wait_until(desk.submit("sleep 3600", minutes=1), lambda job: job.ended, 60 + grace + 120)
    yield Fact(name="time_limit_job", value=job.model_dump(mode="json"))
    yield from metrics(METRICS, {"time_limit_enforced": job.state == "TIMEOUT"})


CHECK = Check(
    name="slurm.jobs",
    title="srun and sbatch run jobs, and tell the truth about them",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=1800,
    options=JobsOptions,
)
