"""Faults of RDMA ports and of perftest; see tests.bench.cluster."""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest.mock import patch

from seatrial.bench import perftest
from tests.bench import cluster


def _path(folder: str) -> cluster.Fault:
    """Put the programs in ``folder`` of the scenarios first on PATH; ``{rank}`` is the rank."""

    def on_rank(rank: int) -> AbstractContextManager[Any]:
        first = Path(os.environ[cluster.FOLDER]) / folder.format(rank=rank)
        return patch.dict(os.environ, {"PATH": f"{first}:{os.environ['PATH']}"})

    return on_rank


def _bad_gid_index(rank: int) -> AbstractContextManager[Any] | None:
    return patch.dict(os.environ, {"NCCL_IB_GID_INDEX": "three"}) if rank == 1 else None


FAULTS: dict[str, cluster.Fault] = {
    "bad_gid_index": _bad_gid_index,
    "known_address": cluster.everywhere(perftest, "local_address", lambda: "127.0.0.1"),
    "tools": _path("tools"),
    "tools_by_rank": _path("tools{rank}"),
    "bad": _path("bad{rank}"),
    "hang": _path("hang{rank}"),
    "old": _path("old{rank}"),
}
