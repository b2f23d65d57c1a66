"""Processes and paths in the title and the first command of a cause."""

from __future__ import annotations

import pytest
from pydantic import JsonValue

from seatrial.checks.cause import Cause
from seatrial.diagnose.cause_data import Details, causes
from seatrial.model import CLUSTER, Measurement, Outcome, Verdict


def cause(identifier: str) -> Cause:
    (row,) = (row for row in causes() if row.id == identifier)
    return row


def details(check: str, subject: str, **facts: JsonValue) -> Details:
    return Details([Measurement(check=check, subject=subject, facts=facts)])


def failed(check: str, subject: str, metric: str) -> list[Verdict]:
    return [Verdict(check, subject, Outcome.FAIL, metric)]


BUSY = failed("gpu.inventory", "n0/gpu1", "foreign_processes")


def test_process_of_the_gpu_is_named_and_is_in_the_command() -> None:
    processes: JsonValue = [{"gpu": gpu, "pid": 1800 + gpu, "name": "python3"} for gpu in (0, 1)]
    known = details("gpu.inventory", "n0", foreign_processes=processes)
    row = cause("foreign_processes")
    assert known.process_names(row, BUSY) == ["python3 (pid 1801)"]
    assert known.command(row, BUSY, "n0/gpu1").endswith("; ps -o pid,user,lstart,args -p 1801")


@pytest.mark.parametrize(
    "processes",
    [None, 7, "x", {}, [3], [{"gpu": 1}], [{"gpu": 1, "pid": "7; rm"}], [{"gpu": 0, "pid": 7, "name": "other"}]],
)
def test_processes_of_other_gpus_and_edited_facts_are_not_named(processes: JsonValue) -> None:
    known, row = details("gpu.inventory", "n0", foreign_processes=processes), cause("foreign_processes")
    assert known.process_names(row, BUSY) == []
    assert known.command(row, BUSY, "n0/gpu1") == row.first_command


def test_processes_of_another_node_are_not_named() -> None:
    processes: JsonValue = [{"gpu": 1, "pid": 7, "name": "x"}]
    assert (
        details("gpu.inventory", "n1", foreign_processes=processes).process_names(cause("foreign_processes"), BUSY)
        == []
    )


@pytest.mark.parametrize(
    ("metric", "facts", "paths"),
    [
        ("write_single./data/my files", {}, "'/data/my files'"),
        ("write_single.run_directory", {"filesystems": {"/runs": "nfs", "bad": 1}}, "/runs"),
        ("write_single.run_directory", {"filesystems": ["/x"]}, "."),
    ],
)
def test_paths_come_from_the_metric_or_the_facts(metric: str, facts: dict[str, JsonValue], paths: str) -> None:
    verdicts = failed("filesystem.speed", CLUSTER, metric)
    command = details("filesystem.shared", "n0", **facts).command(cause("filesystem_slow"), verdicts, CLUSTER)
    assert command.startswith(f"df -hT {paths};")


def test_command_of_a_rank_depends_on_its_device_and_place() -> None:
    row = cause("slow_rank")
    on_gpu, on_cpu = (failed("train.ddp", f"n0/{device}", "rank_slowdown") for device in ("gpu1", "rank1"))
    known = details("train.ddp", "n0")
    assert "--id={gpu}" in known.command(row, on_gpu, "n0/gpu1")
    assert known.command(row, on_gpu, "n0").startswith("nvidia-smi -q")
    assert known.command(row, on_cpu, "n0/rank1") == row.rank_command
