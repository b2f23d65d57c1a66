"""Over which transports NCCL moves the data of a job, by the logs of the job itself."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from seatrial.discover import nccl_log


def logging_environment(folder: Path, name: str) -> dict[str, str]:
    """Variables of a child process by which NCCL logs what it chooses for each operation, in ``folder``."""
    log = str(folder / f"nccl.{name}.%h.%p.log")
    return {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,P2P,ENV,TUNING", "NCCL_DEBUG_FILE": log}


def log_size(device: str) -> int:
    """How many bytes NCCL's log of this process has by now; 0 where there is none."""
    from seatrial.bench import group

    log = group.nccl_log_path()
    return log.stat().st_size if device.startswith("cuda") and log.is_file() else 0


def connections_by_transport(device: str, offset: int = 0) -> dict[str, int]:
    """Connections of all ranks by kind, by the logs of this job so far; of none where no log tells.

    ``since``: what this process had ``written`` when those of interest began. Called by all ranks together.
    """
    from seatrial.bench import group, rank

    if not device.startswith("cuda"):
        return {}
    try:
        own = nccl_log.read(group.nccl_log_path(), start=offset).transports
    except OSError:  # collectives.transport says why
        own = {}
    return dict(sum((Counter(found) for found in rank.gather(own)), Counter[str]()).most_common())
