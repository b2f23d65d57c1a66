"""The child process of the evaluation."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import DiskFullError
from seatrial.train import child, hf
from seatrial.train.train_config import TrainConfig


def task(out: Path) -> dict[str, Any]:
    config, overrides = "tiny/function-calling-qwen2-7b", ["evaluation.cases=3"]
    return {"evaluate": True, "config": config, "overrides": overrides, "out": str(out)}


def test_evaluation_of_the_task_is_the_result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hf, "evaluate", lambda config, out: {"cases": config.evaluation.cases, "out": out})
    assert child.run(task(tmp_path)) == {"cases": 3, "out": tmp_path}


def test_full_disk_is_not_a_failure_of_the_evaluation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(config: TrainConfig, out: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(hf, "evaluate", full)
    with pytest.raises(DiskFullError):
        child.run(task(tmp_path))
