import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import SeatrialError
from seatrial.train import compare


def record(step: int, **changes: Any) -> compare.StepRecord:
    return {
        "step": step,
        "loss": 5.0,
        "grad_norm": 2.0,
        "trained_tokens": 7,
        "learning_rate": 0.1,
        "seconds": step,
    } | changes


def write_steps(out: Path, *records: compare.StepRecord) -> Path:
    (out / "steps.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    return out


def test_the_largest_difference_and_its_step() -> None:
    run = [record(4), record(5, loss=5.5), record(6, loss=4.9)]
    difference = compare.max_relative_difference(run, [record(step) for step in (4, 5, 6)], "loss")
    assert difference.value == pytest.approx(0.1)
    assert difference.step == 5
    assert compare.max_relative_difference(run, run, "grad_norm").value == 0


def test_one_bit_is_a_difference_but_times_are_ignored() -> None:
    reference = [record(1), record(2), record(3)]
    run = [record(1, seconds=9), record(2, loss=5.000000000000001), record(3, trained_tokens=8)]
    assert compare.differing_steps(run, reference) == [2, 3]
    assert compare.differing_steps(run, reference, "trained_tokens") == [3]


def test_missing_or_repeated_steps_are_an_error(tmp_path: Path) -> None:
    write_steps(tmp_path, *(record(step) for step in (1, 2, 3)))
    assert [record["step"] for record in compare.read_steps(tmp_path, 1, 3)] == [2, 3]
    for records, message in (
        ([record(1), record(3)], "expected one record per step from 2 to 3, found 1"),
        ([record(1), record(2), record(2), record(3)], "expected one record per step from 2 to 3, found 3"),
    ):
        with pytest.raises(SeatrialError, match=message):
            compare.read_steps(write_steps(tmp_path, *records), 1, 3)
    (tmp_path / "steps.jsonl").write_text('{"step": 1')
    with pytest.raises(SeatrialError, match="found 0"):
        compare.read_steps(tmp_path, 0, 1)
