from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from seatrial.checks.training.oumi import CHECK
from seatrial.discover import gpu
from seatrial.discover.gpu import GpuFacts
from seatrial.model import Measurement, Outcome
from tests.fakes.slurm import judge, run_check
from tests.paths import ROOT

OUMI = (sys.executable, str(ROOT / "tests" / "fakes" / "oumi.py"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read_with_timeout", lambda: GpuFacts(nvml_unavailable="none here"))


def trained(folder: Path, fault: str = "", **options: Any) -> Measurement:
    command = ["env", f"OUMI_FAULT={fault}", *OUMI]
    return run_check(CHECK, folder, command=command, **options)


def outcomes(measured: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge(CHECK, measured)}


def test_without_a_command_it_does_not_apply(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path)
    assert measured.skipped
    assert "options.command=[/opt/oumi/bin/oumi]" in measured.skipped


def test_a_command_that_is_not_there_is_an_error(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path, command=["no-such-oumi"])
    assert measured.error
    assert "no executable no-such-oumi on" in measured.error


@pytest.mark.training
def test_a_training_is_judged_by_what_it_left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # as our launchers set it; the stand-in refuses to be one rank of many
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    measured = trained(tmp_path)
    assert measured.error is None
    assert set(outcomes(measured).values()) == {Outcome.PASS}
    values = {metric.name: metric.value for metric in measured.metrics}
    assert set(values) == set(CHECK.metrics)
    assert (values["steps_logged"], values["checkpoints"]) == (12, 1)
    assert measured.facts["oumi"] == "0.4.2"
    assert (measured.facts["weights"], measured.facts["data"]) == ("random", "generated")
    assert [len(series.x) for series in measured.series] == [12]
    given = yaml.safe_load((tmp_path / measured.artifacts[0].path).read_text())
    assert [Path(one.path).name for one in measured.artifacts] == ["oumi.yaml", "oumi.log", "trainer_state.json"]
    assert given["training"]["trainer_type"] == "TRL_SFT"


@pytest.mark.parametrize(
    ("fault", "metric"),
    [("exit", "exit_code"), ("flat", "loss_drop"), ("nan", "nonfinite_steps"), ("no-weights", "checkpoints")],
)
def test_what_is_wrong_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, metric: str) -> None:
    monkeypatch.setattr("seatrial.train.hf.generate_text", lambda _folder: "ahoy")
    found = outcomes(trained(tmp_path, fault))
    assert found[metric] is Outcome.FAIL
    assert found.get("train_runtime", Outcome.PASS) is Outcome.PASS


@pytest.mark.parametrize(("fault", "reason"), [("cut", "not all of it"), ("no-state", "cannot read")])
def test_a_record_that_cannot_be_read_is_an_error(tmp_path: Path, fault: str, reason: str) -> None:
    measured = trained(tmp_path, fault)
    assert measured.error
    assert reason in measured.error
    assert Outcome.PASS not in {outcome for metric, outcome in outcomes(measured).items() if metric != "exit_code"}


def test_a_full_disk_is_an_error_and_no_exit_code(tmp_path: Path) -> None:
    measured = trained(tmp_path, "full")
    assert measured.error
    assert re.search(r"login: Oumi found no room on disk\. On .* of it free", measured.error)
    assert "; end of its log: Oumi version" in measured.error
    assert "exit_code" not in {metric.name for metric in measured.metrics}


@pytest.mark.training
def test_it_is_ended_in_time_and_its_last_words_are_told(tmp_path: Path) -> None:
    measured = trained(tmp_path, "hang", train_limit_s=3)
    assert measured.error
    assert "login: Oumi did not end within 3 s; end of its log: Oumi version: 0.4.2" in measured.error
