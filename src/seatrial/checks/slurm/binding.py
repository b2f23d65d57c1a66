"""slurm.binding: does each task of a job get the GPU, the CPUs and the memory that it was given, and nothing else?

A job of our own holds a place on every node of the trial; two steps in it tell what their tasks have around them: one
with a task for each GPU, and one with a single task, from which the other GPUs must be out of reach.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from pydantic import Field

from seatrial.checks.base import Check, Context, metrics
from seatrial.checks.slurm._probe_jobs import SubmitOptions, condition_fact, open_probe_jobs, require_client
from seatrial.discover import slurm, slurm_task
from seatrial.discover.slurm_facts import Allocation, Settings
from seatrial.discover.slurm_task import Task
from seatrial.model import Fact, Observation, Outcome, Phase, Rule, Scope, SeatrialError

METRICS = {
    "cpus_missing": "CPUs",
    "cpus_outside_allocation": "CPUs",
    "cpus_shared": "CPUs",
    "memory_confined": "bool",
    "gpus_per_task": "GPUs",
    "gpus_shared": "GPUs",
    "devices_confined": "bool",
    "gpus_accessible": "GPUs",
    "numa_distance": "",
}

_TASKS_WITHOUT_GPU = 2
_CGROUP = "grep -iE 'ConstrainCores|ConstrainDevices|ConstrainRAMSpace' /etc/slurm/cgroup.conf"
# ACPI, "System Locality Information Table": 10 is a node itself. Linux takes 20 for another one where the firmware does
# not say (include/linux/topology.h, REMOTE_DISTANCE); between parts of one socket firmware says less than that.
_REMOTE = 20

RULES = (
    Rule(
        metric="cpus_missing",
        evidence_facts=("tasks",),
        expect="== 0 CPUs",
        meaning="the task may run on fewer CPUs than it was given: its data loaders and NCCL's threads queue for them",
        fix="srun -N1 -n2 -c2 --cpu-bind=verbose,threads taskset -cp 0; scontrol show config | grep -i TaskPlugin",
    ),
    Rule(
        metric="cpus_outside_allocation",
        evidence_facts=("tasks", "allocations"),
        expect="== 0 CPUs",
        applies_if={"cpus_confined": "yes"},
        meaning="tasks may run on more CPUs of the node than the job was given: they disturb its neighbours",
        fix=f"On the node: {_CGROUP}; journalctl -u slurmd | grep -iE 'cgroup|affinity'",
    ),
    Rule(
        metric="cpus_shared",
        evidence_facts=("tasks",),
        expect="== 0 CPUs",
        applies_if={"tasks_bound": "yes"},
        meaning="tasks that asked for CPUs of their own (--cpu-bind=threads) were bound to the same ones",
        fix="srun -N1 -n2 -c2 --cpu-bind=verbose,threads true; scontrol show config | grep -i TaskPlugin; slurmd -C",
    ),
    Rule(
        metric="memory_confined",
        evidence_facts=("memory", "allocations"),
        expect="== 1 bool",
        applies_if={"memory_limit": "yes"},
        meaning="the job may use more memory than it was given, though limits are set up",
        fix=f"On the node: {_CGROUP}; scontrol show config | grep -E '(Allowed|Min)RAMSpace'",
    ),
    Rule(
        metric="gpus_per_task",
        evidence_facts=("gpus", "tasks", "gpus_not_configured"),
        expect="== 1 GPUs",
        applies_if={"gpu_per_task": "yes"},
        meaning="a task that asked for one GPU does not find just one: ranks crash, or crowd on the first GPU",
        fix="srun -N1 -n2 --gpus-per-task=1 sh -c 'echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L'; look at TaskProlog",
    ),
    Rule(
        metric="gpus_shared",
        evidence_facts=("gpus", "tasks"),
        expect="== 0 GPUs",
        applies_if={"gpu_per_task": "yes"},
        meaning="tasks that asked for a GPU each were given the same one: half the speed, and out of memory",
        fix="srun -N1 -n2 --gpus-per-task=1 sh -c 'echo $CUDA_VISIBLE_DEVICES; nvidia-smi -L'; slurmd -G",
    ),
    Rule(
        metric="devices_confined",
        expect="== 1 bool",
        outcome_if_violated=Outcome.WARN,
        applies_if={"gpu_per_task": "yes"},
        meaning="only CUDA_VISIBLE_DEVICES keeps a job off the GPUs of others: one that sets it itself takes theirs",
        fix="TaskPlugin=task/affinity,task/cgroup in slurm.conf, "
        "ConstrainDevices=yes in cgroup.conf; restart every slurmd",
    ),
    Rule(
        metric="gpus_accessible",
        evidence_facts=("alone",),
        expect="== 1 GPUs",
        applies_if={"gpu_isolation_tested": "yes"},
        meaning="a task that holds one GPU can open others too, though device cgroups are set up",
        fix=f"On the node: {_CGROUP}; slurmd -G must name each /dev/nvidiaN; journalctl -u slurmd | grep -i cgroup",
    ),
    Rule(
        metric="numa_distance",
        evidence_facts=("tasks", "numa"),
        expect=f"< {_REMOTE}",
        outcome_if_violated=Outcome.WARN,
        applies_if={"numa_distance_readable": "yes"},
        meaning="the task's CPUs are on another socket than its GPU: copies to it cross the link between the sockets",
        fix="nvidia-smi topo -m; Cores= of each GPU in gres.conf (AutoDetect=nvml does it); slurmd -G; "
        "srun --gres-flags=enforce-binding",
    ),
)


class BindingOptions(SubmitOptions):
    """How our job is submitted, and what it asks for."""

    nodes: int | None = Field(default=None, gt=0, description="by default the nodes of the trial")
    cpus_per_task: int = Field(default=2, gt=0)  # both threads of a core, where cores have two
    devices: str = Field(default="/dev/nvidia[0-9]*", description="pattern of the GPUs' device files")


def measure(context: Context, options: BindingOptions) -> Iterator[Observation]:
    """Raises NotApplicable without a Slurm client, SeatrialError with Slurm's reason where the job cannot be tried."""
    require_client()
    settings = slurm.settings()
    gpus, why_none = _gpus(context, options, settings)
    nodes, tasks = options.nodes or context.expected_nodes, gpus or _TASKS_WITHOUT_GPU
    yield from _setup(settings, gpus, why_none)
    with open_probe_jobs(context, options) as desk:
        size = _size(nodes, tasks, options, gpus, settings)
        job = desk.start_idle_job(*size)
        given = slurm.allocations(job.id)
        yield Fact(name="allocations", value={name: one.model_dump(mode="json") for name, one in given.items()})
        probe = slurm_task.srun_command(options.devices)
        together = slurm_task.parse_tasks(desk.run_step(job.id, (*size, "--cpu-bind=threads"), probe))
        found = _complete(together, nodes * tasks, given)
        yield from _of_cpus(found, _cpus(found, given), options.cpus_per_task)
        yield from _of_memory(found, given)
        if gpus:
            yield from _of_gpus(found, settings.constrains_devices)
            alone = slurm_task.parse_tasks(desk.run_step(job.id, _size(nodes, 1, options, 1, settings), probe))
            yield from _alone(_complete(alone, nodes, given), gpus, settings)


def _gpus(context: Context, options: BindingOptions, settings: Settings) -> tuple[int, str]:
    """GPUs of a node that tasks can ask for, one each; 0 and the reason where they cannot."""
    if "gpu" not in settings.gres_types:
        return 0, "GresTypes of slurm.conf has no gpu"
    if settings.select_type != "select/cons_tres":
        return 0, f"{settings.select_type} knows no --gpus-per-task"
    gpus = slurm.gpus_per_node(options.partition) if context.expected_gpus is None else context.expected_gpus
    return gpus, "" if gpus else "no node has GPUs, or none were promised"


def _size(nodes: int, tasks: int, options: BindingOptions, gpus: int, settings: Settings) -> tuple[str, ...]:
    """Of a job, or of a step in it. Where memory is handed out, the default may be all of a node's."""
    memory = [f"--mem={tasks}G"] if settings.memory_is_consumable else []
    size = (f"--nodes={nodes}", f"--ntasks={nodes * tasks}", f"--ntasks-per-node={tasks}", *memory)
    return (*size, f"--cpus-per-task={options.cpus_per_task}", *(["--gpus-per-task=1"] if gpus else []))


def _setup(settings: Settings, gpus: int, why_none: str) -> Iterator[Observation]:
    """What the rules' ``where`` asks: each is ``yes``, or the reason why the rule does not apply."""
    plugins = f"TaskPlugin={','.join(settings.task_plugin)}"
    cores = f"{plugins}, ConstrainCores={settings.constrain_cores}"
    memory = "SelectTypeParameters, TaskPlugin or ConstrainRAMSpace do not hold jobs to their memory"
    yield condition_fact("cpus_confined", "" if settings.constrains_cpus else cores)
    yield condition_fact("tasks_bound", "" if settings.task_binding_enabled else f"{plugins}, without task/affinity")
    yield condition_fact("memory_limit", "" if settings.constrains_memory else memory)
    yield condition_fact("gpu_per_task", why_none)
    if not gpus:
        yield from (condition_fact(name, why_none) for name in ("gpu_isolation_tested", "numa_distance_readable"))
    else:
        yield from metrics(METRICS, {"devices_confined": settings.constrains_devices})


def _complete(tasks: Sequence[Task], wanted: int, given: Mapping[str, Allocation]) -> Sequence[Task]:
    """Raises SeatrialError unless all tasks told, on nodes of the job."""
    strangers = {task.node for task in tasks} - set(given)
    if len(tasks) != wanted or strangers:
        on = f", some on {', '.join(sorted(strangers))}, which the job was not given" if strangers else ""
        raise SeatrialError(f"{len(tasks)} of {wanted} tasks told what they have{on}. Run first: srun -n2 --label true")
    return tasks


def _cpus(tasks: Sequence[Task], given: Mapping[str, Allocation]) -> dict[str, int]:
    """How many of the kernel's CPUs the job was given on each node."""
    configured = {node.name: node.cpus for node in slurm.nodes()}
    threads = {task.node: task.threads_per_slurm_cpu(configured.get(task.node)) for task in tasks}
    return {name: allocation.cpus * threads[name] for name, allocation in given.items()}


def _of_cpus(tasks: Sequence[Task], given: Mapping[str, int], each: int) -> Iterator[Observation]:
    yield Fact(name="tasks", value={task.name: _told(task) for task in tasks})
    for task in tasks:
        yield from metrics(METRICS, {"cpus_missing": max(0, each - len(task.cpus))}, task.name)
    for node, cpus in given.items():
        times = Counter(cpu for task in tasks if task.node == node for cpu in task.cpus)
        shared = sum(count > 1 for count in times.values())
        yield from metrics(METRICS, {"cpus_outside_allocation": max(0, len(times) - cpus), "cpus_shared": shared}, node)


def _told(task: Task) -> dict[str, object]:
    """A task in the evidence: short."""
    return {"cpus": list(task.cpus), "cuda": task.cuda_visible_devices, "opened": list(task.accessible_devices)}


def _of_memory(tasks: Sequence[Task], given: Mapping[str, Allocation]) -> Iterator[Observation]:
    """A task that has no cgroup of memory in sight says nothing: then it is not measured."""
    known = [task for task in tasks if task.memory_limits]
    yield Fact(name="memory", value={task.name: task.memory_limit for task in known})
    for task in known:
        confined = task.memory_limit is not None and task.memory_limit <= given[task.node].memory_bytes
        yield from metrics(METRICS, {"memory_confined": confined}, task.name)


def _of_gpus(tasks: Sequence[Task], confined: bool) -> Iterator[Observation]:
    named = [(task, task.gpus(confined) or ()) for task in tasks]
    yield Fact(name="gpus", value={task.name: list(gpus) for task, gpus in named})
    yield Fact(name="gpus_not_configured", value=sorted({task.listing_error for task in tasks if task.listing_error}))
    for task, gpus in named:
        yield from metrics(METRICS, {"gpus_per_task": len(gpus)}, task.name)
    for node in sorted({task.node for task in tasks}):
        times = Counter(gpu for task, gpus in named if task.node == node for gpu in gpus)
        yield from metrics(METRICS, {"gpus_shared": sum(count > 1 for count in times.values())}, node)
    distances = {task.name: task.numa_distance() for task in tasks}
    known = {name: distance for name, distance in distances.items() if isinstance(distance, int)}
    yield Fact(name="numa", value=distances)
    yield condition_fact(
        "numa_distance_readable",
        "" if known else "; ".join(sorted({str(why) for why in distances.values()})) or "no task",
    )
    for name, distance in known.items():
        yield from metrics(METRICS, {"numa_distance": distance}, name)


def _alone(tasks: Sequence[Task], gpus: int, settings: Settings) -> Iterator[Observation]:
    yield Fact(name="alone", value={task.name: _told(task) for task in tasks})
    why = "the trial has one GPU a node" if gpus < 2 else "no device cgroups (see devices_confined)"
    yield condition_fact("gpu_isolation_tested", "" if gpus > 1 and settings.constrains_devices else why)
    for task in tasks:
        yield from metrics(METRICS, {"gpus_accessible": task.accessible_gpus}, task.name)


CHECK = Check(
    name="slurm.binding",
    title="Tasks get their GPUs, CPUs and memory, and nothing else",
    phase=Phase.ENVIRONMENT,
    scope=Scope.CONTROL,
    metrics=METRICS,
    rules=RULES,
    measure=measure,
    limit_s=900,
    options=BindingOptions,
)
