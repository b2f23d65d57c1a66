"""NCCL's log: the variables that enable it, and the transports of a job from the logs of its ranks."""

from __future__ import annotations

from collections import Counter
from pathlib import Path
from typing import Any

NOT_LOGGED = "not logged"  # in facts: NCCL's log has no line on this value


def logging_environment(folder: Path, name: str) -> dict[str, str]:
    """Environment variables that make NCCL log its choice for each operation to a file in ``folder``."""
    log = str(folder / f"nccl.{name}.%h.%p.log")
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,ENV,TUNING", "NCCL_DEBUG_FILE": log}


def group_facts(log_offset: int = 0) -> dict[str, Any]:
    """The facts of ``collectives.describe_group`` and the transports. All ranks call this after the measurement."""
    from seatrial.bench import collectives

    return {**collectives.describe_group(), "transports": connections_by_transport(log_offset)}


def connections_by_transport(offset: int = 0) -> dict[str, int]:
    """Transport → number of connections of all ranks, the most used transport first; empty without logs.

    Each rank reads its NCCL log from byte ``offset`` on. All ranks call this together.
    """
    from seatrial.bench import group, rank
    from seatrial.discover import nccl_log

    try:
        transports = nccl_log.read(group.nccl_log_path(), start=offset).transports
    except OSError:  # no GPU; otherwise collectives.transport reports the error
        transports = {}
    return dict(sum((Counter(counts) for counts in rank.gather(transports)), Counter[str]()).most_common())
