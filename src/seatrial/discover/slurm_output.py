"""Parses the output of Slurm's commands into records.

``scontrol show`` is called without ``-o``. Then a free text, such as a reason or a path, is the rest of its line, and
can be read although it contains ``=`` and blanks.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
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
from seatrial.model import Frozen, SeatrialError, first_validation_error

R = TypeVar("R", bound=Frozen)
Record = dict[str, str]

# Keys whose value is the rest of the line
_FREE_TEXT_OF_NODE = {"OS", "Reason", "Comment", "Extra"}
_FREE_TEXT_OF_JOB = {"JobName", "Comment", "AdminComment", "SystemComment", "Extra", "SubmitLine"}
_FREE_TEXT_OF_JOB |= {"Command", "WorkDir", "StdErr", "StdIn", "StdOut"}
_PING = re.compile(r"Slurmctld\((\w+)\) at (\S+) is (UP|DOWN)")
_SETTING = re.compile(r"(\S+)\s*= ?(.*)")
_ALLOCATION = re.compile(r"^\s+Nodes=(\S+) CPU_IDs=(\S+) Mem=(\d+)(?: GRES=(\S*))?", re.MULTILINE)


class UnexpectedOutput(SeatrialError, ValueError):
    """A record that lacks a key or has an unexpected value; the message names the record and a command that prints it.

    Also a ValueError, so that callers which only want additional information can ignore it together with others.
    """


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
    """The nodes in the output of ``scontrol show nodes``. Raises UnexpectedOutput."""
    return _parsed(SlurmNode, text, "node", "NodeName", _FREE_TEXT_OF_NODE)


def parse_partitions(text: str) -> tuple[Partition, ...]:
    """The partitions in the output of ``scontrol show partitions``. Raises UnexpectedOutput."""
    return _parsed(Partition, text, "partition", "PartitionName", set())


def parse_jobs(text: str) -> tuple[JobRecord, ...]:
    """The jobs in the output of ``scontrol show jobs``. Raises UnexpectedOutput."""
    jobs = _parsed(JobRecord, text, "job", "JobId", _FREE_TEXT_OF_JOB)
    return tuple(job.model_copy(update={"reason": job.reason.replace("_", " ")}) for job in jobs)  # "_": a blank


def parse_allocations(text: str) -> tuple[AllocatedResources, ...]:
    """The allocations in the output of ``scontrol --details show job``: one per group of nodes with equal resources.

    Raises UnexpectedOutput for an invalid list of CPUs or GRES.
    """
    with _unexpected_output("scontrol --details show job"):
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
    """The jobs in the output of ``sacct -X -n -P`` with SACCT_FIELDS. Raises UnexpectedOutput."""
    jobs = []
    for line in filter(str.strip, text.splitlines()):
        values = line.split("|")
        with _unexpected_output(f"sacct --parsable2 --jobs {values[0]} --format {','.join(SACCT_FIELDS)}"):
            if len(values) != len(SACCT_FIELDS):
                raise ValueError(f"expected {len(SACCT_FIELDS)} fields (got {line!r})")
            jobs.append(_sacct_job(dict(zip(SACCT_FIELDS, values, strict=True))))
    return tuple(jobs)


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


def _parsed(kind: type[R], text: str, noun: str, first_key: str, free_text: set[str]) -> tuple[R, ...]:
    """The records of ``_records``. Raises UnexpectedOutput."""
    parsed = []
    for record in _records(text, first_key, free_text):
        with _unexpected_output(f"scontrol show {noun} {record[first_key]}"):
            parsed.append(kind.model_validate(record))
    return tuple(parsed)


@contextmanager
def _unexpected_output(command: str) -> Iterator[None]:
    """Raise UnexpectedOutput for a ValueError; ``command``: prints the record."""
    try:
        yield
    except ValueError as error:
        problem = first_validation_error(error) if isinstance(error, ValidationError) else error
        raise UnexpectedOutput(f"unexpected output of Slurm: {problem}. Run first: {command}") from error


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
