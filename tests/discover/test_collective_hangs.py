"""Comparison of dumps: real ones over gloo, and ones after the format of torch's writer for NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.diagnose.flight_recorder import recorder_findings
from seatrial.discover.collective_hangs import collective_hangs
from seatrial.discover.flight_recorder import is_dump, read_dump
from tests.discover.recorder_dumps import DONE, DUMPS, GROUPS, entry, hangs


@pytest.mark.parametrize("form", ["comm_lib_trace_rank_*", "json_trace_rank_*"])
def test_absent_rank_is_named(form: str) -> None:
    paths = list((DUMPS / "absent").glob(form))
    assert all(is_dump(path) for path in paths)
    (hang,) = collective_hangs(read_dump(path) for path in paths)
    last = hang.absent[2]
    assert (hang.ranks_at_fault, hang.seq, hang.name, hang.without_dump) == ((2,), 3, "all_reduce", ())
    assert set(hang.waiting) == ({0, 1, 3} if "comm" in form else {0, 1})
    assert last is not None
    assert (last.name, last.seq, last.state) == ("barrier", 2, "completed")
    if "comm" in form:  # JSON has no stacks
        assert last.frame is not None
        assert hang.waiting[0].frame is not None
        assert (last.frame.function, hang.waiting[0].frame.function) == ("main", "reduce_gradients")
    assert hang.waiting[0].input_sizes == ((1000,),)


def test_missing_dump_of_a_rank_is_reported() -> None:
    paths = [DUMPS / "absent" / f"comm_lib_trace_rank_{rank}" for rank in (0, 1, 2)]
    (hang,) = collective_hangs((read_dump(path) for path in paths), world_size=4)
    assert (hang.without_dump, hang.ranks_at_fault) == ((3,), (2,))
    (only_missing,) = collective_hangs((read_dump(path) for path in paths[:2]), world_size=3)
    assert (only_missing.ranks_at_fault, only_missing.without_dump, only_missing.members_recorded) == ((2,), (2,), True)


def test_unrecorded_members_do_not_count_as_arrived() -> None:
    (hang,) = collective_hangs(read_dump(path) for path in (DUMPS / "sizes").iterdir())
    assert (hang.ranks_at_fault, hang.members_recorded) == ((), False)
    (finding,), _ = recorder_findings((DUMPS / "sizes").iterdir(), [])
    assert finding.confidence == "low"


def test_other_operation_is_named() -> None:
    (hang,) = collective_hangs(read_dump(path) for path in (DUMPS / "operations").iterdir())
    assert hang.differences == {"operation": {"all_reduce": (0, 2, 3), "broadcast": (1,)}}
    assert (hang.ranks_at_fault, hang.absent) == ((1,), {})
    (finding,), _ = recorder_findings((DUMPS / "operations").iterdir(), [])
    assert (finding.subject, finding.action) == ("rank 1", "fix-config")
    assert "train.py" in finding.first_command


def test_rank_that_waits_in_another_group_is_not_the_cause() -> None:
    first, second = collective_hangs(read_dump(path) for path in (DUMPS / "groups").iterdir())
    assert (first.ranks_at_fault, dict(first.elsewhere)) == ((3,), {2: "2"})
    assert (tuple(second.waiting), second.ranks_at_fault) == ((2,), ())


def test_member_without_any_collective_in_the_group_is_absent(tmp_path: Path) -> None:
    started = entry("all_gather", 1, "started", ("5", "tensor parallel"))
    (hang,) = hangs(tmp_path, [DONE], [DONE], [DONE, started], [DONE], groups=GROUPS)
    assert (hang.group, hang.ranks_at_fault, dict(hang.absent)) == ("5 tensor parallel", (3,), {3: None})


def test_sizes_dtypes_and_gpus_that_have_not_started_are_compared(tmp_path: Path) -> None:
    waiting, other = entry("all_reduce", 2, "started"), entry("all_reduce", 2, "scheduled", input_sizes=[[5]])
    (hang,) = hangs(tmp_path, [waiting], [waiting], [waiting], [other], groups=GROUPS)
    assert hang.differences == {"input sizes": {"[[4, 2]]": (0, 1, 2), "[[5]]": (3,)}}
    assert hang.ranks_at_fault == (3,)
    other = entry("all_reduce", 2, "started", input_dtypes=["Float"])
    (hang,) = hangs(tmp_path, [waiting], [waiting], [waiting], [other], groups=GROUPS)
    assert hang.differences == {"dtype": {"BFloat16": (0, 1, 2), "Float": (3,)}}
    (hang,) = hangs(tmp_path, [waiting], [waiting], [waiting], [entry("all_reduce", 2, "scheduled")], groups=GROUPS)
    assert (hang.differences, hang.not_started, hang.ranks_at_fault) == ({}, (3,), (3,))
    scatter = [[entry("scatter", 2, "started", input_sizes=[[4, 2]] * (4 if rank == 0 else 0))] for rank in range(4)]
    (hang,) = hangs(tmp_path, *scatter, groups=GROUPS)
    assert (hang.differences, hang.ranks_at_fault) == ({}, ())  # only the root has inputs
    assert hangs(tmp_path, [DONE], [DONE], [DONE], [DONE], groups=GROUPS) == []


def test_other_end_of_a_transfer_is_named(tmp_path: Path) -> None:
    send, recv = entry("send 0->1", 1, "started", ("5", "")), entry("recv 1<-0", 1, "scheduled", ("5", ""))
    (hang,) = hangs(tmp_path, [], [], [send], [DONE], groups=GROUPS)
    assert (hang.name, hang.ranks_at_fault) == ("send 0->1", (3,))
    (hang,) = hangs(tmp_path, [], [], [], [recv], groups=GROUPS)
    assert (hang.name, hang.ranks_at_fault) == ("recv 1<-0", (2,))
    assert hangs(tmp_path, [], [], [send], [recv], groups=GROUPS) == []
