"""slurm.isolation: do two jobs that run side by side on one node keep off each other's GPUs and CPUs?

Two jobs of our own hold a GPU and some CPUs each, on the same node at the same time; a step in each tells what it has.
"""

from __future__ import annotations

from collections.abc import Iterator

from pydantic import Field

from seatrial.checks.base import Check, Context, metrics
from seatrial.checks.slurm._probe_jobs import ProbeJobs, SubmitOptions, condition_fact, open_probe_jobs, require_client
from seatrial.discover import slurm, slurm_task
from seatrial.discover.slurm_facts import Job, Partition, Settings
from seatrial.discover.slurm_task import Task
from seatrial.model import (
    Fact,
    NotApplicable,
    Observation,
    Phase,
    Rule,
    Scope,
    SeatrialError,
)

METRICS = {"gpus_shared": "GPUs", "gpus_accessible_to_both": "GPUs", "cpus_shared": "CPUs"}

RULES = (
    Rule(
        metric="gpus_shared",
        evidence_facts=("first", "second"),
        expect="== 0 GPUs",
        applies_if={"gpus_compared": "yes"},
        meaning="two jobs on one node were given the same GPU: both are slow, and both may run out of its memory",
        fix="scontrol -d show job ID (GRES=…(IDX:…)) of both; on the node: slurmd -G; nvidia-smi -L; TaskProlog",
    ),
    Rule(
        metric="gpus_accessible_to_both",
        evidence_facts=("first", "second"),
        expect="== 0 GPUs",
        applies_if={"gpus_compared": "yes", "devices_confined": "yes"},
        meaning="two jobs on one node can open the same GPU, though device cgroups are set up",
        fix="On the node: grep -i ConstrainDevices /etc/slurm/cgroup.conf; slurmd -G must name each /dev/nvidiaN; "
        "journalctl -u slurmd | grep -i cgroup",
    ),
    Rule(
        metric="cpus_shared",
        evidence_facts=("first", "second"),
        expect="== 0 CPUs",
        applies_if={"cpus_confined": "yes"},
        meaning="two jobs on one node run on the same CPUs: each slows the other down, and measurements with it",
        fix="scontrol -d show job ID (CPU_IDs) of both; on the node: grep -i ConstrainCores /etc/slurm/cgroup.conf; "
        "slurmd -C, against its NodeName line; journalctl -u slurmd | grep -iE 'cgroup|affinity'",
    ),
)


class IsolationOptions(SubmitOptions):
    """How our two jobs are submitted, and what each asks for."""

    # at most so long that the first, which has five minutes, is still there
    second_job_wait_s: float = Field(default=120, gt=0, le=180, description="seconds in which the second must start")
    cpus: int = Field(default=2, gt=0)  # both threads of a core, where cores have two
    devices: str = Field(default="/dev/nvidia[0-9]*", description="pattern of the GPUs' device files")


def measure(context: Context, options: IsolationOptions) -> Iterator[Observation]:
    """Raises NotApplicable where a node takes one job at a time, SeatrialError where two did not come to run there."""
    require_client()
    settings, partition = slurm.settings(), _partition(options)
    reason = f"SelectType={settings.select_type} hands out whole nodes" if settings.allocates_whole_nodes else ""
    if partition and partition.oversubscribe == "EXCLUSIVE":
        reason = reason or f"partition {partition.name} has OverSubscribe=EXCLUSIVE"
    if reason:
        raise NotApplicable(f"no two jobs run on one node of this cluster: {reason}")
    gpus = 0
    if "gpu" in settings.gres_types:
        gpus = slurm.gpus_per_node(options.partition) if context.expected_gpus is None else context.expected_gpus
    yield from _setup(settings, partition, gpus)
    size = ["--nodes=1", "--ntasks=1", f"--cpus-per-task={options.cpus}"]
    if settings.memory_is_consumable:  # the default may be all of a node's
        size.append("--mem=1G")
    if gpus > 1:
        size.append("--gres=gpu:1")
    with open_probe_jobs(context, options) as desk:
        jobs = _side_by_side(desk, tuple(size), options.second_job_wait_s)
        probe = slurm_task.srun_command(options.devices)
        first, second = (_only(desk.run_step(job.id, tuple(size), probe), job) for job in jobs)
        _require_both_run(desk, jobs)
    yield from _compare(first, second, settings.constrains_devices, gpus > 1)


def _partition(options: IsolationOptions) -> Partition | None:
    """The one that our jobs go to, as far as its name is known: sbatch's words may name another."""
    named = options.partition
    return next((one for one in slurm.partitions() if (one.name == named if named else one.default)), None)


def _setup(settings: Settings, partition: Partition | None, gpus: int) -> Iterator[Fact]:
    """What the rules' ``where`` asks: each is ``yes``, or the reason why the rule does not apply."""
    plugins = f"TaskPlugin={','.join(settings.task_plugin)}"
    confined = "" if settings.constrains_cpus else f"{plugins}, ConstrainCores={settings.constrain_cores}"
    if not settings.cpus_are_consumable:
        confined = f"SelectTypeParameters={','.join(settings.select_type_parameters)} does not hand out CPUs"
    elif partition and (partition.oversubscribe or "NO").startswith("FORCE"):
        confined = f"partition {partition.name} shares CPUs on purpose, OverSubscribe={partition.oversubscribe}"
    yield condition_fact("cpus_confined", confined)
    devices = "" if settings.constrains_devices else f"{plugins}, ConstrainDevices={settings.constrain_devices}"
    yield condition_fact("devices_confined", devices)
    yield condition_fact(
        "gpus_compared", "" if gpus > 1 else f"Slurm has {gpus} GPUs a node, and two jobs need one each"
    )


def _side_by_side(desk: ProbeJobs, size: tuple[str, ...], second_job_wait_s: float) -> tuple[Job, Job]:
    """Two jobs that run on one node. Raises SeatrialError, with Slurm's reason, where the second does not start."""
    first = desk.start_idle_job(*size)
    try:
        second = desk.start_idle_job(*size, f"--nodelist={first.nodes}", wait_s=second_job_wait_s)
    except SeatrialError as failure:
        raise SeatrialError(f"no second job came to run beside job {first.id} on {first.nodes}: {failure}") from failure
    return first, second


def _require_both_run(desk: ProbeJobs, jobs: tuple[Job, Job]) -> None:
    """Had one ended before the other was looked at, they would not have been side by side."""
    for job in jobs:
        now = desk.query(job.id)
        if now.state != "RUNNING":
            raise SeatrialError(
                f"job {job.id} ended before both were compared: {now}. Run first: scontrol show job {job.id}"
            )


def _only(text: str, job: Job) -> Task:
    found = slurm_task.parse_tasks(text)
    if len(found) != 1 or found[0].node != job.nodes:
        seen = ", ".join(task.name for task in found) or "no task"
        raise SeatrialError(f"a step of job {job.id} on {job.nodes} was to have one task there, and {seen} told")
    return found[0]


def _compare(first: Task, second: Task, confined: bool, gpus: bool) -> Iterator[Observation]:
    own, others = first.gpus(confined), second.gpus(confined)
    for name, task, named in (("first", first, own), ("second", second, others)):
        told = {
            "cpus": list(task.cpus),
            "gpus": list(named or ()),
            "opened": list(task.accessible_devices),
            "cuda": task.cuda_visible_devices,
        }
        yield Fact(name=name, value={**told, "unlisted": task.listing_error})
    values = {"cpus_shared": len(set(first.cpus) & set(second.cpus))}
    if gpus and own and others:  # else nobody knows which GPU a job has, and what is not measured is an ERROR
        values["gpus_shared"] = len(set(own) & set(others))
    if gpus and first.accessible_devices and second.accessible_devices:
        values["gpus_accessible_to_both"] = len(set(first.accessible_devices) & set(second.accessible_devices))
    yield from metrics(METRICS, values, first.node)


CHECK = Check(
    name="slurm.isolation",
    title="Jobs that share a node keep off each other",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=900,
    options=IsolationOptions,
)
