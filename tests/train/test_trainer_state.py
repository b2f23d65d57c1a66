from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import SeatrialError
from seatrial.train import trainer_state
from tests.paths import FIXTURES

# 12 steps of configs/tiny/sft-smollm-135m.yaml, written by transformers 5.19
RECORDED = FIXTURES / "transformers" / "trainer_state.json"


def written(folder: Path, **changes: Any) -> Path:
    path = folder / "trainer_state.json"
    path.write_text(json.dumps({**json.loads(RECORDED.read_text()), **changes}))
    return path


def test_a_file_of_transformers_is_read() -> None:
    state = trainer_state.read(RECORDED)
    assert [step.step for step in state.steps] == list(range(1, 13))
    assert all(step.finite and step.learning_rate is not None and step.epoch for step in state.steps)
    assert state.summary
    assert state.summary.step == state.global_step == state.max_steps == 12
    assert state.first_last_third_loss
    first, last = state.first_last_third_loss
    losses = [step.loss for step in state.steps]
    assert first == (sorted(losses[:4])[1] + sorted(losses[:4])[2]) / 2
    assert first > last


def test_nan_and_infinity_are_not_finite(tmp_path: Path) -> None:
    history = [{"step": step, "loss": 3.0 - step, "grad_norm": 1.0} for step in range(1, 5)]
    history[2]["grad_norm"] = float("nan")
    history[3]["loss"] = float("inf")
    state = trainer_state.read(written(tmp_path, log_history=history))
    assert [step.finite for step in state.steps] == [True, True, False, False]
    assert state.first_last_third_loss == (2.0, 0.0)
    assert state.summary is None


def test_two_steps_have_no_thirds(tmp_path: Path) -> None:
    history = [{"step": step, "loss": 1.0} for step in (1, 2)]
    assert trainer_state.read(written(tmp_path, log_history=history)).first_last_third_loss is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"log_history": None}, "log_history"),
        ({"log_history": [1, 2]}, r"log_history\.0"),
        ({"log_history": [{"step": 1, "loss": "3.1"}]}, r"steps\.0\.loss"),
        ({"log_history": [{"loss": 3.1}]}, r"steps\.0\.step"),
        ({"log_history": [{"step": -1, "loss": 3.1}]}, r"steps\.0\.step"),
        ({"log_history": [{"step": 2, "loss": 3.1}, {"step": 1, "loss": 3.0}]}, "not ascending"),
        ({"log_history": [{"step": 1, "loss": 3.1}, {"step": 1, "loss": 3.0}]}, "not ascending"),
        ({"log_history": [{"step": 99, "loss": 3.1}]}, "not ascending up to global_step"),
        ({"log_history": [{"step": 1, "train_runtime": float("nan"), "train_loss": 1.0}]}, "train_runtime"),
        ({"global_step": "twelve"}, "global_step"),
        ({"global_step": True}, "global_step"),
    ],
)
def test_errors_name_the_key_and_the_file(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    with pytest.raises(SeatrialError, match=reason) as raised:
        trainer_state.read(written(tmp_path, **changes))
    assert str(tmp_path) in str(raised.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "Invalid JSON"),
        (RECORDED.read_text()[:900], "Invalid JSON"),
        ("[" * 100_000, "Invalid JSON"),
        ("[]", "the document"),
        ("\udcff", "Invalid JSON"),
    ],
    ids=["empty", "cut off", "deep", "list", "bytes"],
)
def test_invalid_files_are_errors(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "trainer_state.json"
    path.write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(SeatrialError, match=reason):
        trainer_state.read(path)


def test_missing_and_too_large_files_are_errors(tmp_path: Path) -> None:
    with pytest.raises(SeatrialError, match="No such file"):
        trainer_state.read(tmp_path / "trainer_state.json")
    path = tmp_path / "trainer_state.json"
    with path.open("wb") as file:
        file.truncate(trainer_state.MAX_BYTES + 1)
    with pytest.raises(SeatrialError, match=str(trainer_state.MAX_BYTES)):
        trainer_state.read(path)
