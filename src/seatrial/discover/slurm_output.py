"""What Slurm's commands print → records. Pure; the format is that of ``scontrol show`` without ``-o``.

There, free text (a reason, a path) ends its line, so that an ``=`` or a blank in it misleads nobody.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from seatrial.discover.file_readers import parse_id_list
from seatrial.discover.slurm_facts import (
    Allocation,
    Duration,
    Gres,
    Job,
    Node,
    Partition,
    Ping,
    Settings,
)

Record = dict[str, str]

_FREE_OF_NODE = {"OS", "Reason", "Comment", "Extra"}
_FREE_OF_JOB = {
    *("JobName", "Comment", "AdminComment", "SystemComment", "Extra", "Command", "WorkDir", "StdErr", "StdIn"),
    *("StdOut", "SubmitLine"),
}
_UNSET = {"", "(null)", "(null type)", "N/A", "None", "NONE"}
_UNLIMITED = {"UNLIMITED", "INFINITE"}
_PING = re.compile(r"Slurmctld\((\w+)\) at (\S+) is (UP|DOWN)")
_SETTING = re.compile(r"(\S+)\s*= ?(.*)")
_GRES = re.compile(r"([\w-]+)(?::([\w.-]*[A-Za-z_][\w.-]*))?(?::(\d+)([KMGTP]?))?")
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # [days-][hours:]minutes:seconds
_BASE_STATES = {"ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED", "UNKNOWN"}
_SUFFIXES = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN"}
_SUFFIXES |= {"$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED"}  # sinfo(1)
_ALLOCATION = re.compile(r"^\s+Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)(?: GRES=(\S*))?", re.MULTILINE)
_SECONDS = {"sec": 1, "min": 60}
_BY_WHOM = re.compile(r"\s*\[[^][]*@[^][]*]$")


def parse_pings(text: str) -> tuple[Ping, ...]:
    return tuple(Ping(role=role, host=host, up=state == "UP") for role, host, state in _PING.findall(text))


def parse_settings(text: str) -> Settings:
    """From ``scontrol show config``."""
    found = [match.groups() for line in text.splitlines() if (match := _SETTING.match(line))]
    raw = {key: value.strip() for key, value in found}
    same = raw.get("HASH_VAL", "")
    return Settings(
        version=_set(raw, "SLURM_VERSION"),
        cluster_name=_set(raw, "ClusterName"),
        select_type=_set(raw, "SelectType"),
        select_type_parameters=_list(raw, "SelectTypeParameters"),
        proctrack_type=_set(raw, "ProctrackType"),
        task_plugin=_list(raw, "TaskPlugin"),
        gres_types=_list(raw, "GresTypes"),
        accounting_storage_type=_set(raw, "AccountingStorageType"),
        job_acct_gather_type=_set(raw, "JobAcctGatherType"),
        job_acct_gather_params=_list(raw, "JobAcctGatherParams"),
        job_acct_gather_frequency=_set(raw, "JobAcctGatherFrequency"),
        kill_wait_s=_seconds(raw, "KillWait"),
        min_job_age_s=_seconds(raw, "MinJobAge"),
        over_time_limit_s=_seconds(raw, "OverTimeLimit"),
        slurmd_timeout_s=_seconds(raw, "SlurmdTimeout"),
        return_to_service=_set(raw, "ReturnToService"),
        prolog=_program(raw, "Prolog"),
        epilog=_program(raw, "Epilog"),
        health_check_program=_set(raw, "HealthCheckProgram"),
        mpi_default=_set(raw, "MpiDefault"),
        propagate_resource_limits=_list(raw, "PropagateResourceLimits"),
        propagate_resource_limits_except=_list(raw, "PropagateResourceLimitsExcept"),
        constrain_ram_space=_set(raw, "ConstrainRAMSpace"),
        constrain_cores=_set(raw, "ConstrainCores"),
        constrain_devices=_set(raw, "ConstrainDevices"),
        same_configuration=same == "Match" if same.startswith(("Match", "Different")) else None,
    )


def parse_nodes(text: str) -> tuple[Node, ...]:
    """From ``scontrol show nodes``. ``gres_used`` is there with ``-d`` only. Raises ValueError on a cut-off record."""
    return tuple(_node(record) for record in _records(text, "NodeName", _FREE_OF_NODE))


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """From ``scontrol show partitions``. Raises ValueError on a cut-off record."""
    return tuple(_partition(record) for record in _records(text, "PartitionName", set()))


def parse_jobs(text: str) -> tuple[Job, ...]:
    """From ``scontrol show jobs``. Raises ValueError on a cut-off record."""
    return tuple(_job(record) for record in _records(text, "JobId", _FREE_OF_JOB))


def parse_allocations(text: str) -> tuple[Allocation, ...]:
    """From ``scontrol --details show job`` of a running job: a line for all nodes that gave the same."""
    return tuple(  # CPUs have numbers of Slurm's here, and not of the kernel: only their count is of use
        Allocation(
            nodes=nodes, cpus=len(parse_id_list(cpus)), memory_bytes=int(mebibytes) * 2**20, gres=parse_gres(resources)
        )
        for nodes, cpus, mebibytes, resources in _ALLOCATION.findall(text)
    )


SACCT_FIELDS = ("JobIDRaw", "State", "ExitCode", "NodeList", "TimelimitRaw", "Start", "Reason")


def parse_sacct(text: str) -> tuple[Job, ...]:
    """From ``sacct -X -n -P`` with SACCT_FIELDS. Raises ValueError on another number of fields."""
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    return tuple(_accounted(dict(zip(SACCT_FIELDS, row, strict=True))) for row in rows)


def parse_gres(text: str) -> tuple[Gres, ...]:
    """``gpu:h100:8(S:0-1),nvme:1``, ``gpu:2(IDX:0,3)`` or ``(null)``. Raises ValueError on anything else."""
    found = []
    for word in re.sub(r"\([^)]*\)", "", text).split(","):
        if word in _UNSET:
            continue
        if not (match := _GRES.fullmatch(word.replace(":no_consume", ""))):
            raise ValueError(f"{word!r} is not a generic resource such as gpu:h100:8")
        name, kind, count, unit = match.groups()
        scale = 1024 ** (" KMGTP".index(unit) if unit else 0)
        found.append(Gres(name=name, kind=kind, count=int(count) * scale if count else 1))
    return tuple(found)


def parse_duration(text: str) -> Duration:
    """``1-02:00:00``, ``00:05:00`` or ``UNLIMITED``; None for what is not set. Raises ValueError on anything else."""
    if text in _UNLIMITED:
        return "unlimited"
    if text in _UNSET or text == "Partition_Limit":
        return None
    match = _CLOCK.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a duration such as 1-02:00:00")
    days, hours, minutes, secs = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + secs


def _records(text: str, first_key: str, free: set[str]) -> list[Record]:
    """A record begins with its first key. What stands before it (``No nodes in the system``) is none."""
    found: list[Record] = []
    for line in text.splitlines():
        if line.startswith("    "):  # fields are indented by three blanks; a reason of several lines by more
            continue
        fields = _fields(line.strip(), free)
        if first_key in fields:
            found.append({})
        if found:
            found[-1] |= fields
    return found


def _fields(line: str, free: set[str]) -> Record:
    fields: Record = {}
    while line:
        word, _, rest = line.partition(" ")
        key, equals, value = word.partition("=")
        if key in free:
            return fields | {key: line.partition("=")[2].strip()}
        if equals:
            fields[key] = value
        line = rest.lstrip()
    return fields


def _node(record: Record) -> Node:
    state, flags = _node_state(_get(record, "State"))
    memory = record.get("RealMemory", "")
    cpus = record.get("CPUTot", "")
    return Node(
        name=_get(record, "NodeName"),
        state=state,
        flags=flags,
        reason=_BY_WHOM.sub("", record.get("Reason", "")),
        cpus=int(cpus) if cpus.isdigit() else None,
        memory_bytes=int(memory) * 2**20 if memory.isdigit() else None,
        gres=parse_gres(record.get("Gres", "")),
        gres_used=parse_gres(record["GresUsed"]) if "GresUsed" in record else None,
        partitions=tuple(name for name in record.get("Partitions", "").split(",") if name),
        reservation=record.get("ReservationName", ""),
    )


def _node_state(text: str) -> tuple[str, tuple[str, ...]]:
    """Base state and flags, from ``IDLE*+DRAIN`` (older versions) or ``IDLE+DRAIN+NOT_RESPONDING`` (newer)."""
    names: list[str] = []
    for word in text.upper().split("+"):
        names += [word.rstrip("".join(_SUFFIXES)), *(_SUFFIXES[char] for char in word if char in _SUFFIXES)]
    state = next((name for name in names if name in _BASE_STATES), names[0])
    return state, tuple(name for name in names if name != state)


def _partition(record: Record) -> Partition:
    total = record.get("TotalNodes", "")
    return Partition(
        name=_get(record, "PartitionName"),
        state=_get(record, "State"),
        nodes=record.get("Nodes", "").replace("(null)", ""),
        total_nodes=int(total) if total.isdigit() else None,
        default=_get(record, "Default") == "YES",
        max_time_s=parse_duration(record.get("MaxTime", "")),
        default_time_s=parse_duration(record.get("DefaultTime", "")),
        oversubscribe=record.get("OverSubscribe"),
    )


def _job(record: Record) -> Job:
    code, signal = _exit(record.get("ExitCode", ""))
    return Job(
        id=_get(record, "JobId"),
        state=_get(record, "JobState"),
        reason=(_set(record, "Reason") or "").replace("_", " "),  # scontrol writes a blank as "_"
        nodes=_set(record, "NodeList") or "",
        exit_code=code,
        signal=signal,
        time_limit_s=parse_duration(record.get("TimeLimit", "")),
        start=_time(record.get("StartTime", "")),
    )


def _accounted(row: Record) -> Job:
    code, signal = _exit(row["ExitCode"])
    minutes = row["TimelimitRaw"]
    return Job(
        id=row["JobIDRaw"],
        state=row["State"].split()[0],  # "CANCELLED by 0"
        reason=_set(row, "Reason") or "",
        nodes=row["NodeList"].replace("None assigned", ""),
        exit_code=code,
        signal=signal,
        time_limit_s=int(minutes) * 60 if minutes.isdigit() else parse_duration(minutes),
        start=_time(row["Start"]),
    )


def _exit(text: str) -> tuple[int | None, int | None]:
    """Exit code and signal from ``7:0``."""
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdigit() and signal.isdigit() else (None, None)


def _time(text: str) -> float | None:
    """Unix seconds of a local time. None where Slurm knows none, or tells it as SLURM_TIME_FORMAT has it."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _get(record: Record, key: str) -> str:
    if key not in record:
        raise ValueError(f"no {key} in {record}")
    return record[key]


def _set(raw: Mapping[str, str], key: str) -> str | None:
    value = raw.get(key, "")
    return None if value in _UNSET else value


def _program(raw: Mapping[str, str], key: str) -> str | None:
    """A setting that newer versions number, since there may be several: ``Prolog[0]``."""
    numbered = [value for name, value in raw.items() if re.fullmatch(rf"{key}(\[\d+])?", name) and value not in _UNSET]
    return ",".join(numbered) or None


def _list(raw: Mapping[str, str], key: str) -> tuple[str, ...]:
    return tuple(word.strip() for word in (_set(raw, key) or "").split(",") if word.strip())


def _seconds(raw: Mapping[str, str], key: str) -> Duration:
    """``30 sec`` or ``5 min``."""
    value = raw.get(key, "")
    match = re.fullmatch(r"(\d+)(?: (sec|min))?", value)
    if match:
        return int(match[1]) * _SECONDS[match[2] or "sec"]
    return "unlimited" if value in _UNLIMITED else None
