"""Progress output of a training run."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from seatrial.model import UsageError
from seatrial.train import progress
from seatrial.train.parallel import World
from seatrial.train.progress import StartupPhases, Step, StepLog
from tests.train.ranks import config

SINGLE_RANK = World(0, 1, torch.device("cpu"), "n0")


def step(number: int, **changes: Any) -> Step:
    fields = {"loss": 2.0, "grad_norm": None, "learning_rate": None, "epoch": None, "seconds": 0.5}
    return Step(step=number, tokens=64, trained_tokens=None, **{**fields, **changes})


def test_progress_lines_are_printed_per_interval_and_for_the_last_step(
    tmp_path: Path, capsys: Any, monkeypatch: Any
) -> None:
    clock = iter([0.0, 0.0, 3.0, 11.0, 13.0, 14.0])
    monkeypatch.setattr("seatrial.train.progress.time.monotonic", lambda: next(clock))
    log = StepLog(config(max_steps=4, log_every_s=10), SINGLE_RANK, tmp_path, completed_steps=0)
    for number in range(1, 5):
        log.write(step(number, grad_norm=0.25) if number == 2 else step(number))
    log.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 2/4  loss 2.0000  grad norm 0.250  128 tok/s/GPU  16 s left",  # 8 s since the first step, two steps left
        "step 4/4  loss 2.0000  128 tok/s/GPU  0 s left",
    ]
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_a_terminal_line_is_overwritten(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    clock = iter([0.0, 0.0, 2.0, 2.5, 4.0])
    monkeypatch.setattr("seatrial.train.progress.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("seatrial.train.progress.sys.stderr.isatty", lambda: True)
    log = StepLog(config(max_steps=3), SINGLE_RANK, tmp_path, completed_steps=0)
    for number in (1, 2, 3):
        log.write(step(number))
    assert capsys.readouterr().err == (
        "\r\033[Kstep 1/3  loss 2.0000  128 tok/s/GPU  1 s left\r\033[Kstep 3/3  loss 2.0000  128 tok/s/GPU  0 s left\n"
    )


def test_of_two_runs_started_together_one_trains(tmp_path: Path) -> None:
    for _ in range(2):
        progress.create_run_folder(config(), tmp_path)  # before the first step
    StepLog(config(), SINGLE_RANK, tmp_path, completed_steps=0).write(step(1))
    with pytest.raises(UsageError, match=f"{tmp_path} contains a run"):
        StepLog(config(), SINGLE_RANK, tmp_path, completed_steps=0)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1


def test_a_folder_in_use_cannot_be_resumed(tmp_path: Path) -> None:
    """For example a requeued Slurm job and a run started manually."""
    first = StepLog(config(), SINGLE_RANK, tmp_path, completed_steps=0)
    resume = config(checkpoint={"resume": True})
    for start in (progress.create_run_folder, lambda settings, out: StepLog(settings, SINGLE_RANK, out, 0)):
        first.write(step(1))
        with pytest.raises(UsageError, match=f"another training run is writing to {tmp_path}"):
            start(resume, tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2
    first.close()
    StepLog(config(checkpoint={"resume": True}), SINGLE_RANK, tmp_path, completed_steps=1).close()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1


def test_a_resumed_run_keeps_the_lines_of_its_steps(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')  # killed after the save of step 2
    log = StepLog(config(checkpoint={"resume": True}), SINGLE_RANK, tmp_path, completed_steps=2)
    log.write(step(3))
    log.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line.get("loss") for line in lines] == [None, None, 2.0]
    rank_1 = World(1, 2, torch.device("cpu"), "n1")
    StepLog(config(), rank_1, tmp_path / "not there", completed_steps=0)  # only rank 0 writes


def test_phases_end_with_the_first_step(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([12.0, 15.0, 19.0, 20.0])
    monkeypatch.setattr("seatrial.train.progress.time.time", lambda: next(clock))
    phases = StartupPhases(10.0, "imports")
    phases.end_phase("build")
    phases.end_first_step()
    phases.end_first_step()
    assert phases.seconds == {"imports": 2.0, "build": 3.0, "first_step": 4.0, "time_to_first_step": 9.0}
    assert phases.since("build") == 5.0


def test_tensorboard_curves_have_the_names_of_the_hf_trainer(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    log = StepLog(config(tensorboard=True), SINGLE_RANK, tmp_path, completed_steps=0)
    for number in (1, 2):
        log.write(step(number, loss=3.0 - number, grad_norm=0.5, learning_rate=0.125, epoch=number / 2))
    log.close()
    events_read = events.EventAccumulator(str(tmp_path / "tensorboard"))
    events_read.Reload()
    curves = {
        name: [(event.step, event.value) for event in events_read.Scalars(name)]
        for name in events_read.Tags()["scalars"]
    }
    assert curves == {
        "train/loss": [(1, 2.0), (2, 1.0)],
        "train/grad_norm": [(1, 0.5), (2, 0.5)],
        "train/learning_rate": [(1, 0.125), (2, 0.125)],
        "train/epoch": [(1, 0.5), (2, 1.0)],
        "train/tokens_per_second_per_gpu": [(1, 128.0), (2, 128.0)],
    }


def test_missing_tensorboard_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        progress.require_tensorboard(config(tensorboard=True))
    progress.require_tensorboard(config())
