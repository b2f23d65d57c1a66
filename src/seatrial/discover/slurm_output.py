"""Parses the output of Slurm's commands into records.

``scontrol show`` is called without ``-o``. Then a free text, such as a reason or a path, is the rest of its line, and
can be read although it contains ``=`` and blanks.
"""

from __future__ import annotations

import re
from typing import TypeVar

from pydantic import ValidationError

from seatrial.discover.file_readers import parse_id_list
from seatrial.discover.slurm_facts import (
    UNSET,
    AllocatedResources,
    JobRecord,
    Partition,
    Ping,
    Settings,
    SlurmNode,
    parse_gres,
)
from seatrial.model import Frozen, first_validation_error

R = TypeVar("R", bound=Frozen)
Record = dict[str, str]

# Keys whose value is the rest of the line
_FREE_TEXT_OF_NODE = {"OS", "Reason", "Comment", "Extra"}
_FREE_TEXT_OF_JOB = {"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "SubmitLine"}
_FREE_TEXT_OF_JOB |= {"Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
_PING = re.compile(r"Slurmctld\((\w+)\) at (\S+) is (UP|DOWN)")
_SETTING = re.compile(r"(\S+)\s*= ?(.*)")
_ALLOCATION = re.compile(r"^\s+Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)(?: GRES=(\S*))?", re.MULTILINE)


def parse_pings(text: str) -> tuple[Ping, ...]:
    """The controllers in the output of ``scontrol ping``; empty if it lists none."""
    return tuple(Ping(role=role, host=host, up=state == "UP") for role, host, state in _PING.findall(text))


def parse_settings(text: str) -> Settings:
    raw: Record = {}
    for line in text.splitlines():
        if (match := _SETTING.match(line)) and (value := match[2].strip()) not in UNSET:
            key, index, _ = match[1].partition("[")  # newer versions print Prolog[0], Prolog[1]
            raw[key] = f"{raw[key]},{value}" if index and key in raw else value
    return Settings.model_validate(raw)


def parse_nodes(text: str) -> tuple[SlurmNode, ...]:
    """The nodes in the output of ``scontrol show nodes``. Raises ValueError on an unexpected record."""
    return _parsed(SlurmNode, text, "NodeName", _FREE_TEXT_OF_NODE)


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions in the output of ``scontrol show partitions``. Raises ValueError on an unexpected record."""
    return _parsed(Partition, text, "PartitionName", set())


def parse_jobs(text: str) -> tuple[JobRecord, ...]:
    """The jobs in the output of ``scontrol show jobs``. Raises ValueError on an unexpected record."""
    jobs = _parsed(JobRecord, text, "JobId", _FREE_TEXT_OF_JOB)
    return tuple(job.model_copy(update={"reason": job.reason.replace("_", " ")}) for job in jobs)  # "_": a blank


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


def _sacct_job(row: Record) -> JobRecord:
    minutes = row["TimelimitRaw"]  # or a word such as UNLIMITED
    return JobRecord.model_validate(
        {
            "JobId": row["JobIDRaw"],
            "JobState": row["State"].split()[0],  # "CANCELLED by 0"
            "TimeLimit": int(minutes) * 60 if minutes.isdigit() else minutes,
            "StartTime": row["Start"],
            **{key: row[key] for key in ("Reason", "NodeList", "ExitCode")},
        }
    )


def _parsed(kind: type[R], text: str, first_key: str, free_text: set[str]) -> tuple[R, ...]:
    """The records of ``_records``. Raises ValueError if one lacks a key or has an unexpected value."""
    try:
        return tuple(map(kind.model_validate, _records(text, first_key, free_text)))
    except ValidationError as error:
        raise ValueError(first_validation_error(error)) from error


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
