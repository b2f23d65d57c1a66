"""Parses the output of Slurm's commands into records.

``scontrol show`` is called without ``-o``. Then a free text, such as a reason or a path, is the rest of its line, and
can be read although it contains ``=`` and blanks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import datetime

from seatrial.discover.file_readers import parse_id_list
from seatrial.discover.slurm_facts import (
    UNLIMITED,
    AllocatedResources,
    Duration,
    Gres,
    JobRecord,
    Partition,
    Ping,
    Settings,
    SlurmNode,
)

Record = dict[str, str]

# Keys whose value is the rest of the line
_FREE_TEXT_OF_NODE = {"OS", "Reason", "Comment", "Extra"}
_FREE_TEXT_OF_JOB = {"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "SubmitLine"}
_FREE_TEXT_OF_JOB |= {"Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
_UNSET = {"", "(null)", "(null type)", "N/A", "None", "NONE"}
_PING = re.compile(r"Slurmctld\((\w+)\) at (\S+) is (UP|DOWN)")
_SETTING = re.compile(r"(\S+)\s*= ?(.*)")
_GRES = re.compile(r"([\w-]+)(?::([\w.-]*[A-Za-z_][\w.-]*))?(?::(\d+)([KMGTP]?))?")
_CLOCK = re.compile(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+)")  # [days-][hours:]minutes:seconds
_BASE_STATES = {"ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED", "UNKNOWN"}
# Suffix of a node's state → the flag that it stands for, sinfo(1)
_SUFFIXES = {"*": "NOT_RESPONDING", "~": "POWERED_DOWN", "#": "POWERING_UP", "!": "POWER_DOWN", "%": "POWERING_DOWN"}
_SUFFIXES |= {"$": "MAINTENANCE", "@": "REBOOT_REQUESTED", "^": "REBOOT_ISSUED", "-": "PLANNED"}
_ALLOCATION = re.compile(r"^\s+Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)(?: GRES=(\S*))?", re.MULTILINE)
_REASON_AUTHOR = re.compile(r"\s*\[[^][]*@[^][]*]$")  # [root@2026-01-31T12:00:00]


def parse_pings(text: str) -> tuple[Ping, ...]:
    """The controllers in the output of ``scontrol ping``; empty if it lists none."""
    return tuple(Ping(role=role, host=host, up=state == "UP") for role, host, state in _PING.findall(text))


def parse_settings(text: str) -> Settings:
    """The settings in the output of ``scontrol show config``."""
    raw: Record = {}
    for line in text.splitlines():
        if (match := _SETTING.match(line)) and (value := match[2].strip()) not in _UNSET:
            key, index, _ = match[1].partition("[")  # newer versions print Prolog[0], Prolog[1]
            raw[key] = f"{raw[key]},{value}" if index and key in raw else value
    return Settings.model_validate(raw)


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """The nodes in the output of ``scontrol show nodes``. Raises ValueError on an unexpected record.

    ``gres_used`` is None without the option ``--details``.
    """
    return tuple(_node(record) for record in _records(text, "NodeName", _FREE_TEXT_OF_NODE))


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions in the output of ``scontrol show partitions``. Raises ValueError on an unexpected record."""
    return tuple(_partition(record) for record in _records(text, "PartitionName", set()))


def parse_jobs(text: str) -> tuple[JobRecord, ...]:
    """The jobs in the output of ``scontrol show jobs``. Raises ValueError on an unexpected record."""
    return tuple(_job(record) for record in _records(text, "JobId", _FREE_TEXT_OF_JOB))


def parse_allocations(text: str) -> tuple[AllocatedResources, ...]:
    """The allocations in the output of ``scontrol --details show job``: one per group of nodes with equal resources.

    Raises ValueError on an unexpected list of CPUs or GRES.
    """
    return tuple(
        AllocatedResources(
            nodes=nodes,
            cpus=len(parse_id_list(cpu_ids)),  # Slurm's numbers of CPUs, not the kernel's: only their count is used
            memory_bytes=int(mebibytes) * 2**20,
            gres=parse_gres(gres),
        )
        for nodes, cpu_ids, mebibytes, gres in _ALLOCATION.findall(text)
    )


SACCT_FIELDS = ("JobIDRaw", "State", "ExitCode", "NodeList", "TimelimitRaw", "Start", "Reason")


def parse_sacct(text: str) -> tuple[JobRecord, ...]:
    """The jobs in the output of ``sacct -X -n -P`` with SACCT_FIELDS. Raises ValueError on an unexpected line."""
    rows = [line.split("|") for line in text.splitlines() if line.strip()]
    return tuple(_sacct_job(dict(zip(SACCT_FIELDS, row, strict=True))) for row in rows)


def parse_gres(text: str) -> tuple[Gres, ...]:
    """The resources in ``gpu:h100:8(S:0-1),nvme:1``, ``gpu:2(IDX:0,3)`` or ``(null)``. Raises ValueError."""
    resources = []
    for item in re.sub(r"\([^)]*\)", "", text).split(","):
        if item in _UNSET:
            continue
        if not (match := _GRES.fullmatch(item.replace(":no_consume", ""))):
            raise ValueError(f"{item!r} is not a generic resource such as gpu:h100:8")
        name, type_, count, unit = match.groups()
        factor = 1024 ** (" KMGTP".index(unit) if unit else 0)
        resources.append(Gres(name=name, type=type_, count=int(count) * factor if count else 1))
    return tuple(resources)


def parse_duration(text: str) -> Duration:
    """Seconds of ``1-02:00:00`` or ``00:05:00``; "unlimited" for ``UNLIMITED``. Raises ValueError for other text.

    None for an unset value, and for ``Partition_Limit``, which means that the limit of the partition applies.
    """
    if text in UNLIMITED:
        return "unlimited"
    if text in _UNSET or text == "Partition_Limit":
        return None
    match = _CLOCK.fullmatch(text)
    if not match:
        raise ValueError(f"{text!r} is not a duration such as 1-02:00:00")
    days, hours, minutes, seconds = (int(group or 0) for group in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _records(text: str, first_key: str, free_text: set[str]) -> list[Record]:
    """The records in ``text``; each starts with ``first_key``, and text before the first one is ignored."""
    records: list[Record] = []
    for line in text.splitlines():
        if line.startswith("    "):  # continuation of a reason: fields are indented by three blanks only
            continue
        fields = _fields(line.strip(), free_text)
        if first_key in fields:
            records.append({})
        if records:
            records[-1] |= fields
    return records


def _fields(line: str, free_text: set[str]) -> Record:
    """The ``key=value`` pairs of a line; a key in ``free_text`` takes the rest of the line."""
    fields: Record = {}
    while line:
        item, _, rest = line.partition(" ")
        key, equals, value = item.partition("=")
        if key in free_text:
            return fields | {key: line.partition("=")[2].strip()}
        if equals:
            fields[key] = value
        line = rest.lstrip()
    return fields


def _node(record: Record) -> SlurmNode:
    state, flags = _node_state(_required(record, "State"))
    memory = record.get("RealMemory", "")
    cpus = record.get("CPUTot", "")
    return SlurmNode(
        name=_required(record, "NodeName"),
        state=state,
        flags=flags,
        reason=_REASON_AUTHOR.sub("", record.get("Reason", "")),
        cpus=int(cpus) if cpus.isdigit() else None,
        memory_bytes=int(memory) * 2**20 if memory.isdigit() else None,
        gres=parse_gres(record.get("Gres", "")),
        gres_used=parse_gres(record["GresUsed"]) if "GresUsed" in record else None,
        partitions=tuple(name for name in record.get("Partitions", "").split(",") if name),
        reservation=record.get("ReservationName", ""),
        comment=_value(record, "Comment") or "",
        features=tuple(filter(None, (_value(record, "AvailableFeatures") or "").split(","))),
    )


def _node_state(text: str) -> tuple[str, tuple[str, ...]]:
    """Base state and flags of ``IDLE*+DRAIN`` (older versions) or ``IDLE+DRAIN+NOT_RESPONDING`` (newer)."""
    names: list[str] = []
    for part in text.upper().split("+"):
        names.append(part.rstrip("".join(_SUFFIXES)))
        names += [_SUFFIXES[char] for char in part if char in _SUFFIXES]
    state = next((name for name in names if name in _BASE_STATES), names[0])
    return state, tuple(name for name in names if name != state)


def _partition(record: Record) -> Partition:
    total = record.get("TotalNodes", "")
    return Partition(
        name=_required(record, "PartitionName"),
        state=_required(record, "State"),
        nodes=record.get("Nodes", "").replace("(null)", ""),
        total_nodes=int(total) if total.isdigit() else None,
        default=_required(record, "Default") == "YES",
        max_time_s=parse_duration(record.get("MaxTime", "")),
        default_time_s=parse_duration(record.get("DefaultTime", "")),
        oversubscribe=record.get("OverSubscribe"),
    )


def _job(record: Record) -> JobRecord:
    exit_code, signal = _exit_code_and_signal(record.get("ExitCode", ""))
    node_count = record.get("NumNodes", "").partition("-")[0]  # "2-4" for a pending job with a range
    return JobRecord(
        id=_required(record, "JobId"),
        state=_required(record, "JobState"),
        reason=(_value(record, "Reason") or "").replace("_", " "),  # scontrol prints blanks as "_"
        nodes=_value(record, "NodeList") or "",
        exit_code=exit_code,
        signal=signal,
        time_limit_s=parse_duration(record.get("TimeLimit", "")),
        start=_time(record.get("StartTime", "")),
        node_count=int(node_count) if node_count.isdigit() else None,
        partition=_value(record, "Partition") or "",
        requested_nodes=_value(record, "ReqNodeList") or "",
        excluded_nodes=_value(record, "ExcNodeList") or "",
        name=_value(record, "JobName") or "",
        stdout=_value(record, "StdOut") or "",
        command=_value(record, "Command") or "",
    )


def _sacct_job(row: Record) -> JobRecord:
    exit_code, signal = _exit_code_and_signal(row["ExitCode"])
    minutes = row["TimelimitRaw"]  # or a word such as UNLIMITED
    return JobRecord(
        id=row["JobIDRaw"],
        state=row["State"].split()[0],  # "CANCELLED by 0"
        reason=_value(row, "Reason") or "",
        nodes=row["NodeList"].replace("None assigned", ""),
        exit_code=exit_code,
        signal=signal,
        time_limit_s=int(minutes) * 60 if minutes.isdigit() else parse_duration(minutes),
        start=_time(row["Start"]),
    )


def _exit_code_and_signal(text: str) -> tuple[int | None, int | None]:
    """(exit code, signal) of a text such as ``7:0``; None for both in any other text."""
    code, _, signal = text.partition(":")
    return (int(code), int(signal)) if code.isdigit() and signal.isdigit() else (None, None)


def _time(text: str) -> float | None:
    """Unix seconds of a local time; None if Slurm prints no time, or if SLURM_TIME_FORMAT changes the format."""
    try:
        return datetime.fromisoformat(text).timestamp()
    except ValueError:
        return None


def _required(record: Record, key: str) -> str:
    """The value of a key. Raises ValueError if the record lacks the key."""
    if key not in record:
        raise ValueError(f"no {key} in record {record}")
    return record[key]


def _value(raw: Mapping[str, str], key: str) -> str | None:
    """The value of a key; None if it is unset or missing."""
    value = raw.get(key, "")
    return None if value in _UNSET else value
