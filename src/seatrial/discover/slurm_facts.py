"""Records of Slurm's controllers, settings, nodes, partitions and jobs.

Memory is in bytes, times are in Unix seconds, durations in seconds. A field is None if Slurm does not show it.
"""

import re
from typing import Annotated, Literal

from pydantic import BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_pascal

from seatrial.model import Frozen

Duration = int | Literal["unlimited"] | None
UNLIMITED = {"UNLIMITED", "INFINITE"}

UNKNOWN = "UNKNOWN"
_CONSUMABLE_CPUS = {"CR_CORE", "CR_CPU", "CR_SOCKET"}

# A node has one base state and any number of flags; names as in sinfo(1) of Slurm 22.05 to 25.11
_NOT_UP = {"DOWN", "ERROR", "FAIL", "FAILING", "INVAL", "INVALID_REG", "NOT_RESPONDING", UNKNOWN}
_NOT_IN_SERVICE = {"DRAIN", "DRAINED", "DRAINING", "POWER_DRAIN", "REBOOT_ISSUED", "REBOOT_REQUESTED"}
_RESERVED = {"MAINT", "MAINTENANCE", "RESERVED"}
# A node stays in these states until an administrator acts, unless Slurm is rebooting or powering up the node
_NEEDS_ADMINISTRATOR = {"DOWN", "DRAIN", "DRAINED", "DRAINING", "ERROR", "FAIL", "FAILING", "INVAL", "INVALID_REG"}
# Slurm switched the node off or reboots it, and returns it to service without an administrator
RETURNING_STATES = {"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP", "REBOOT_ISSUED", "REBOOT_REQUESTED"}

_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"}
    | {"TIMEOUT"}
)


class Ping(Frozen):
    """One controller; ``role`` is ``primary``, ``backup``, ``backup1`` …"""

    role: str
    host: str
    up: bool


def _names(text: str) -> tuple[str, ...]:
    return tuple(filter(None, map(str.strip, text.split(","))))


def _seconds(text: str) -> Duration:
    """Seconds of ``30 sec``, ``5 min`` or ``30``; "unlimited" for ``UNLIMITED``; None for any other text."""
    if match := re.fullmatch(r"(\d+)(?: (sec|min))?", text):
        return int(match[1]) * (60 if match[2] == "min" else 1)
    return "unlimited" if text in UNLIMITED else None


def _is_same(hash_value: str) -> bool | None:
    return hash_value == "Match" if hash_value.startswith(("Match", "Different")) else None


_Names = Annotated[tuple[str, ...], BeforeValidator(_names)]
_Seconds = Annotated[Duration, BeforeValidator(_seconds)]


class Settings(Frozen):
    """The settings in ``scontrol show config`` that a trial uses, by Slurm's names; an unset one is None or empty."""

    model_config = ConfigDict(alias_generator=to_pascal, extra="ignore")

    version: str | None = Field(None, alias="SLURM_VERSION")
    cluster_name: str | None = None
    select_type: str | None = None
    select_type_parameters: _Names = ()
    proctrack_type: str | None = None
    task_plugin: _Names = ()
    gres_types: _Names = ()
    accounting_storage_type: str | None = None
    job_acct_gather_type: str | None = None
    job_acct_gather_params: _Names = ()
    job_acct_gather_frequency: str | None = None
    kill_wait_s: _Seconds = Field(None, alias="KillWait")
    min_job_age_s: _Seconds = Field(None, alias="MinJobAge")
    over_time_limit_s: _Seconds = Field(None, alias="OverTimeLimit")
    slurmd_timeout_s: _Seconds = Field(None, alias="SlurmdTimeout")
    return_to_service: str | None = None
    prolog: str | None = None  # several are joined by commas
    epilog: str | None = None
    health_check_program: str | None = None
    mpi_default: str | None = None
    propagate_resource_limits: _Names = ()
    propagate_resource_limits_except: _Names = ()
    # The constrain_* settings are from cgroup.conf; Slurm shows them only if it uses cgroups
    constrain_ram_space: str | None = Field(None, alias="ConstrainRAMSpace")
    constrain_cores: str | None = None
    constrain_devices: str | None = None
    # whether slurm.conf of this host equals the controller's
    same_configuration: Annotated[bool | None, BeforeValidator(_is_same)] = Field(None, alias="HASH_VAL")

    @property
    def accounting_enabled(self) -> bool:
        """Whether a database stores jobs, so that ``sacct`` works."""
        return (self.accounting_storage_type or "").rpartition("/")[2] not in ("", "none")

    @property
    def memory_is_consumable(self) -> bool:
        """Whether memory is a consumable resource (CR_Memory, CR_Core_Memory, …)."""
        return any("MEMORY" in parameter.upper() for parameter in self.select_type_parameters)

    @property
    def allocates_whole_nodes(self) -> bool:
        """Whether a job gets whole nodes, so that no other job shares them."""
        return self.select_type == "select/linear"

    @property
    def cpus_are_consumable(self) -> bool:
        """Whether CPUs are a consumable resource (CR_Core, CR_CPU, CR_Socket …)."""
        parameters = {parameter.upper().removesuffix("_MEMORY") for parameter in self.select_type_parameters}
        return bool(parameters & _CONSUMABLE_CPUS)

    @property
    def task_binding_enabled(self) -> bool:
        """Whether Slurm binds tasks to CPUs, as ``srun --cpu-bind`` requires."""
        return "task/affinity" in self.task_plugin

    @property
    def constrains_cpus(self) -> bool:
        """Whether a job can use only its allocated CPUs."""
        return self.task_binding_enabled or self._constrained_by_cgroup(self.constrain_cores)

    @property
    def constrains_memory(self) -> bool:
        """Whether the kernel limits a job to its allocated memory."""
        return self.memory_is_consumable and self._constrained_by_cgroup(self.constrain_ram_space)

    @property
    def constrains_devices(self) -> bool:
        """Whether a job can open only its allocated GPUs (cgroup.conf(5), default ``no``)."""
        return self._constrained_by_cgroup(self.constrain_devices)

    def _constrained_by_cgroup(self, constrain_setting: str | None) -> bool:
        return "task/cgroup" in self.task_plugin and constrain_setting == "yes"


class Gres(Frozen):
    """A generic resource: ``gpu:h100:8`` has the name ``gpu``, the type ``h100`` and the count 8."""

    name: str
    type: str | None
    count: int


class SlurmNode(Frozen):
    """One node. ``state`` is its base state (``IDLE``, ``MIXED`` …), ``flags`` has its flags (``DRAIN`` …)."""

    name: str
    state: str
    flags: tuple[str, ...]
    reason: str
    cpus: int | None
    memory_bytes: int | None
    gres: tuple[Gres, ...]
    gres_used: tuple[Gres, ...] | None
    partitions: tuple[str, ...]
    reservation: str = ""  # empty without a reservation, and in Slurm versions that do not show it
    comment: str = ""
    features: tuple[str, ...] = ()

    @property
    def states(self) -> set[str]:
        """The base state and all flags."""
        return {self.state, *self.flags}

    @property
    def up(self) -> bool:
        """Whether the node responds and is not down. A node in power saving is up: Slurm powers it up for jobs."""
        return not self.states & _NOT_UP

    @property
    def not_in_service(self) -> bool:
        """Whether the node is drained, draining or about to reboot, and gets no new jobs."""
        return bool(self.states & _NOT_IN_SERVICE)

    @property
    def needs_administrator(self) -> bool:
        """Whether the node is down, drained or failed, and needs an administrator to return to service."""
        return bool(self.states & _NEEDS_ADMINISTRATOR) and not self.states & RETURNING_STATES

    @property
    def reserved(self) -> bool:
        """Whether the node is in a reservation, so that only jobs of that reservation start on it."""
        return bool(self.states & _RESERVED)

    def blocked_by_reservation(self, reservation: str | None) -> bool:
        """Whether another reservation keeps jobs with ``reservation`` (None: jobs without one) off the node."""
        return self.reserved and (not reservation or self.reservation not in ("", reservation))

    @property
    def usable(self) -> bool:
        """Whether the node is up and accepts new jobs."""
        return self.up and not self.not_in_service

    @property
    def gpus(self) -> int:
        """The number of GPUs in the node's GRES."""
        return sum(gres.count for gres in self.gres if gres.name == "gpu")

    def __str__(self) -> str:
        """State and reason: ``IDLE+DRAIN: fan broken``."""
        return "+".join((self.state, *self.flags)) + (f": {self.reason}" if self.reason else "")


class AllocatedResources(Frozen):
    """The resources of a running job on each of ``nodes`` (Slurm's hostlist); ``cpus``: CPUs as Slurm counts them."""

    nodes: str
    cpus: int
    memory_bytes: int
    gres: tuple[Gres, ...]


class Partition(Frozen):
    """One partition. ``nodes`` is Slurm's hostlist (``node[0-3]``). A time limit that is not set is None."""

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
        """Whether the partition accepts and starts jobs."""
        return self.state == "UP"


class JobRecord(Frozen):
    """Slurm's record of a job: ``nodes`` is its hostlist; ``exit_code`` and ``signal`` are 0 until the job has ended.

    ``start`` of a pending job is Slurm's estimate. If Slurm has no record of the job, the state is UNKNOWN, and
    ``reason`` says why.
    """

    id: str
    state: str
    reason: str = ""
    nodes: str = ""
    exit_code: int | None = None
    signal: int | None = None
    time_limit_s: Duration = None
    start: float | None = None
    node_count: int | None = None
    partition: str = ""  # several for a pending job that may run in any of them: gpu,short
    requested_nodes: str = ""  # Slurm's hostlist, as are excluded_nodes
    excluded_nodes: str = ""
    name: str = ""
    stdout: str = ""  # paths as Slurm prints them, on the first node of the job
    command: str = ""

    @property
    def has_state(self) -> bool:
        """Whether Slurm has a record of the job."""
        return self.state != UNKNOWN

    @property
    def pending(self) -> bool:
        """Whether the job has not started."""
        return self.state in ("PENDING", "CONFIGURING", "REQUEUED")

    @property
    def ended(self) -> bool:
        """Whether the job has ended and its nodes are free. While Slurm frees the nodes, the state is COMPLETING."""
        return self.state in _ENDED

    def __str__(self) -> str:
        """State, reason, exit code and signal: ``FAILED (NonZeroExitCode), exit code 7``."""
        reason = f" ({self.reason})" if self.reason else ""
        signal = f", signal {self.signal}" if self.signal else ""
        return f"{self.state}{reason}, exit code {self.exit_code}{signal}"
