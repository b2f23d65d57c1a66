"""Flight-recorder dumps as torch's writer makes them for NCCL, and real ones over gloo."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from seatrial.discover.collective_hangs import CollectiveHang, collective_hangs
from seatrial.discover.flight_recorder import read_dump
from tests.paths import FIXTURES

DUMPS = FIXTURES / "flight-recorder"
GROUPS = {"0": "[0, 1, 2, 3]", "5": "[2, 3]"}


def entry(name: str, seq: int, state: str, group: Sequence[str] = ("0", "default_pg"), **fields: Any) -> dict[str, Any]:
    """An entry as FlightRecorderDetail.hpp of torch 2.13 writes it for NCCL."""
    is_p2p = name.startswith(("send", "recv"))
    return {
        "frames": [{"name": "step", "filename": "/home/user/loop.py", "line": 7}],
        "record_id": seq,
        "pg_id": int(group[0]),
        "process_group": tuple(group),
        "thread_name": "python",
        "thread_id": "1",
        "collective_seq_id": 0 if is_p2p else seq,
        "p2p_seq_id": seq if is_p2p else 0,
        "op_id": seq,
        "profiling_name": f"nccl:{name}",
        "time_created_ns": 1,
        "input_sizes": [[4, 2]],
        "input_dtypes": ["BFloat16"],
        "output_sizes": [[4, 2]],
        "output_dtypes": ["BFloat16"],
        "state": state,
        "time_discovered_started_ns": None,
        "time_discovered_completed_ns": None,
        "retired": False,
        "timeout_ms": 600000,
        "is_p2p": is_p2p,
        **fields,
    }


def hangs(
    folder: Path, *by_rank: list[dict[str, Any]] | None, groups: dict[str, str] | None = None
) -> list[CollectiveHang]:
    """Write the dumps of ranks 0, 1, … (None: no dump) and return the hangs in them."""
    config = {name: {"name": name, "desc": "", "ranks": ranks} for name, ranks in (groups or {}).items()}
    for rank, entries in enumerate(by_rank):
        if entries is not None:
            document = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    return collective_hangs(read_dump(path) for path in folder.iterdir())


DONE = entry("all_reduce", 1, "completed")
