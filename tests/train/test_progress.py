"""What is said of a run while it goes on."""

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

ALONE = World(0, 1, torch.device("cpu"), "n0")


def step(number: int, **known: Any) -> Step:
    fields = {"loss": 2.0, "grad_norm": None, "learning_rate": None, "epoch": None, "seconds": 0.5}
    return Step(step=number, tokens=64, trained_tokens=None, **{**fields, **known})


def test_a_person_gets_a_line_an_interval_and_the_last(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    clock = iter([0.0, 3.0, 11.0, 13.0, 14.0])
    monkeypatch.setattr("seatrial.train.progress.time.monotonic", lambda: next(clock))
    said = StepLog(config(max_steps=4, log_every_s=10), ALONE, tmp_path, done=0)
    for number in range(1, 5):
        said.write(step(number, grad_norm=0.25) if number == 2 else step(number))
    said.close()
    assert capsys.readouterr().err.splitlines() == [
        "step 2/4  loss 2.0000  grad norm 0.250  128 tok/s/GPU  16 s left",  # 8 s since the first, and two to go
        "step 4/4  loss 2.0000  128 tok/s/GPU  0 s left",
    ]
    assert [json.loads(line)["step"] for line in (tmp_path / "steps.jsonl").read_text().splitlines()] == [1, 2, 3, 4]


def test_on_a_terminal_one_line_is_renewed(tmp_path: Path, capsys: Any, monkeypatch: Any) -> None:
    clock = iter([0.0, 2.0, 2.5, 4.0])
    monkeypatch.setattr("seatrial.train.progress.time.monotonic", lambda: next(clock))
    monkeypatch.setattr("seatrial.train.progress.sys.stderr.isatty", lambda: True)
    said = StepLog(config(max_steps=3), ALONE, tmp_path, done=0)
    for number in (1, 2, 3):
        said.write(step(number))
    assert capsys.readouterr().err == (
        "\r\033[Kstep 1/3  loss 2.0000  128 tok/s/GPU  1 s left\r\033[Kstep 3/3  loss 2.0000  128 tok/s/GPU  0 s left\n"
    )


def test_of_two_runs_that_were_started_at_once_one_alone_trains(tmp_path: Path) -> None:
    for _ in range(2):
        progress.create_run_folder(config(), tmp_path)  # neither has taken a step
    StepLog(config(), ALONE, tmp_path, done=0).write(step(1))
    with pytest.raises(UsageError, match="holds a run: name another --out"):
        StepLog(config(), ALONE, tmp_path, done=0)
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1


def test_of_two_runs_that_go_on_in_one_folder_the_second_leaves_the_first_alone(tmp_path: Path) -> None:
    """A job that Slurm has put back into its queue, and one that somebody started meanwhile by hand."""
    first = StepLog(config(), ALONE, tmp_path, done=0)
    resume = config(checkpoint={"resume": True})
    for begin in (progress.create_run_folder, lambda settings, out: StepLog(settings, ALONE, out, done=0)):
        first.write(step(1))
        with pytest.raises(UsageError, match=f"another training is at work in {tmp_path}: end it first"):
            begin(resume, tmp_path)
    assert not (tmp_path / "config.json").exists()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 2
    first.close()
    StepLog(config(checkpoint={"resume": True}), ALONE, tmp_path, done=1).close()
    assert len((tmp_path / "steps.jsonl").read_text().splitlines()) == 1


def test_a_run_that_is_resumed_keeps_the_lines_of_its_steps(tmp_path: Path) -> None:
    (tmp_path / "steps.jsonl").write_text('{"step": 1}\n{"step": 2}\n{"step": 3}\n')  # killed behind a save of step 2
    said = StepLog(config(checkpoint={"resume": True}), ALONE, tmp_path, done=2)
    said.write(step(3))
    said.close()
    lines = [json.loads(line) for line in (tmp_path / "steps.jsonl").read_text().splitlines()]
    assert [line.get("loss") for line in lines] == [None, None, 2.0]
    StepLog(config(), World(1, 2, torch.device("cpu"), "n1"), tmp_path / "not there", done=0)  # the first rank's work


def test_phases_are_of_the_first_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter([12.0, 15.0, 19.0, 20.0])
    monkeypatch.setattr("seatrial.train.progress.time.time", lambda: next(clock))
    phases = StartupPhases(10.0, "imports")
    phases.end_phase("build")
    phases.end_first_step()
    phases.end_first_step()
    assert phases.seconds == {"imports": 2.0, "build": 3.0, "first_step": 4.0, "time_to_first_step": 9.0}
    assert phases.since("build") == 5.0


def test_curves_for_tensorboard_have_the_trainers_names(tmp_path: Path) -> None:
    events = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    said = StepLog(config(tensorboard=True), ALONE, tmp_path, done=0)
    for number in (1, 2):
        said.write(step(number, loss=3.0 - number, grad_norm=0.5, learning_rate=0.125, epoch=number / 2))
    said.close()
    found = events.EventAccumulator(str(tmp_path / "tensorboard"))
    found.Reload()
    curves = {name: [(one.step, one.value) for one in found.Scalars(name)] for name in found.Tags()["scalars"]}
    assert curves == {
        "train/loss": [(1, 2.0), (2, 1.0)],
        "train/grad_norm": [(1, 0.5), (2, 0.5)],
        "train/learning_rate": [(1, 0.125), (2, 0.125)],
        "train/epoch": [(1, 0.5), (2, 1.0)],
        "train/tokens_per_second_per_gpu": [(1, 128.0), (2, 128.0)],
    }


def test_without_tensorboard_nothing_is_trained(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(UsageError, match="pip install tensorboard"):
        progress.require_tensorboard(config(tensorboard=True))
    progress.require_tensorboard(config())
