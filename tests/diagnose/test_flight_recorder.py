"""Flight-recorder dumps: real ones over gloo, and ones after the format of torch's writer for NCCL."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from seatrial.diagnose.flight_recorder import recorder_findings
from seatrial.discover.collective_hangs import CollectiveHang, collective_hangs
from seatrial.discover.flight_recorder import is_dump, read_dump
from tests.paths import FIXTURES
from tests.processes import call

DUMPS = FIXTURES / "flight-recorder"


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


def hangs(folder: Path, *by_rank: list[dict[str, Any]] | None, groups: dict[str, str] | None = None) -> Any:
    """Write the dumps of ranks 0, 1, … (None: no dump) and return the hangs in them."""
    config = {name: {"name": name, "desc": "", "ranks": ranks} for name, ranks in (groups or {}).items()}
    for rank, entries in enumerate(by_rank):
        if entries is not None:
            document = {"version": "2.10", "pg_config": config, "pg_status": {}, "entries": entries}
            (folder / f"nccl_trace_rank_{rank}").write_bytes(pickle.dumps(document, protocol=2))
    return collective_hangs(read_dump(path) for path in folder.iterdir())


@pytest.mark.parametrize("form", ["comm_lib_trace_rank_*", "json_trace_rank_*"])
def test_absent_rank_is_named(form: str) -> None:
    paths = list((DUMPS / "absent").glob(form))
    assert all(is_dump(path) for path in paths)
    (hang,) = collective_hangs(read_dump(path) for path in paths)
    last = hang.absent[2]
    assert (hang.culprits, hang.seq, hang.name, hang.without_dump) == ((2,), 3, "all_reduce", ())
    assert set(hang.waiting) == ({0, 1, 3} if "comm" in form else {0, 1})
    assert last is not None
    assert (last.name, last.seq, last.state) == ("barrier", 2, "completed")
    if "comm" in form:  # JSON has no stacks
        assert last.frame is not None
        assert hang.waiting[0].frame is not None
        assert (last.frame.function, hang.waiting[0].frame.function) == ("main", "reduce_gradients")
    assert hang.waiting[0].input_sizes == ((1000,),)


def test_missing_dump_of_a_rank_is_said() -> None:
    paths = [DUMPS / "absent" / f"comm_lib_trace_rank_{rank}" for rank in (0, 1, 2)]
    (hang,) = collective_hangs((read_dump(path) for path in paths), world_size=4)
    assert (hang.without_dump, hang.culprits) == ((3,), (2,))
    (only_missing,) = collective_hangs((read_dump(path) for path in paths[:2]), world_size=3)
    assert (only_missing.culprits, only_missing.without_dump, only_missing.members_recorded) == ((2,), (2,), True)


def test_unrecorded_members_are_not_said_to_have_arrived() -> None:
    (hang,) = collective_hangs(read_dump(path) for path in (DUMPS / "sizes").iterdir())
    assert (hang.culprits, hang.members_recorded) == ((), False)
    (finding,), _ = recorder_findings((DUMPS / "sizes").iterdir(), [])
    assert finding.confidence == "low"


def test_other_operation_is_named() -> None:
    (hang,) = collective_hangs(read_dump(path) for path in (DUMPS / "operations").iterdir())
    assert hang.differences == {"operation": {"all_reduce": (0, 2, 3), "broadcast": (1,)}}
    assert (hang.culprits, hang.absent) == ((1,), {})
    (finding,), _ = recorder_findings((DUMPS / "operations").iterdir(), [])
    assert (finding.subject, finding.action) == ("rank 1", "fix-config")
    assert "train.py" in finding.first_command


def test_rank_that_waits_in_another_group_is_not_the_cause() -> None:
    first, second = collective_hangs(read_dump(path) for path in (DUMPS / "groups").iterdir())
    assert (first.culprits, dict(first.elsewhere)) == ((3,), {2: "2"})
    assert (tuple(second.waiting), second.culprits) == ((2,), ())


GROUPS = {"0": "[0, 1, 2, 3]", "5": "[2, 3]"}
DONE = entry("all_reduce", 1, "completed")


def test_member_without_any_collective_in_the_group_is_absent(tmp_path: Path) -> None:
    started = entry("all_gather", 1, "started", ("5", "tensor parallel"))
    (hang,) = hangs(tmp_path, [DONE], [DONE], [DONE, started], [DONE], groups=GROUPS)
    assert (hang.group, hang.culprits, dict(hang.absent)) == ("5 tensor parallel", (3,), {3: None})


def test_sizes_dtypes_and_gpus_that_have_not_started_are_compared(tmp_path: Path) -> None:
    waiting, other = entry("all_reduce", 2, "started"), entry("all_reduce", 2, "scheduled", input_sizes=[[5]])
    (hang,) = hangs(tmp_path, [waiting], [waiting], [waiting], [other], groups=GROUPS)
    assert hang.differences == {"input sizes": {"[[4, 2]]": (0, 1, 2), "[[5]]": (3,)}}
    assert hang.culprits == (3,)
    other = entry("all_reduce", 2, "started", input_dtypes=["Float"])
    (hang,) = hangs(tmp_path, [waiting], [waiting], [waiting], [other], groups=GROUPS)
    assert hang.differences == {"dtype": {"BFloat16": (0, 1, 2), "Float": (3,)}}
    (hang,) = hangs(tmp_path, [waiting], [waiting], [waiting], [entry("all_reduce", 2, "scheduled")], groups=GROUPS)
    assert (hang.differences, hang.not_started, hang.culprits) == ({}, (3,), (3,))
    scatter = [[entry("scatter", 2, "started", input_sizes=[[4, 2]] * (4 if rank == 0 else 0))] for rank in range(4)]
    (hang,) = hangs(tmp_path, *scatter, groups=GROUPS)
    assert (hang.differences, hang.culprits) == ({}, ())  # only the root has inputs
    assert hangs(tmp_path, [DONE], [DONE], [DONE], [DONE], groups=GROUPS) == []


def test_other_end_of_a_transfer_is_named(tmp_path: Path) -> None:
    send, recv = entry("send 0->1", 1, "started", ("5", "")), entry("recv 1<-0", 1, "scheduled", ("5", ""))
    (hang,) = hangs(tmp_path, [], [], [send], [DONE], groups=GROUPS)
    assert (hang.name, hang.culprits) == ("send 0->1", (3,))
    (hang,) = hangs(tmp_path, [], [], [], [recv], groups=GROUPS)
    assert (hang.name, hang.culprits) == ("recv 1<-0", (2,))
    assert hangs(tmp_path, [], [], [send], [recv], groups=GROUPS) == []


def test_rank_that_is_hundreds_of_collectives_ahead_is_kept_small(tmp_path: Path) -> None:
    """The root of a broadcast goes on while the others wait in it."""
    ahead = [entry("broadcast", seq, "completed" if seq < 9 else "scheduled") for seq in range(1, 2000)]
    (hang,) = hangs(tmp_path, ahead, [*ahead[:7], entry("broadcast", 8, "started")], groups={"0": "[0, 1, 2]"})
    assert (hang.seq, tuple(hang.waiting), hang.without_dump) == (8, (1,), (2,))
    assert len(read_dump(tmp_path / "nccl_trace_rank_0").groups["0 default_pg"].collectives) < 50


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


@pytest.mark.parametrize("field", list(entry("all_reduce", 1, "started")))
def test_field_of_any_type_is_no_crash(field: str, tmp_path: Path) -> None:
    values: tuple[Any, ...] = (None, "x" * 1000, 2**70, [[[]]], {"a": 1}, True, [None], (1, 2), 1.5)
    for value in values:
        hanging: list[CollectiveHang] = hangs(tmp_path, [{**entry("all_reduce", 1, "started"), field: value}])
        recorder_findings(tmp_path.iterdir(), [])
        assert len(hanging) <= 1
