"""host.process: the CPUs, priority, limits and environment variables of each process that measures."""

from __future__ import annotations

import os
import resource

from seatrial.checks.cause import Cause
from seatrial.checks.check import SLOWED_BY_PREFIX, Check, Context, Options, facts
from seatrial.checks.declare import Answer, Answers, absent, unreadable, value, warning
from seatrial.discover import environment_variables
from seatrial.discover.file_readers import id_list, parse_id_list
from seatrial.model import Phase, Scope, SeatrialError

# A rank that trains keeps four threads busy: Python, autograd's backward pass, NCCL's proxy, and the copies or the data
# loader. All healthy runs in docs/results have 16 CPUs per GPU.
MIN_CPUS = ">= 4 CPUs/rank"
_POLICY_NAMES = ("SCHED_OTHER", "SCHED_BATCH", "SCHED_IDLE", "SCHED_FIFO", "SCHED_RR")
_SLOWING = {name: each for name, each in environment_variables.variables().items() if each.warn}
_SPEEDS = ("device.*", "transfer.*", "collectives.*", "fabric.*", "filesystem.speed", "train.*")


def measure(context: Context, _options: Options) -> Answers:
    from seatrial.discover import cpu_memory

    context.progress("reading /proc and /sys")
    cpu, memory = cpu_memory.read_cpu(context.root), cpu_memory.read_memory(context.root)
    allowed, of_other_ranks = os.sched_getaffinity(0), _cpus_of_other_ranks()
    rank_count = 1 + len(of_other_ranks)
    policy = os.sched_getscheduler(0) & ~os.SCHED_RESET_ON_FORK
    policy_name = next((name for name in _POLICY_NAMES if getattr(os, name, None) == policy), str(policy))
    locked_bytes, _ = resource.getrlimit(resource.RLIMIT_MEMLOCK)
    values = environment_variables.read()
    cpus_by_node = {node.name: allowed.intersection(parse_id_list(node.cpus)) for node in cpu.numa if node.cpus}
    evidence = {
        "allowed_cpus": id_list(allowed),
        "cpus_of_node": cpu.threads,
        "ranks_on_node": rank_count,
        "cpu_quota": cpu.quota_cores,
    }
    yield from facts(
        {
            **evidence,
            "backend": "cuda" if context.on_gpu else "cpu",
            "numa_nodes": {name: id_list(cpus) for name, cpus in cpus_by_node.items() if cpus},
            "memory_limit_bytes": memory.limit_bytes,
            "memlock_bytes": "unlimited" if locked_bytes == resource.RLIM_INFINITY else locked_bytes,
            "scheduling_policy": policy_name,
            "variables": values,
        }
    )
    if cpu.threads is None:
        yield unreadable("allowed_cpus", cpu.unreadable["threads"])
    elif len(allowed) >= cpu.threads:
        yield absent("allowed_cpus", f"all {cpu.threads} CPUs of the node are allowed")
    else:  # a CPU that several ranks may use is a part of one for each of them
        shares = (1 / (1 + sum(number in cpus for cpus in of_other_ranks)) for number in allowed)
        yield value("allowed_cpus", sum(shares), evidence=evidence)
    yield _cpus_near_gpu(context, allowed)
    if "quota_cores" in cpu.unreadable:
        yield unreadable("cpu_quota", cpu.unreadable["quota_cores"])
    elif cpu.quota_cores is None or (cpu.threads and cpu.quota_cores >= cpu.threads):
        yield absent("cpu_quota", "no CPU quota below the number of CPUs of the node")
    else:
        yield value("cpu_quota", cpu.quota_cores / rank_count, evidence=evidence)
    yield value("nice", os.getpriority(os.PRIO_PROCESS, 0))
    yield value("background_scheduling", policy in (os.SCHED_BATCH, os.SCHED_IDLE), evidence={"policy": policy_name})
    for name, variable in _SLOWING.items():
        is_slowing = name in values and variable.has_effect(values[name])
        yield value(SLOWED_BY_PREFIX + name, is_slowing, evidence={name: values.get(name)})


def _cpus_of_other_ranks() -> list[set[int]]:
    """The allowed CPUs of each other rank of this node: processes of the same torchrun with the variable LOCAL_RANK."""
    import psutil

    masks: list[set[int]] = []
    parent = psutil.Process().parent() if "LOCAL_RANK" in os.environ else None
    for process in parent.children() if parent else ():
        try:
            if process.pid != os.getpid() and "LOCAL_RANK" in process.environ():
                masks.append(set(process.cpu_affinity()))
        except psutil.Error:  # ended
            continue
    return masks


def _cpus_near_gpu(context: Context, allowed: set[int]) -> Answer:
    if not context.on_gpu:
        return absent("cpus_near_gpu", "this rank has no GPU")
    from seatrial.bench import rank

    try:
        near_gpu, reason = rank.numa_cpus(context.device), "NVML lists no CPU near the GPU"
    except SeatrialError as error:  # some virtual machines hide it
        near_gpu, reason = set(), str(error)
    if not near_gpu:
        return absent("cpus_near_gpu", reason)
    evidence = {"allowed_cpus": id_list(allowed), "cpus_near_gpu": id_list(near_gpu)}
    return value("cpus_near_gpu", len(allowed & near_gpu), evidence=evidence)


def _cause(identifier: str, title: str, first_command: str, explains: tuple[str, ...] = _SPEEDS) -> Cause:
    """A cause that is reported even if no figure suffers."""
    return Cause(
        id=identifier,
        title=title,
        place="rank",
        explains=explains,
        first_command=first_command,
        action="fix-environment",
        report_warning=True,
    )


_PRIORITY = _cause(
    "low_priority",
    "the ranks run with low priority",
    "ps -eo pid,ni,cls,args --sort=-ni | head; systemctl show slurmd | grep -E '^(Nice|CPUSchedulingPolicy)='",
)
_PRIORITY_FIX = (
    "Start seatrial, slurmd or the container without nice, renice and chrt; see LaunchParameters and PrioritySlurmctld "
    "of slurm.conf, and Nice= of the systemd unit."
)

CHECK = Check(
    name="host.process",
    title="CPUs, priority, limits and environment variables of each rank",
    phase=Phase.ENVIRONMENT,
    scope=Scope.GPU,
    measure=measure,
    fact_roles={"variables": "variables"},
    limit_s=60,
    declared=(
        warning(
            "allowed_cpus",
            MIN_CPUS,
            "The rank may use few of the node's CPUs: kernel launches, NCCL's threads and data loading wait for each "
            "other.",
            "Start the run without taskset and numactl. Slurm: request all CPUs of the node (slurm.exclusive, "
            "slurm.cpus_per_task), and check Cores= in gres.conf. Container: remove --cpuset-cpus.",
            when="backend == cuda",
            varies_by_device=True,
            cause=_cause(
                "cpu_mask",
                "the CPU mask leaves the ranks few CPUs",
                "grep Cpus_allowed_list /proc/self/status; nproc --all; scontrol show config | grep -i TaskPlugin",
            ),
        ),
        warning(
            "cpus_near_gpu",
            ">= 1 CPUs",
            "The rank may use no CPU of its GPU's NUMA node: host copies and messages to NICs cross the link between "
            "the sockets.",
            "Bind each rank to CPUs of its GPU's NUMA node, or to none: Slurm with Cores= in gres.conf "
            "(AutoDetect=nvml) and --gres-flags=enforce-binding; Kubernetes with the topology manager's policy "
            "single-numa-node.",
            when="backend == cuda",
            varies_by_device=True,
            cause=_cause(
                "remote_cpus",
                "the CPU mask has no CPU of the GPU's NUMA node",
                "nvidia-smi topo -m; grep Cpus_allowed_list /proc/self/status",
                ("transfer.host", "collectives.*", "fabric.*", "train.*"),
            ),
        ),
        warning(
            "cpu_quota",
            MIN_CPUS,
            "The cgroup limits the CPU time of the ranks: the kernel stops all threads for a part of each 100 ms.",
            "Remove the quota: docker --cpus, limits.cpu of the pod, CPUQuota= of the systemd unit.",
            when="backend == cuda",
            varies_by_device=True,
            cause=_cause(
                "cpu_quota",
                "a CPU quota stops the ranks",
                "cat /proc/self/cgroup; grep -H . /sys/fs/cgroup/cpu.max /sys/fs/cgroup/cpu.stat",
            ),
        ),
        warning(
            "nice",
            "<= 0",
            "Other processes of the node get CPU time before this rank.",
            _PRIORITY_FIX,
            when="backend == cuda",
            signed=True,
            cause=_PRIORITY,
        ),
        warning(
            "background_scheduling",
            "no",
            "With SCHED_IDLE or SCHED_BATCH other processes of the node get CPU time before this rank.",
            _PRIORITY_FIX,
            when="backend == cuda",
            cause=_PRIORITY,
        ),
        *(
            warning(
                SLOWED_BY_PREFIX + name,
                "no",
                f"{name} is set: {variable.effect}.",
                f"Unset {name} where it is set: shell profile, TaskProlog, image, /etc/nccl.conf, or the trial's env.",
                when="backend == cuda",
            )
            for name, variable in _SLOWING.items()
        ),
    ),
)
