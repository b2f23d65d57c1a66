"""The speed of a training from the end of its steps.jsonl, as `seatrial train run tiny/throughput` wrote it."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest

from seatrial.model import SeatrialError
from seatrial.train.step_speed import read_steps, training_speed

STEP_1 = (
    '{"step": 1, "loss": 5.5629730224609375, "grad_norm": 1.3660447597503662, "learning_rate": 0.003, '
    '"epoch": 0.0009765625, "tokens": 256, "trained_tokens": 256, "seconds": 8.302800063000177, '
    '"forward_s": 3.4617008439963683, "compute_s": 0.20032560200519, "data_wait_s": 0.0004878459916639599}\n'
)


def steps(first: int, last: int, seconds: float = 0.5) -> str:
    lines = ({"step": step, "loss": 6.0 / step, "tokens": 256, "seconds": seconds} for step in range(first, last + 1))
    return "".join(json.dumps(line) + "\n" for line in lines)


def test_incomplete_line_is_ignored(tmp_path: Path) -> None:
    assert read_steps(tmp_path) == []
    (tmp_path / "steps.jsonl").write_text(steps(1, 399) + '{"step": 400, "lo')
    assert [step["step"] for step in read_steps(tmp_path)] == list(range(1, 400))


@pytest.mark.parametrize("line", [b'{"step": 1, "lo\n', b"[1, 2]\n", b'{"loss": 1}\n', b'{"step": "1"}\n', b"\xff\0\n"])
def test_invalid_step_line_is_an_error_with_the_file_name(line: bytes, tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_bytes(b'{"step": 1, "loss": 2.0}\n' + line)
    with pytest.raises(SeatrialError, match=r"steps\.jsonl"):
        read_steps(tmp_path)


def test_rates_are_of_the_last_twenty_steps(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(STEP_1 + steps(2, 20, seconds=9.0) + steps(21, 40))
    (tmp_path / "config.json").write_text('{"max_steps": 2000}')
    speed = training_speed(tmp_path)
    assert speed
    assert (speed.step, speed.max_steps, speed.steps) == (40, 2000, 20)
    assert (speed.steps_per_second, speed.tokens_per_second) == (2.0, 512.0)
    assert speed.loss == 6.0 / 40
    assert speed.age_s < 60


def test_the_first_step_counts_only_if_there_is_no_other(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text(STEP_1)
    first = training_speed(tmp_path)
    assert first
    assert first.steps_per_second == pytest.approx(1 / 8.3028, rel=1e-4)
    (tmp_path / "steps.jsonl").write_text(STEP_1 + steps(2, 2))
    second = training_speed(tmp_path)
    assert second
    assert (second.steps_per_second, second.steps, second.max_steps) == (2.0, 1, None)


def test_no_step_yet(tmp_path: Path) -> None:
    assert training_speed(tmp_path) is None
    (tmp_path / "steps.jsonl").write_text(STEP_1[:100])
    assert training_speed(tmp_path) is None


def test_an_incomplete_or_damaged_line_does_not_count(tmp_path: Path) -> None:
    damaged = '{"step": "9"}\n[1]\nnull\n{"step": 3, "seconds": 0}\n{"step": 3, "seconds": 1e999}\n\x00\x1b[2J\n'
    (tmp_path / "steps.jsonl").write_text(steps(2, 3) + damaged + STEP_1[:100])
    speed = training_speed(tmp_path)
    assert speed
    assert (speed.step, speed.steps) == (3, 2)


def test_lines_without_any_step_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text("\x00\n[1]\n")
    with pytest.raises(ValueError, match=r"steps.jsonl: none of its last 2 lines is a step: '\[1\]'"):
        training_speed(tmp_path)


def test_values_of_another_stack_may_be_missing(tmp_path: Path) -> None:
    huge = "9" * 400
    (tmp_path / "steps.jsonl").write_text(f'{{"step": 2, "loss": {huge}, "tokens": {huge}, "seconds": 2}}\n')
    speed = training_speed(tmp_path)
    assert speed
    assert (speed.loss, speed.tokens_per_second, speed.steps_per_second) == (None, None, 0.5)


def test_a_loss_that_is_not_a_number_is_shown(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 2, "loss": NaN, "tokens": 1, "seconds": 1.0}\n')
    speed = training_speed(tmp_path)
    assert speed
    assert speed.loss is not None
    assert math.isnan(speed.loss)


def test_only_the_end_of_a_long_file_is_read(tmp_path: Path) -> None:
    with (tmp_path / "steps.jsonl").open("w") as file:
        file.truncate(2**33)  # sparse
        file.seek(2**33)
        file.write("\n" + steps(2, 9))
    speed = training_speed(tmp_path)
    assert speed
    assert (speed.step, speed.steps) == (9, 8)
