"""slurm.isolation: tests that two jobs on one node have different GPUs and CPUs.

Two probe jobs run on the same node at the same time, each with one GPU and a few CPUs; a step in each job reports its
GPUs and CPUs.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.check import Check, Context, SkipIf
from seatrial.checks.declare import Answers, absent, metric, unreadable, value
from seatrial.checks.slurm._probe_jobs import (
    ProbeJobs,
    SubmitOptions,
    needs_slurm,
    open_probe_jobs,
    task_evidence,
)
from seatrial.discover import slurm, slurm_nodes
from seatrial.discover.slurm_facts import JobRecord, Partition, Settings
from seatrial.model import Phase, Scope, SeatrialError

if TYPE_CHECKING:
    from seatrial.discover.slurm_task import Task


class IsolationOptions(SubmitOptions):
    """Submit options and size of the two probe jobs."""

    # at most 180 s, so that the first job (--time=5 minutes) is still running
    second_job_wait_s: float = Field(
        default=120, gt=0, le=180, description="maximum seconds until the second job starts"
    )
    cpus: int = Field(default=2, gt=0)  # both hyperthreads of a core
    devices: str = Field(default="/dev/nvidia[0-9]*", description="glob pattern of the GPU device files")


@needs_slurm
def measure(context: Context, options: IsolationOptions) -> Answers:
    """Yield the number of GPUs and CPUs that two jobs on one node share.

    Raises SeatrialError if the two jobs do not run at the same time.
    """
    from seatrial.discover import slurm_task

    # --partition may also be in the option ``extra``, which is not parsed here
    settings, partition = slurm.settings(), slurm.partition_of_jobs(options.partition)
    reason = f"SelectType={settings.select_type} allocates whole nodes" if settings.allocates_whole_nodes else ""
    if partition and partition.oversubscribe == "EXCLUSIVE":
        reason = reason or f"partition {partition.name} has OverSubscribe=EXCLUSIVE"
    if reason:
        yield absent("*", f"only one job per node: {reason}")
        return
    gpus = 0
    if "gpu" in settings.gres_types:
        gpus = slurm_nodes.gpus_per_node(options) if context.expected_gpus is None else context.expected_gpus
    size = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={options.cpus}"]
    if settings.memory_is_consumable:  # without --mem a job may get all memory of the node
        size.append("--mem=1G")
    if gpus > 1:
        size.append("--gres=gpu:1")
    with open_probe_jobs(context, options) as jobs:
        pair = _start_pair(jobs, tuple(size), options.second_job_wait_s)
        probe = slurm_task.srun_command(options.devices)
        first, second = (_single_task(jobs.run_step(job.id, tuple(size), probe), job) for job in pair)
        _require_running(jobs, pair)
    yield from _compare(first, second, settings, gpus, _unconfined_cpus_reason(settings, partition))


def _unconfined_cpus_reason(settings: Settings, partition: Partition | None) -> str:
    """Return why several jobs may run on the same CPUs; empty if Slurm confines each to its own."""
    if not settings.cpus_are_consumable:
        return f"SelectTypeParameters={','.join(settings.select_type_parameters)} does not allocate CPUs"
    if partition and (partition.oversubscribe or "NO").startswith("FORCE"):
        return f"partition {partition.name} shares CPUs: OverSubscribe={partition.oversubscribe}"
    return "" if settings.constrains_cpus else f"{_plugins(settings)}, ConstrainCores={settings.constrain_cores}"


def _plugins(settings: Settings) -> str:
    return f"TaskPlugin={','.join(settings.task_plugin)}"


def _start_pair(jobs: ProbeJobs, size: tuple[str, ...], second_job_wait_s: float) -> tuple[JobRecord, JobRecord]:
    """Start two jobs on one node. Raises SeatrialError with Slurm's reason if the second does not start."""
    first = jobs.start_idle_job(*size)
    try:
        second = jobs.start_idle_job(*size, f"--nodelist={first.nodes}", wait_s=second_job_wait_s)
    except SeatrialError as failure:
        raise SeatrialError(f"no second job started on {first.nodes} with job {first.id}: {failure}") from failure
    return first, second


def _require_running(jobs: ProbeJobs, pair: tuple[JobRecord, JobRecord]) -> None:
    """Raise SeatrialError if one of the jobs ended before both steps ran."""
    for job in pair:
        current = jobs.query(job.id)
        if current.state != "RUNNING":
            raise SeatrialError(
                f"job {job.id} ended before both jobs were compared: {current}. Next: scontrol show job {job.id}"
            )


def _single_task(output: str, job: JobRecord) -> Task:
    """Return the task of a step. Raises SeatrialError unless there is one task, on the job's node."""
    from seatrial.discover import slurm_task

    tasks = slurm_task.parse_tasks(output)
    if len(tasks) != 1 or tasks[0].node != job.nodes:
        names = ", ".join(task.name for task in tasks) or "no task"
        raise SeatrialError(f"step of job {job.id}: expected one task on {job.nodes}, got {names}")
    return tasks[0]


def _compare(first: Task, second: Task, settings: Settings, gpus: int, unconfined: str) -> Answers:
    """Yield the number of CPUs and GPUs that the tasks of the two jobs both have.

    ``gpus``: of the node. ``unconfined``: why several jobs may run on the same CPUs, or "".
    """
    confined = settings.constrains_devices
    evidence = {"first_job": task_evidence(first, confined), "second_job": task_evidence(second, confined)}
    if unconfined:
        yield absent("cpus_shared", unconfined)
    else:
        yield value("cpus_shared", len(set(first.cpus) & set(second.cpus)), first.node, evidence=evidence)
    if gpus < 2:
        yield absent("gpus_*", f"{gpus} GPUs per node; two jobs need one GPU each")
        return
    if not confined:
        yield absent("gpus_accessible_to_both", f"{_plugins(settings)}, ConstrainDevices={settings.constrain_devices}")
    first_gpus, second_gpus = first.gpus(confined), second.gpus(confined)
    if first_gpus and second_gpus:
        yield value("gpus_shared", len(set(first_gpus) & set(second_gpus)), first.node, evidence=evidence)
    if confined and first.accessible_devices and second.accessible_devices:
        both = set(first.accessible_devices) & set(second.accessible_devices)
        yield value("gpus_accessible_to_both", len(both), first.node, evidence=evidence)
    errors = " ".join(filter(None, (first.listing_error, second.listing_error)))
    yield unreadable("gpus_*", f"a task with one GPU shows none, or no device file that it can open. {errors}".rstrip())


CHECK = Check(
    name="slurm.isolation",
    title="Isolation of two jobs on one node",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    measure=measure,
    limit_s=900,
    options=IsolationOptions,
    skip_if=(SkipIf.NO_SLURM,),
    declared=(
        metric(
            "gpus_shared",
            "== 0 GPUs",
            "two jobs on one node have the same GPU: low throughput, out of GPU memory",
            "scontrol -d show job ID (GRES=…(IDX:…)) of both; on the node: slurmd -G; nvidia-smi -L; TaskProlog",
        ),
        metric(
            "gpus_accessible_to_both",
            "== 0 GPUs",
            "two jobs on one node can open the same GPU, although device cgroups are configured",
            "On the node: grep -i ConstrainDevices /etc/slurm/cgroup.conf; slurmd -G must list each /dev/nvidiaN; "
            "journalctl -u slurmd | grep -i cgroup",
        ),
        metric(
            "cpus_shared",
            "== 0 CPUs",
            "two jobs on one node run on the same CPUs: both are slower, and measurements are not reliable",
            "scontrol -d show job ID (CPU_IDs) of both; on the node: grep -i ConstrainCores /etc/slurm/cgroup.conf; "
            "compare slurmd -C with the NodeName line; journalctl -u slurmd | grep -iE 'cgroup|affinity'",
        ),
    ),
)
