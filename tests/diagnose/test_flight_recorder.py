"""The command explain on folders with flight-recorder dumps, also hostile ones."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

from tests.discover.recorder_dumps import DONE, DUMPS, hangs
from tests.processes import call


class Hostile:
    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, ("exit 1",)


def test_explain_reads_the_rest_beside_bad_dumps(tmp_path: Path) -> None:
    for path in (DUMPS / "absent").glob("comm*"):
        (tmp_path / path.name).write_bytes(path.read_bytes())
    good = (tmp_path / "comm_lib_trace_rank_0").read_bytes()
    (tmp_path / "comm_lib_trace_rank_3").write_bytes(pickle.dumps(Hostile(), protocol=2))
    (tmp_path / "comm_lib_trace_rank_1").write_bytes(good[:-200])
    (tmp_path / "train.log").write_text("NVRM: Xid (PCI:0000:18:00): 79, pid=1, GPU has fallen off the bus.\n")
    code, out, err = call("explain", tmp_path, "--json")
    first, second = json.loads(out)
    assert (code, first["cause"], first["subject"]) == (0, "rank_not_in_collective", "rank 2")
    assert "Xid" in second["title"]
    assert [line.partition(": ")[2].partition(": ")[0] for line in err.splitlines()] == [
        f"{tmp_path}/comm_lib_trace_rank_1",
        f"{tmp_path}/comm_lib_trace_rank_3",
    ]
    (tmp_path / "comm_lib_trace_rank_0").write_text('{"pg_config": ' + "[" * 200)
    assert call("explain", tmp_path / "comm_lib_trace_rank_0")[0] == 2
    assert call("explain", DUMPS / "operations" / "comm_lib_trace_rank_0")[0] == 0


def test_completed_dumps_are_no_finding(tmp_path: Path) -> None:
    hangs(tmp_path, [DONE], [DONE])
    code, _, err = call("explain", tmp_path)
    assert (code, "all collectives in the flight-recorder dumps of ranks 0-1 are completed" in err) == (4, True)
