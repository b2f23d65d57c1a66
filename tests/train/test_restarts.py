"""Restarts of a training by Slurm, without Slurm; on a cluster: tests/launch/test_requeue_on_rig.py."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from seatrial.model import UsageError
from seatrial.train import command, progress, restarts, train_config
from seatrial.train.step_speed import STEPS_FILE
from seatrial.train.train_config import TrainConfig

REQUEUE = ("checkpoint.requeue=true", "checkpoint.every=2")


@pytest.fixture(autouse=True)
def no_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(restarts.COUNT_VARIABLE, raising=False)
    monkeypatch.setenv("SLURM_JOB_ID", "7")


def config(*overrides: str) -> TrainConfig:
    return train_config.load("tiny/throughput", overrides)


def test_requeue_without_checkpoints_is_refused() -> None:
    with pytest.raises(UsageError, match=r"requeue requires checkpoint\.every: without checkpoints a restarted job"):
        config("checkpoint.requeue=true", "checkpoint.every=0")


def test_only_a_restarted_job_resumes_and_not_forever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    settings = config(*REQUEUE, "checkpoint.max_restarts=2")
    with pytest.raises(UsageError, match=r"checkpoint\.requeue requires --out"):
        restarts.config_with_resume(settings, None)
    assert restarts.config_with_resume(settings, tmp_path) == settings
    for number in ("1", "2"):
        monkeypatch.setenv(restarts.COUNT_VARIABLE, number)
        assert restarts.config_with_resume(settings, tmp_path).checkpoint.resume
    assert not restarts.config_with_resume(config(), None).checkpoint.resume
    monkeypatch.setenv(restarts.COUNT_VARIABLE, "3")
    with pytest.raises(UsageError, match=r"restart 3 of job 7: checkpoint\.max_restarts is 2\. .* scontrol show job 7"):
        command.run(settings, tmp_path)


def test_steps_of_another_job_are_not_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first start of this job failed in the prolog, and --out has an unfinished training."""
    (tmp_path / STEPS_FILE).write_text('{"step": 1}\n')
    monkeypatch.setenv(restarts.COUNT_VARIABLE, "1")
    with pytest.raises(UsageError, match="was not written by job 7"):
        restarts.config_with_resume(config(*REQUEUE), tmp_path)
    assert restarts.config_with_resume(config(*REQUEUE, "checkpoint.resume=true"), tmp_path).checkpoint.resume
    restarts.record_start(config(*REQUEUE), tmp_path, 0)
    assert restarts.config_with_resume(config(*REQUEUE), tmp_path).checkpoint.resume


def test_each_start_is_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLURM_JOB_NODELIST", "n[1-2]")
    restarts.record_start(config(), tmp_path, 0)
    assert list(tmp_path.iterdir()) == []
    restarts.record_start(config(*REQUEUE), tmp_path, 0)
    assert capsys.readouterr().err == ""
    monkeypatch.setenv(restarts.COUNT_VARIABLE, "1")
    restarts.record_start(config(*REQUEUE), tmp_path, 4)
    assert capsys.readouterr().err == "restart 1 of at most 3, on n[1-2]: continuing after step 4\n"
    starts = [json.loads(line) for line in (tmp_path / restarts.STARTS_FILE).read_text().splitlines()]
    assert [(start["restart"], start["completed_steps"], start["nodes"]) for start in starts] == [
        (0, 0, "n[1-2]"),
        (1, 4, "n[1-2]"),
    ]


def test_a_training_that_an_earlier_start_completed_is_not_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    settings, metrics = config(*REQUEUE), tmp_path / "metrics.json"
    metrics.write_text('{"out": "here"}')
    assert restarts.earlier_metrics(settings, tmp_path) is None
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    restarts.record_start(settings, tmp_path, 0)
    monkeypatch.setenv(restarts.COUNT_VARIABLE, "1")
    monkeypatch.setenv("SLURM_JOB_ID", "7")  # its first start failed, such as in the prolog
    with pytest.raises(UsageError, match="was not written by job 7"):
        command.run(settings, tmp_path)
    monkeypatch.setenv("SLURM_JOB_ID", "6")
    assert command.run(settings, tmp_path) == {"out": "here"}
    assert "an earlier start of this job completed the training" in capsys.readouterr().err
    metrics.write_text("{")
    with pytest.raises(UsageError, match=r"cannot read .*metrics\.json of an earlier start"):
        restarts.earlier_metrics(settings, tmp_path)


def test_a_restarted_job_without_requeue_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / STEPS_FILE).touch()
    with pytest.raises(UsageError, match=r"set another --out, or resume it"):
        progress.create_run_folder(config(), tmp_path)
    monkeypatch.setenv(restarts.COUNT_VARIABLE, "1")
    with pytest.raises(UsageError, match=r"Slurm restarted this job, .* --set checkpoint\.requeue=true"):
        progress.create_run_folder(config(), tmp_path)


def test_a_restarted_job_waits_for_the_lock_of_the_lost_node(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    answers = iter([False, True])
    monkeypatch.setattr("seatrial.util.journal.lock", lambda *_: next(answers))
    monkeypatch.setattr("time.sleep", lambda _: None)
    monkeypatch.setenv(restarts.COUNT_VARIABLE, "1")
    (tmp_path / STEPS_FILE).touch()
    progress.create_run_folder(config("checkpoint.resume=true"), tmp_path)
    assert next(answers, "used") == "used"
