"""slurm.binding: compares the GPUs, CPUs and memory of each task with its allocation.

One probe job runs on all nodes of the trial. Its first step has one task per GPU on each node, or two tasks per node if
tasks cannot request GPUs. With GPUs, a second step has a single task with one GPU on each node. This task must not have
access to the other GPUs of the node. Each task reports its CPUs, GPUs and memory limit.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain
from typing import TYPE_CHECKING

from pydantic import Field

from seatrial.checks.cause import Cause
from seatrial.checks.check import Check, Context, SkipIf
from seatrial.checks.declare import Answers, absent, metric, unreadable, value, warning
from seatrial.checks.slurm._probe_jobs import SubmitOptions, needs_slurm, open_probe_jobs, task_evidence
from seatrial.discover import slurm, slurm_nodes
from seatrial.discover.slurm_facts import AllocatedResources, Settings
from seatrial.model import Phase, Scope, SeatrialError

if TYPE_CHECKING:
    from seatrial.discover.slurm_task import Task

_CPU_ONLY_TASKS = 2  # tasks per node where tasks cannot request GPUs
_GREP_CGROUP_CONF = "grep -iE 'ConstrainCores|ConstrainDevices|ConstrainRAMSpace' /etc/slurm/cgroup.conf"
# NUMA distance from the ACPI System Locality Information Table: 10 is local. Linux uses 20 for a remote node if the
# firmware has no value (include/linux/topology.h, REMOTE_DISTANCE); distances within a socket are smaller.
_REMOTE_DISTANCE = 20


class BindingOptions(SubmitOptions):
    """Submit options and size of the probe job."""

    nodes: int | None = Field(default=None, gt=0, description="default: number of nodes of the trial")
    cpus_per_task: int = Field(default=2, gt=0)  # both hyperthreads of a core
    devices: str = Field(default="/dev/nvidia[0-9]*", description="glob pattern of the GPU device files")


@needs_slurm
def measure(context: Context, options: BindingOptions) -> Answers:
    """Yield the CPU, memory and GPU metrics of each task of a probe job.

    Raises NotApplicable without Slurm client or configuration, SeatrialError with Slurm's reason if the probe job does
    not run.
    """
    from seatrial.discover import slurm_task

    settings = slurm.settings()
    gpus_per_node, no_gpus_reason = _gpus_per_node(context, options, settings)
    node_count = options.nodes or context.expected_nodes
    tasks_per_node = gpus_per_node or _CPU_ONLY_TASKS
    yield from _not_applicable(settings, gpus_per_node, no_gpus_reason)
    with open_probe_jobs(context, options, node_count) as jobs:
        size = _size_options(node_count, tasks_per_node, options, gpus_per_node > 0, settings)
        job = jobs.start_idle_job(*size)
        allocations = slurm.allocations(job.id)  # node → resources
        probe = slurm_task.srun_command(options.devices)
        all_tasks = slurm_task.parse_tasks(jobs.run_step(job.id, (*size, "--cpu-bind=threads"), probe))
        _require_tasks(all_tasks, node_count * tasks_per_node, allocations)
        yield from _cpu_metrics(all_tasks, allocations, options.cpus_per_task, settings)
        if settings.constrains_memory:
            yield from _memory_metrics(all_tasks, allocations)
        if gpus_per_node:
            yield value("devices_confined", settings.constrains_devices)
            yield from _gpu_metrics(all_tasks, settings.constrains_devices)
        if gpus_per_node > 1 and settings.constrains_devices:
            single_size = _size_options(node_count, 1, options, True, settings)
            single_tasks = slurm_task.parse_tasks(jobs.run_step(job.id, single_size, probe))
            _require_tasks(single_tasks, node_count, allocations)
            for task in single_tasks:
                evidence = task_evidence(task, devices_confined=True)
                yield value("gpus_accessible", task.accessible_gpus, task.name, evidence=evidence)


def _gpus_per_node(context: Context, options: BindingOptions, settings: Settings) -> tuple[int, str]:
    """Return the number of GPUs, and thus of tasks, per node; 0 and the reason if tasks cannot request GPUs."""
    if "gpu" not in settings.gres_types:
        return 0, "GresTypes in slurm.conf does not contain gpu"
    if settings.select_type != "select/cons_tres":
        return 0, f"SelectType={settings.select_type} does not support --gpus-per-task"
    gpus = slurm_nodes.gpus_per_node(options) if context.expected_gpus is None else context.expected_gpus
    return gpus, "" if gpus else "Slurm has no GPUs, or --gpus-per-node is 0"


def _size_options(
    node_count: int, tasks_per_node: int, options: BindingOptions, with_gpus: bool, settings: Settings
) -> tuple[str, ...]:
    """Return the size options of a job or step; sets --mem, because without it a job may get all memory of a node."""
    size = [f"--nodes={node_count}", f"--ntasks={node_count * tasks_per_node}", f"--ntasks-per-node={tasks_per_node}"]
    if settings.memory_is_consumable:
        size.append(f"--mem={tasks_per_node}G")
    size.append(f"--cpus-per-task={options.cpus_per_task}")
    if with_gpus:
        size.append("--gpus-per-task=1")
    return tuple(size)


def _not_applicable(settings: Settings, gpus_per_node: int, no_gpus_reason: str) -> Answers:
    """Yield the metrics that do not apply with these settings and GPUs."""
    plugins = f"TaskPlugin={','.join(settings.task_plugin)}"
    if not settings.constrains_cpus:
        yield absent("cpus_outside_allocation", f"{plugins}, ConstrainCores={settings.constrain_cores}")
    if not settings.task_binding_enabled:
        yield absent("cpus_shared", f"{plugins}, without task/affinity")
    if not settings.constrains_memory:
        reason = "memory not limited by SelectTypeParameters, TaskPlugin and ConstrainRAMSpace"
        yield absent("memory_confined", reason)
    if not gpus_per_node:
        yield absent(("gpus_*", "devices_confined", "numa_distance"), no_gpus_reason)
    elif gpus_per_node == 1:
        yield absent("gpus_accessible", "one GPU per node")
    elif not settings.constrains_devices:
        yield absent("gpus_accessible", "no device cgroups (see devices_confined)")


def _require_tasks(tasks: Sequence[Task], expected: int, allocations: Mapping[str, AllocatedResources]) -> None:
    """Raise SeatrialError unless all expected tasks reported, each on an allocated node."""
    unallocated_nodes = {task.node for task in tasks} - set(allocations)
    if len(tasks) != expected or unallocated_nodes:
        where = f"; nodes outside the allocation: {', '.join(sorted(unallocated_nodes))}" if unallocated_nodes else ""
        raise SeatrialError(
            f"{len(tasks)} of {expected} tasks reported{where}. Next: srun -p PARTITION -n2 --label true"
        )


def _cpu_metrics(
    tasks: Sequence[Task], allocations: Mapping[str, AllocatedResources], cpus_per_task: int, settings: Settings
) -> Answers:
    """Yield the missing CPUs of each task, and per node the CPUs that are shared or not allocated, if Slurm binds."""
    for task in tasks:
        yield value("cpus_missing", max(0, cpus_per_task - len(task.cpus)), task.name, evidence=list(task.cpus))
    configured_cpus = {node.name: node.cpus for node in slurm.nodes()}
    # kernel CPUs (hyperthreads) for each CPU of Slurm, which may count cores
    threads = {task.node: task.threads_per_slurm_cpu(configured_cpus.get(task.node)) for task in tasks}
    for node, allocation in allocations.items():
        task_counts = Counter(chain.from_iterable(task.cpus for task in tasks if task.node == node))  # CPU → tasks
        shared = [cpu for cpu, count in task_counts.items() if count > 1]
        evidence = {"cpus": sorted(task_counts), "allocation": allocation.model_dump(mode="json")}
        if settings.constrains_cpus:
            outside = max(0, len(task_counts) - allocation.cpus * threads[node])
            yield value("cpus_outside_allocation", outside, node, evidence=evidence)
        if settings.task_binding_enabled:
            yield value("cpus_shared", len(shared), node, evidence=shared)


def _memory_metrics(tasks: Sequence[Task], allocations: Mapping[str, AllocatedResources]) -> Answers:
    """Yield memory_confined per task."""
    for task in tasks:
        if task.memory_limits:
            limit, allocated = task.memory_limit, allocations[task.node].memory_bytes
            evidence = {"limit": limit, "allocated": allocated}
            yield value("memory_confined", limit is not None and limit <= allocated, task.name, evidence=evidence)
        else:
            yield unreadable("memory_confined", "the task sees no memory cgroup", task.name)


def _gpu_metrics(tasks: Sequence[Task], devices_confined: bool) -> Answers:
    """Yield the GPUs of each task, the GPUs that tasks of a node share, and the NUMA distance of CPUs and GPU."""
    gpus_by_task = {task.name: task.gpus(devices_confined) or () for task in tasks}
    for task in tasks:
        evidence = task_evidence(task, devices_confined)
        yield value("gpus_per_task", len(gpus_by_task[task.name]), task.name, evidence=evidence)
        if isinstance(distance := task.numa_distance(), int):
            yield value("numa_distance", distance, task.name, evidence=evidence)
        else:
            yield absent("numa_distance", distance, task.name)
    for node in sorted({task.node for task in tasks}):
        of_node = {task.name: list(gpus_by_task[task.name]) for task in tasks if task.node == node}
        task_counts = Counter(chain.from_iterable(of_node.values()))
        yield value("gpus_shared", sum(count > 1 for count in task_counts.values()), node, evidence=of_node)


CHECK = Check(
    name="slurm.binding",
    title="Task binding: GPUs, CPUs and memory of each task",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    measure=measure,
    limit_s=900,
    options=BindingOptions,
    skip_if=(SkipIf.NO_SLURM,),
    declared=(
        metric(
            "cpus_missing",
            "== 0 CPUs",
            "fewer CPUs in the task's affinity mask than allocated: data loaders and NCCL threads compete for them",
            "srun -p PARTITION -N1 -n2 -c2 --cpu-bind=verbose,threads taskset -cp 0; "
            "scontrol show config | grep -i TaskPlugin",
        ),
        metric(
            "cpus_outside_allocation",
            "== 0 CPUs",
            "tasks can run on CPUs that are not allocated to the job, and slow down other jobs on the node",
            f"On the node: {_GREP_CGROUP_CONF}; journalctl -u slurmd | grep -iE 'cgroup|affinity'",
        ),
        metric(
            "cpus_shared",
            "== 0 CPUs",
            "several tasks are bound to the same CPUs despite --cpu-bind=threads",
            "srun -p PARTITION -N1 -n2 -c2 --cpu-bind=verbose,threads true; "
            "scontrol show config | grep -i TaskPlugin; slurmd -C",
        ),
        metric(
            "memory_confined",
            "yes",
            "the task's cgroup has no memory limit or one above the allocation, although limits are configured",
            f"On the node: {_GREP_CGROUP_CONF}; scontrol show config | grep -E '(Allowed|Min)RAMSpace'",
        ),
        metric(
            "gpus_per_task",
            "== 1 GPUs",
            "a task with --gpus-per-task=1 has no GPU or several: ranks crash, or all use the first GPU",
            "srun -p PARTITION -N1 -n2 --gpus-per-task=1 sh -c 'echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L'; "
            "check TaskProlog",
        ),
        metric(
            "gpus_shared",
            "== 0 GPUs",
            "several tasks with --gpus-per-task=1 have the same GPU: low throughput, out of memory",
            "srun -p PARTITION -N1 -n2 --gpus-per-task=1 sh -c 'echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L'; slurmd -G. "
            "Check Gres= in slurm.conf and File= in gres.conf, and set ConstrainDevices=yes in cgroup.conf",
            cause=Cause(
                id="shared_gpus",
                place="cluster",
                first_command="srun --ntasks-per-node=2 --gpus-per-task=1 sh -c "
                "'echo $SLURM_LOCALID $CUDA_VISIBLE_DEVICES'",
                action="fix-config",
                explains=("device.*", "transfer.*", "collectives.*", "train.*"),
                wrong_results=True,
            ),
        ),
        warning(
            "devices_confined",
            "yes",
            "no device cgroups: a job that changes CUDA_VISIBLE_DEVICES can use the GPUs of other jobs",
            "TaskPlugin=task/affinity,task/cgroup in slurm.conf, "
            "ConstrainDevices=yes in cgroup.conf; restart every slurmd",
        ),
        metric(
            "gpus_accessible",
            "== 1 GPUs",
            "a task with one allocated GPU can open other GPUs, although device cgroups are configured",
            f"On the node: {_GREP_CGROUP_CONF}; slurmd -G must list each /dev/nvidiaN; "
            "journalctl -u slurmd | grep -i cgroup",
        ),
        warning(
            "numa_distance",
            f"< {_REMOTE_DISTANCE}",
            "the task's CPUs and GPU are on different sockets: host copies cross the inter-socket link",
            "nvidia-smi topo -m; Cores= of each GPU in gres.conf (set by AutoDetect=nvml); slurmd -G; "
            "srun --gres-flags=enforce-binding",
        ),
    ),
)
