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
from tests.processes import with_enough_time

OUMI = (sys.executable, str(ROOT / "tests" / "fakes" / "oumi.py"))


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "read_with_timeout", lambda: GpuFacts(nvml_unavailable="none here"))


def trained(folder: Path, fault: str = "", **options: Any) -> Measurement:
    command = ["env", f"OUMI_FAULT={fault}", *OUMI]
    return run_check(CHECK, folder, command=command, **options)


def outcomes(measured: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge(CHECK, measured)}


def test_no_command_is_skipped(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path)
    assert measured.skipped
    assert "checks.train.oumi.options.command" in measured.skipped


def test_missing_executable_is_an_error(tmp_path: Path) -> None:
    measured = run_check(CHECK, tmp_path, command=["no-such-oumi"])
    assert measured.error
    assert "no-such-oumi" in measured.error


@pytest.mark.training
def test_training_passes_all_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RANK", "0")  # set by launchers; the fake Oumi fails as one of several ranks
    monkeypatch.setenv("PYTHONPATH", str(ROOT))
    measured = trained(tmp_path)
    assert measured.error is None
    verdicts = outcomes(measured)
    assert verdicts.pop("gpu_memory_growth") is Outcome.SKIP
    assert set(verdicts.values()) == {Outcome.PASS}
    values = {metric.name: metric.value for metric in measured.metrics}
    assert {*values, "gpu_memory_growth"} == set(CHECK.units)
    assert (values["steps_missing"], values["checkpoints"]) == (0, 1)
    assert measured.facts["oumi_version"] == "0.4.2"
    assert (measured.facts["weights"], measured.facts["data"]) == ("random", "generated")
    assert [len(series.x) for series in measured.series] == [12]
    oumi_config = yaml.safe_load((tmp_path / measured.artifacts[0].path).read_text())
    assert [Path(artifact.path).name for artifact in measured.artifacts] == [
        "oumi.yaml",
        "oumi.log",
        "trainer_state.json",
    ]
    assert oumi_config["training"]["trainer_type"] == "TRL_SFT"


@pytest.mark.parametrize(
    ("fault", "metric"),
    [("exit", "exit_code"), ("flat", "loss_drop"), ("nan", "nonfinite_steps"), ("no-weights", "checkpoints")],
)
def test_bad_training_fails_its_metric(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, fault: str, metric: str
) -> None:
    monkeypatch.setattr("seatrial.train.hf.generate_text", lambda _folder: "text")
    verdicts = outcomes(trained(tmp_path, fault))
    assert verdicts[metric] is Outcome.FAIL
    assert verdicts.get("train_runtime", Outcome.PASS) is Outcome.PASS


@pytest.mark.parametrize("fault", ["cut", "no-state"])
def test_unreadable_trainer_state_is_an_error(tmp_path: Path, fault: str) -> None:
    measured = trained(tmp_path, fault)
    assert measured.error
    assert "trainer_state.json" in measured.error
    assert Outcome.PASS not in {outcome for metric, outcome in outcomes(measured).items() if metric != "exit_code"}


def test_full_disk_is_an_error_without_exit_code(tmp_path: Path) -> None:
    measured = trained(tmp_path, "full")
    assert measured.error
    assert "login: Oumi: disk full" in measured.error
    assert "Oumi version" in measured.error  # the end of the log
    assert "exit_code" not in {metric.name for metric in measured.metrics}


@pytest.mark.training
def test_time_limit_stops_oumi(tmp_path: Path) -> None:
    measured = with_enough_time(
        lambda seconds: trained(tmp_path, "hang", train_limit_s=seconds),
        lambda measured: "Oumi version: 0.4.2" in (measured.error or ""),  # the end of the log
        3,
    )
    assert re.search(r"within \d+ s", measured.error or "")
    assert "Oumi version: 0.4.2" in (measured.error or "")
