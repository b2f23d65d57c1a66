"""Records of Slurm's controllers, settings, nodes, partitions and jobs.

Memory is in bytes, times are in Unix seconds, durations in seconds. A field is None if Slurm does not show it.
"""

import re
from collections.abc import Callable
from datetime import datetime
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
_POWER_SAVING = {"POWERED_DOWN", "POWERING_DOWN", "POWERING_UP"}
RETURNING_STATES = _POWER_SAVING | {"REBOOT_ISSUED", "REBOOT_REQUESTED"}

_ENDED = frozenset(
    {"BOOT_FAIL", "CANCELLED", "COMPLETED", "DEADLINE", "FAILED", "NODE_FAIL", "OUT_OF_MEMORY", "PREEMPTED", "REVOKED"}
    | {"TIMEOUT"}
)


UNSET = {"", "(null)", "(null type)", "N/A", "None", "NONE", "None assigned"}
_BASE_STATES = {"ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED", "UNKNOWN"}
# Suffix of a node's state → the flag that it stands for, sinfo(1)
_SUFFIXES = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN"}
_SUFFIXES |= {"$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED"}
_SHORT_STATES = {"FAILG": "FAILING", "UNK": "UNKNOWN"}  # of sinfo, where they are not the beginning of the name
# A type may be a number, as in gpu:3090:8; without a type, some versions print gpu:(null):8
_GRES = re.compile(r"([\w/-]+)(?::([\w.+/-]*))??(?::(\d+)([KMGTP]?))?")
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # [days-][hours:]minutes:seconds
_REASON_AUTHOR = re.compile(r"\s*\[[^][]*@[^][]*]$")  # [root@2026-01-31T12:00:00]


class Ping(Frozen):
    """One controller; ``role`` is ``primary``, ``backup``, ``backup1`` …"""

    role: str
    host: str
    up: bool


class Gres(Frozen):
    """A generic resource: ``gpu:h100:8`` has the name ``gpu``, the type ``h100`` and the count 8."""

    name: str
    type: str | None
    count: int


def parse_gres(text: str) -> tuple[Gres, ...]:
    """The resources in ``gpu:h100:8(S:0-1),nvme:1``, ``gpu:2(IDX:0,3)`` or ``(null)``. Raises ValueError."""
    resources = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        if item in UNSET:
            continue
        if not (match := _GRES.fullmatch(item.replace(":no_consume", ""))):
            raise ValueError(f"{item!r} is not a generic resource such as gpu:h100:8")
        name, type_, count, unit = match.groups()
        factor = 1024 ** (" KMGTP".index(unit) if unit else 0)
        resources.append(Gres(name=name, type=type_ or None, count=int(count) * factor if count else 1))
    return tuple(resources)


def parse_duration(text: str) -> Duration:
    """Seconds of ``1-02:00:00`` or ``00:05:00``; "unlimited" for ``UNLIMITED``. Raises ValueError for other text.

    None for an unset value, and for ``Partition_Limit``, which means that the limit of the partition applies.
    """
    if text in UNLIMITED:
        return "unlimited"
    if text in UNSET or text == "Partition_Limit":
        return None
    match = _CLOCK.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a duration such as 1-02:00:00")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _names(text: str) -> tuple[str, ...]:
    return tuple(name for name in map(str.strip, text.split(",")) if name not in UNSET)


def _seconds(text: str) -> Duration:
    """Seconds of ``30 sec``, ``5 min`` or ``30``; "unlimited" for ``UNLIMITED``; None for any other text."""
    if match := re.fullmatch(r"(\d+)(?: (sec|min))?", text):
        return int(match[1]) * (60 if match[2] == "min" else 1)
    return "unlimited" if text in UNLIMITED else None


def _is_same(hash_value: str) -> bool | None:
    return hash_value == "Match" if hash_value.startswith(("Match", "Different")) else None


def _node_state(text: str) -> tuple[str, tuple[str, ...]]:
    """Base state and flags of ``IDLE*+DRAIN`` (older versions), ``IDLE+DRAIN+NOT_RESPONDING`` or sinfo's ``failg*``."""
    names: list[str] = []
    for part in text.upper().split("+"):
        name = part.rstrip("".join(_SUFFIXES))
        names.append(_SHORT_STATES.get(name, name))
        names += [_SUFFIXES[char] for char in part if char in _SUFFIXES]
    state = next((name for name in names if name in _BASE_STATES), names[0])
    return state, tuple(name for name in names if name != state)


def _exit_code_and_signal(text: str) -> tuple[int | None, int | None]:
    """(exit code, signal) of a text such as ``7:0``; None for both in any other text."""
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdigit() and signal.isdigit() else (None, None)


def _count(text: str) -> int | None:
    """The number, of a range such as ``2-4`` the first one; None for any other text."""
    number = text.partition("-")[0]
    return int(number) if number.isdigit() else None


def _time(text: str) -> float | None:
    """Unix seconds of a local time; None if Slurm prints no time, or if SLURM_TIME_FORMAT changes the format."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _from_text(parse: Callable[[str], object]) -> BeforeValidator:
    """Parses the text of Slurm's output; a value of another type stays."""
    return BeforeValidator(lambda value: parse(value) if isinstance(value, str) else value)


_Text = Annotated[str, _from_text(lambda text: "" if text in UNSET else text)]
_Names = Annotated[tuple[str, ...], _from_text(_names)]
_Seconds = Annotated[Duration, _from_text(_seconds)]
_Clock = Annotated[Duration, _from_text(parse_duration)]
_Count = Annotated[int | None, _from_text(_count)]
_Mebibytes = Annotated[int | None, _from_text(lambda text: int(text) * 2**20 if text.isdigit() else None)]
_Gres = Annotated[tuple[Gres, ...], _from_text(parse_gres)]


class _Record(Frozen):
    """Fields by Slurm's names; a key that no field has is ignored."""

    model_config = ConfigDict(alias_generator=to_pascal, populate_by_name=True, extra="ignore")


class Settings(_Record):
    """The settings in ``scontrol show config`` that a trial uses, by Slurm's names; an unset one is None or empty."""

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
    slurmd_port: _Count = None
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
    same_configuration: Annotated[bool | None, _from_text(_is_same)] = Field(None, alias="HASH_VAL")

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


class SlurmNode(_Record):
    """One node. ``state`` is its base state (``IDLE``, ``MIXED`` …), ``flags`` has its flags (``DRAIN`` …)."""

    name: str = Field(alias="NodeName")
    state: Annotated[str, _from_text(lambda text: _node_state(text)[0])]
    flags: Annotated[tuple[str, ...], _from_text(lambda text: _node_state(text)[1])] = Field((), alias="State")
    reason: Annotated[str, _from_text(lambda text: _REASON_AUTHOR.sub("", text))] = ""
    cpus: _Count = Field(None, alias="CPUTot")
    memory_bytes: _Mebibytes = Field(None, alias="RealMemory")
    gres: _Gres = ()
    partitions: _Names = ()
    reservation: str = Field("", alias="ReservationName")  # empty without one, and where Slurm does not show it
    comment: _Text = ""
    address: _Text = Field("", alias="NodeAddr")
    port: _Count = None  # of its slurmd; None: slurmd_port of the settings
    features: _Names = Field((), alias="AvailableFeatures")

    @property
    def states(self) -> set[str]:
        """The base state and all flags."""
        return {self.state, *self.flags}

    @property
    def up(self) -> bool:
        """Whether the node responds and is not down. A node in power saving is up: Slurm powers it up for jobs."""
        # While Slurm powers a node up, it is silent: MIXED+CLOUD+NOT_RESPONDING+POWERING_UP
        silent = {"NOT_RESPONDING"} if self.states & _POWER_SAVING else set()
        return not self.states & _NOT_UP - silent

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
        return self.reserved and (not reservation or self.reservation not in ("", *reservation.split(",")))

    @property
    def usable(self) -> bool:
        """Whether the node is up and accepts new jobs."""
        return self.up and not self.not_in_service

    @property
    def gpus(self) -> int:
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


class Partition(_Record):
    """One partition. ``nodes`` is Slurm's hostlist (``node[0-3]``). A time limit that is not set is None."""

    name: str = Field(alias="PartitionName")
    state: str
    nodes: _Text = ""
    default: Annotated[bool, _from_text(lambda text: text == "YES")]
    max_time_s: _Clock = Field(None, alias="MaxTime")
    default_time_s: _Clock = Field(None, alias="DefaultTime")
    oversubscribe: str | None = Field(None, alias="OverSubscribe")  # NO, YES:4, FORCE:4 or EXCLUSIVE

    @property
    def up(self) -> bool:
        """Whether the partition accepts and starts jobs."""
        return self.state == "UP"


class JobRecord(_Record):
    """Slurm's record of a job: ``nodes`` is its hostlist; ``exit_code`` and ``signal`` are 0 until the job has ended.

    ``start`` of a pending job is Slurm's estimate. If Slurm has no record of the job, the state is UNKNOWN, and
    ``reason`` says why.
    """

    id: str = Field(alias="JobId")
    state: str = Field(alias="JobState")
    reason: _Text = ""
    nodes: _Text = Field("", alias="NodeList")
    exit_code: Annotated[int | None, _from_text(lambda text: _exit_code_and_signal(text)[0])] = None
    signal: Annotated[int | None, _from_text(lambda text: _exit_code_and_signal(text)[1])] = Field(
        None, alias="ExitCode"
    )
    time_limit_s: _Clock = Field(None, alias="TimeLimit")
    start: Annotated[float | None, _from_text(_time)] = Field(None, alias="StartTime")
    node_count: _Count = Field(None, alias="NumNodes")  # of a pending job with a range, the smallest number
    partition: _Text = ""  # several for a pending job that may run in any of them: gpu,short
    requested_nodes: _Text = Field("", alias="ReqNodeList")  # Slurm's hostlist, as are excluded_nodes
    excluded_nodes: _Text = Field("", alias="ExcNodeList")
    name: _Text = Field("", alias="JobName")
    stdout: _Text = Field("", alias="StdOut")  # paths as Slurm prints them, on the first node of the job
    command: _Text = ""

    @property
    def has_state(self) -> bool:
        return self.state != UNKNOWN

    @property
    def pending(self) -> bool:
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
