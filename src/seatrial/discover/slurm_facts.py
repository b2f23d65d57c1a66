"""What Slurm knows, as records: the controller, its settings, nodes, partitions and jobs.

Memory is in bytes, times are Unix seconds, durations seconds. None stands for what Slurm does not say.
"""

from __future__ import annotations

from typing import Literal

from seatrial.model import Frozen

Duration = int | Literal["unlimited"] | None

UNKNOWN = "UNKNOWN"
_CPUS_CONSUMED = {"CR_CORE", "CR_CPU", "CR_SOCKET"}

# A node has one base state and any number of flags; the names are those of sinfo(1), 22.05 to 25.11.
_NOT_UP = {"DOWN", "ERROR", "FAIL", "FAILING", "INVAL", "INVALID_REG", "NOT_RESPONDING", UNKNOWN}
_HELD_BACK = {"DRAIN", "DRAINED", "DRAINING", "POWER_DRAIN", "REBOOT_ISSUED", "REBOOT_REQUESTED"}
_RESERVED = {"MAINT", "MAINTENANCE", "RESERVED"}

_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"}
    | {"TIMEOUT"}
)


class Ping(Frozen):
    """One controller: ``role`` is ``primary``, ``backup`` or ``backup1``…"""

    role: str
    host: str
    up: bool


class Settings(Frozen):
    """What ``scontrol show config`` says, as far as a trial cares. A tuple is empty where nothing is set."""

    version: str | None
    cluster_name: str | None
    select_type: str | None
    select_type_parameters: tuple[str, ...]
    proctrack_type: str | None
    task_plugin: tuple[str, ...]
    gres_types: tuple[str, ...]
    accounting_storage_type: str | None
    job_acct_gather_type: str | None
    job_acct_gather_params: tuple[str, ...]
    job_acct_gather_frequency: str | None
    kill_wait_s: Duration
    min_job_age_s: Duration
    over_time_limit_s: Duration
    slurmd_timeout_s: Duration
    return_to_service: str | None
    prolog: str | None
    epilog: str | None
    health_check_program: str | None
    mpi_default: str | None
    propagate_resource_limits: tuple[str, ...]
    propagate_resource_limits_except: tuple[str, ...]
    constrain_ram_space: str | None  # this and the next are of cgroup.conf, which is shown where cgroups are used
    constrain_cores: str | None
    constrain_devices: str | None
    same_configuration: bool | None  # whether slurm.conf here is the controller's

    @property
    def accounting_enabled(self) -> bool:
        """Whether jobs are kept in a database, so that ``sacct`` answers."""
        return (self.accounting_storage_type or "").rpartition("/")[2] not in ("", "none")

    @property
    def memory_is_consumable(self) -> bool:
        """Whether memory is handed out to jobs as CPUs are (CR_Memory, CR_Core_Memory, …)."""
        return any("MEMORY" in word.upper() for word in self.select_type_parameters)

    @property
    def allocates_whole_nodes(self) -> bool:
        """Whether a job gets all of its nodes, so that no other runs beside it."""
        return self.select_type == "select/linear"

    @property
    def cpus_are_consumable(self) -> bool:
        """Whether each CPU is handed out to one job (CR_Core, CR_CPU, CR_Socket…)."""
        return any(word.upper().removesuffix("_MEMORY") in _CPUS_CONSUMED for word in self.select_type_parameters)

    @property
    def task_binding_enabled(self) -> bool:
        """Whether a task is bound to CPUs of its own: what ``srun --cpu-bind`` needs."""
        return "task/affinity" in self.task_plugin

    @property
    def constrains_cpus(self) -> bool:
        """Whether a job is held to the CPUs that it was given."""
        return self.task_binding_enabled or self._by_cgroup(self.constrain_cores)

    @property
    def constrains_memory(self) -> bool:
        """Whether the kernel holds a job to the memory that it was given."""
        return self.memory_is_consumable and self._by_cgroup(self.constrain_ram_space)

    @property
    def constrains_devices(self) -> bool:
        """Whether a job can open no other GPUs than those it was given. cgroup.conf(5): ``no`` is the default."""
        return self._by_cgroup(self.constrain_devices)

    def _by_cgroup(self, constrained: str | None) -> bool:
        return "task/cgroup" in self.task_plugin and constrained == "yes"


class Gres(Frozen):
    """A generic resource: ``gpu:h100:8`` is eight of the name ``gpu`` and the kind ``h100``."""

    name: str
    kind: str | None
    count: int


class Node(Frozen):
    """``state`` is the base state (``IDLE``, ``MIXED``…), ``flags`` are what qualifies it (``DRAIN``…)."""

    name: str
    state: str
    flags: tuple[str, ...]
    reason: str
    cpus: int | None
    memory_bytes: int | None
    gres: tuple[Gres, ...]
    gres_used: tuple[Gres, ...] | None
    partitions: tuple[str, ...]
    reservation: str = ""  # that holds it; empty where there is none, or where this Slurm does not name it

    @property
    def states(self) -> set[str]:
        return {self.state, *self.flags}

    @property
    def up(self) -> bool:
        """The node answers and is not given up. One that is powered down to save power is up: Slurm wakes it."""
        return not self.states & _NOT_UP

    @property
    def not_in_service(self) -> bool:
        """Somebody took the node out, or reboots it: it gets no new jobs."""
        return bool(self.states & _HELD_BACK)

    @property
    def reserved(self) -> bool:
        """A reservation holds the node: it takes only jobs that name it."""
        return bool(self.states & _RESERVED)

    def blocked_by_reservation(self, reservation: str | None) -> bool:
        """Whether it takes no job that names ``reservation``, or none: another one holds it."""
        return self.reserved and (not reservation or self.reservation not in ("", reservation))

    @property
    def usable(self) -> bool:
        return self.up and not self.not_in_service

    @property
    def gpus(self) -> int:
        return sum(gres.count for gres in self.gres if gres.name == "gpu")

    def __str__(self) -> str:
        """State and reason in a line: ``IDLE+DRAIN: fan broken``."""
        return "+".join((self.state, *self.flags)) + (f": {self.reason}" if self.reason else "")


class Allocation(Frozen):
    """What a running job was given on each of ``nodes`` (Slurm's list expression). CPUs are counted as Slurm does."""

    nodes: str
    cpus: int
    memory_bytes: int
    gres: tuple[Gres, ...]


class Partition(Frozen):
    """``nodes`` is Slurm's list expression (``node[0-3]``); None for a limit of time means that none was set."""

    name: str
    state: str
    nodes: str
    total_nodes: int | None
    default: bool
    max_time_s: Duration
    default_time_s: Duration
    oversubscribe: str | None = None  # NO, YES:4, FORCE:4 or EXCLUSIVE

    @property
    def up(self) -> bool:
        return self.state == "UP"


class Job(Frozen):
    """``nodes`` is Slurm's list expression; ``exit_code`` and ``signal`` are 0 until the job has ended.

    ``start`` of a job that waits is Slurm's guess. The state of a job that Slurm no longer knows is UNKNOWN, and the
    reason says why.
    """

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    signal: int | None = None
    time_limit_s: Duration = None
    start: float | None = None

    @property
    def has_state(self) -> bool:
        return self.state != UNKNOWN

    @property
    def pending(self) -> bool:
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED")

    @property
    def ended(self) -> bool:
        """Nothing of the job is left on its nodes either: until then its state is COMPLETING."""
        return self.state in _ENDED

    def __str__(self) -> str:
        """``FAILED (NonZeroExitCode), exit code 7``."""
        reason = f" ({self.reason})" if self.reason else ""
        signal = f", signal {self.signal}" if self.signal else ""
        return f"{self.state}{reason}, exit code {self.exit_code}{signal}"
