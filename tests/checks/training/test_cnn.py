from __future__ import annotations

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

from seatrial.checks.check import Context
from seatrial.checks.training.cnn import CHECK
from seatrial.judge.rules import judge_check
from seatrial.model import Measurement, Outcome
from seatrial.train import cnn, images
from seatrial.worker import measure
from tests.train.idx import write_mnist


def make_context(run_dir: Path, notes: list[str] | None = None) -> Context:
    out = run_dir / "artifacts" / CHECK.name
    out.mkdir(parents=True)
    return Context(
        node="node3",
        rank=1,
        world_size=2,
        local_rank=1,
        device="cpu",
        expected_gpus=None,
        artifacts_dir=out,
        run_dir=run_dir,
        progress=(notes if notes is not None else []).append,
    )


def outcomes(measurement: Measurement) -> dict[str, Outcome]:
    return {verdict.metric: verdict.outcome for verdict in judge_check(CHECK, [measurement], {}, "t")}


def values(measurement: Measurement) -> dict[str, float]:
    assert {metric.subject for metric in measurement.metrics} == {"node3/rank1"}
    assert all(metric.unit == CHECK.units[metric.name] for metric in measurement.metrics)
    return {metric.name: metric.value for metric in measurement.metrics}


@dataclass(frozen=True)
class Run:
    folder: Path
    measured: Measurement
    notes: list[str]
    weights: dict[str, torch.Tensor]
    training: cnn.Training


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """The check with its defaults."""
    folder, notes, results = tmp_path_factory.mktemp("cnn"), list[str](), list[Any]()
    train = cnn.train

    def recorded(net: torch.nn.Module, *arguments: Any) -> cnn.Training:
        training = train(net, *arguments)
        results.extend([{name: value.clone() for name, value in net.state_dict().items()}, training])
        return training

    with patch.object(cnn, "train", recorded):
        measured = measure(CHECK, make_context(folder, notes), {})
    return Run(folder, measured, notes, *results)


@pytest.fixture
def trained(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replaces the training by its result in ``run``."""

    def train(net: torch.nn.Module, *_: object) -> cnn.Training:
        net.load_state_dict(run.weights)
        return run.training

    monkeypatch.setattr(cnn, "train", train)


def test_training_passes_all_rules(run: Run) -> None:
    measured, tmp_path = run.measured, run.folder
    assert measured.error is None
    assert set(outcomes(measured).values()) == {Outcome.PASS}
    metrics = values(measured)
    assert set(metrics) == set(CHECK.units)
    assert 95 < metrics["accuracy"] < 100
    assert metrics["loss_first"] > 2 > 0.5 > metrics["loss_last"]
    assert metrics["reload_accuracy_difference"] == 0
    assert "epoch 2/5" in run.notes

    (series,) = measured.series
    assert len(series.x) == len(series.y) == 5 * 12
    assert measured.facts["data"]["train"] == 1438  # type: ignore[index,call-overload]
    assert measured.facts["data"]["limitation"]  # type: ignore[index,call-overload]
    assert "scikit-learn" in str(measured.facts["dataset"])

    (model,) = (tmp_path / artifact.path for artifact in measured.artifacts)
    assert model == tmp_path / "artifacts/train.cnn/node3_rank1/model.pt"
    assert len(torch.load(model, weights_only=True)) == len(cnn.build("cpu").state_dict())
    assert measured.facts["device"] == "cpu"
    assert measured.facts["cpu_only"]


def test_mnist_from_idx_files(tmp_path: Path) -> None:
    folder = tmp_path / "mnist"
    folder.mkdir()
    digits = images.upsampled_digits()
    few = images.Images(
        digits.train_images[:480],
        digits.train_labels[:480],
        digits.test_images[:120],
        digits.test_labels[:120],
        name="",
        source="",
    )
    write_mnist(folder, few, gzipped=True)
    measured = measure(CHECK, make_context(tmp_path), {"data": str(folder), "epochs": 4, "batch": 40})
    assert measured.error is None
    assert measured.facts["dataset"] == "MNIST"
    assert measured.facts["data"] == {
        "source": f"MNIST, IDX files in {folder}",
        "train": 480,
        "held_out": 120,
        "limitation": None,
    }
    assert values(measured)["loss_last"] < 2


def test_missing_data_is_an_error(tmp_path: Path) -> None:
    measured = measure(CHECK, make_context(tmp_path), {"data": str(tmp_path)})
    assert "train-images-idx3-ubyte" in (measured.error or "")
    assert measured.metrics == ()
    assert Outcome.PASS not in outcomes(measured).values()


@pytest.mark.parametrize(("epochs", "batch", "steps"), [(1, 1436, 2), (1, 128, 12), (3, 128, 36), (60, 1436, 120)])
def test_too_few_steps_are_an_error(tmp_path: Path, epochs: int, batch: int, steps: int) -> None:
    measured = measure(CHECK, make_context(tmp_path), {"epochs": epochs, "batch": batch})
    assert all(
        f"{name} {value}" in (measured.error or "") for name, value in {"epochs": epochs, "batch": batch}.items()
    )
    assert f"{steps} steps" in (measured.error or "")
    assert measured.metrics == ()


def test_missing_scikit_learn_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "sklearn", None)
    assert "scikit-learn" in (measure(CHECK, make_context(tmp_path), {}).error or "")


def test_nonfinite_loss_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cnn, "PEAK_LEARNING_RATE", 1e30)
    measured = measure(CHECK, make_context(tmp_path), {})
    assert measured.error is None
    assert values(measured)["nonfinite_steps"] == 1
    verdicts = outcomes(measured)
    assert verdicts["nonfinite_steps"] == Outcome.FAIL
    assert verdicts["accuracy"] == Outcome.FAIL
    assert verdicts["reload_accuracy_difference"] == Outcome.PASS


@pytest.mark.usefixtures("trained")
def test_damaged_model_file_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = torch.save

    def damaged(weights: dict[str, torch.Tensor], file: object) -> None:
        real({**weights, "11.weight": -weights["11.weight"]}, file)  # type: ignore[arg-type]

    monkeypatch.setattr(torch, "save", damaged)
    measured = measure(CHECK, make_context(tmp_path), {})
    assert values(measured)["reload_accuracy_difference"] > 50
    assert outcomes(measured)["reload_accuracy_difference"] == Outcome.FAIL


@pytest.mark.usefixtures("trained")
def test_failed_save_is_an_error_and_keeps_the_losses(tmp_path: Path) -> None:
    context = make_context(tmp_path)
    context.artifacts_dir.rmdir()
    measured = measure(CHECK, context, {"epochs": 4})
    assert "FileNotFoundError" in (measured.error or "")
    assert "loss_last" in values(measured)
