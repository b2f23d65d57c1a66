"""Slurm's ``--json`` → records. Pure, and tolerant: between versions a state is a word or a list of words, a number
is bare or ``{"set": true, "infinite": false, "number": 5}``, and keys come, go and move.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from seatrial.discover import slurm_text
from seatrial.discover.slurm_facts import JOB_STATES, NODE_STATES, Duration, Job, Node, split_state

Object = Mapping[str, Any]


def complaints(document: Object) -> list[str]:
    """What Slurm itself says went wrong. It may do so beside an empty list, with exit code 0 (22.05, no controller)."""
    errors = document.get("errors") or []
    return [" ".join(str(error.get(key) or "") for key in ("description", "error")).strip() for error in errors]


def nodes(document: Object) -> tuple[Node, ...]:
    """From ``sinfo --json`` (to 22.05) or ``scontrol show nodes --json``. Raises ValueError on another layout."""
    return tuple(_node(node) for node in _records(document, "nodes"))


def jobs(document: Object) -> tuple[Job, ...]:
    """From ``scontrol show job --json``. Raises ValueError on another layout."""
    return tuple(_job(job) for job in _records(document, "jobs"))


def _records(document: Object, name: str) -> Sequence[Object]:
    records = document.get(name)
    if not isinstance(records, list) or not all(isinstance(record, dict) for record in records):
        raise ValueError(f"no list of {name} in Slurm's JSON, whose keys are {', '.join(document)}")
    return records


def _node(node: Object) -> Node:
    state, flags = split_state([*_words(node.get("state")), *_words(node.get("state_flags"))], NODE_STATES)
    memory = _number(node.get("real_memory"))
    used = node.get("gres_used")
    return Node(
        name=str(_get(node, "name")),
        state=state,
        flags=flags,
        reason=node.get("reason") or "",
        cpus=_number(node.get("cpus")),
        memory_bytes=None if memory is None else memory * 2**20,
        gres=slurm_text.gres(node.get("gres") or ""),
        gres_used=None if used is None else slurm_text.gres(used),
        partitions=tuple(_words(node.get("partitions"))),
        reservation=str(node.get("reservation") or ""),
    )


def _job(job: Object) -> Job:
    state, flags = split_state(_words(_get(job, "job_state")), JOB_STATES)
    code, signal = _exit(job.get("exit_code"))
    reason = job.get("state_description") or job.get("state_reason") or ""
    return Job(
        id=str(_get(job, "job_id")),
        state=state,
        flags=flags,
        reason="" if reason == "None" else reason,
        nodes=job.get("nodes") or "",
        exit_code=code,
        signal=signal,
        time_limit_s=_minutes(job.get("time_limit")),
        start=_number(job.get("start_time")) or None,  # 0: not known yet
    )


def _exit(value: object) -> tuple[int | None, int | None]:
    """Exit code and signal: ``{"return_code": …, "signal": {"id": …}}``; to 23.02 a number, the status of wait(2)."""
    status = _number(value)
    if status is not None:
        return status >> 8, status & 0x7F
    if not isinstance(value, dict):
        return None, None
    signal = value.get("signal")
    number = _number(signal.get("id")) if isinstance(signal, dict) else None
    return _number(value.get("return_code")) or 0, number or 0


def _number(value: object) -> int | None:
    if isinstance(value, dict):
        value = value.get("number") if value.get("set") else None
    return int(value) if isinstance(value, int | float) else None


def _minutes(value: object) -> Duration:
    if isinstance(value, dict) and value.get("infinite"):
        return "unlimited"
    minutes = _number(value)
    return None if minutes is None else minutes * 60


def _words(value: object) -> list[str]:
    if isinstance(value, str):
        return [word for word in value.replace(",", "+").split("+") if word]
    return [str(word) for word in value] if isinstance(value, list) else []


def _get(record: Object, key: str) -> Any:
    if key not in record:
        raise ValueError(f"no {key} in a record of Slurm's JSON, whose keys are {', '.join(record)}")
    return record[key]
