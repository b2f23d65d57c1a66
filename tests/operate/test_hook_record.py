"""The record of a hook: one line, also when the disk is full or a second hook writes."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from seatrial.operate.hook_exit_codes import Result
from seatrial.operate.hook_record import Problem, Record, append, reason_text

PROBLEM = Problem(
    check="gpu.inventory", subject="n1/gpu3", metric="repair_pending", text="repair_pending is yes", fix=""
)


def record(run_id: str = "12ab", failures: tuple[Problem, ...] = (PROBLEM,)) -> Record:
    return Record(
        run_id=run_id,
        time=1.5,
        node="n1",
        kind="prolog",
        caller="slurm",
        job="7",
        result=Result.FAILED,
        exit_code=1,
        reason=reason_text(run_id, failures, {}),
        seconds=1.0,
        measured={"gpu.inventory": 0.2},
        not_measured={"host.inventory": "no result within 6.0 s"},
        not_judged={"n1/gpu0": "used by job 3"},
        failures=failures,
        warnings=(),
    )


def test_records_are_appended_one_line_each(tmp_path: Path) -> None:
    path = tmp_path / "log" / "hook.jsonl"
    append(path, record("1"))
    append(path, record("2"))
    lines = path.read_text().splitlines()
    assert [json.loads(line)["run_id"] for line in lines] == ["1", "2"]
    assert Record.model_validate_json(lines[0]) == record("1")


def test_a_full_disk_is_an_error() -> None:
    with pytest.raises(OSError, match=os.strerror(28)):
        append(Path("/dev/full"), record())


def test_a_pipe_does_not_hang(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "hook.jsonl")
    with pytest.raises(OSError, match=os.strerror(6)):
        append(tmp_path / "hook.jsonl", record())


def test_the_reason_names_run_place_and_value_in_one_short_line() -> None:
    assert reason_text("12ab", (PROBLEM,), {}) == "seatrial 12ab: n1/gpu3 repair_pending is yes"
    many = tuple(PROBLEM.model_copy(update={"subject": f"n1/gpu{index}"}) for index in range(8))
    assert reason_text("12ab", many, {}).endswith("n1/gpu2 repair_pending is yes and 5 more")
    long = (PROBLEM.model_copy(update={"text": "x" * 1000}),)
    assert len(reason_text("12ab", long, {})) == 300
    assert reason_text("12ab", (), {"gpu.inventory": "…"}) == "seatrial 12ab: not measured: gpu.inventory"
    assert reason_text("12ab", (), {}) == "seatrial 12ab: passed"


def test_the_text_names_what_was_not_measured_and_not_judged() -> None:
    text = record().text()
    assert "not measured: host.inventory: no result within 6.0 s" in text
    assert "not judged: n1/gpu0: used by job 3" in text
    assert text.startswith("FAILED seatrial 12ab: n1/gpu3")


def test_a_hostile_node_name_stays_in_one_line() -> None:
    problem = Problem(check="a.b", subject="n1\nseatrial 0: passed\x1b[31m", metric="m", text="bad", fix="")
    assert len(reason_text("1", (problem,), {}).splitlines()) == 1
    assert "\x1b" not in reason_text("1", (problem,), {})
