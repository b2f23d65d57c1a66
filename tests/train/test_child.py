"""One rank of a training that a check starts; tests/pipeline/test_training_trial.py has several."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from seatrial.bench import child_ranks
from seatrial.train import child, command, parallel
from seatrial.train.hf import inference
from seatrial.train.train_config import TrainConfig

STARTED = 1_700_000_000.0  # Unix time


@pytest.fixture(autouse=True)
def trained(monkeypatch: pytest.MonkeyPatch) -> list[tuple[TrainConfig, Path, dict[str, str]]]:
    """The trainings that were started: config, folder and torchrun's variables; they return metrics at once."""
    runs: list[tuple[TrainConfig, Path, dict[str, str]]] = []

    def run(config: TrainConfig, out: Path, started: float) -> dict[str, Any]:
        assert started == STARTED
        ranks = {name: os.environ[name] for name in child._RANK_VARIABLES if name in os.environ}
        runs.append((config, out, ranks))
        return {"loss": 1.0}

    monkeypatch.setattr(command, "run", run)
    return runs


@pytest.fixture(autouse=True)
def groups(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The backends of the process groups that were opened."""
    backends: list[str] = []
    monkeypatch.setattr(child_ranks, "open_child_group", lambda task, backend: backends.append(backend))
    return backends


@pytest.fixture(autouse=True)
def environment() -> Iterator[None]:
    with patch.dict(os.environ):
        yield


def run(out: Path, rank: int = 0, world: int = 1, device: str = "cpu", **more: Any) -> dict[str, Any] | None:
    os.environ.update({"RANK": str(rank), "WORLD_SIZE": str(world), "LOCAL_RANK": str(rank)})
    fields = {"config": "tiny/throughput", "overrides": [], "out": str(out), "generate": 0, "device": device}
    fields["started"] = STARTED
    return child.run({**fields, **more})


def test_single_rank_trains_without_a_group(
    tmp_path: Path, trained: list[tuple[TrainConfig, Path, dict[str, str]]], groups: list[str]
) -> None:
    assert run(tmp_path, overrides=["bsz=3"]) == {"loss": 1.0}
    ((config, out, variables),) = trained
    assert (config.bsz, out, variables, groups) == (3, tmp_path, {}, [])


@pytest.mark.parametrize(("device", "backend"), [("cpu", "gloo"), ("cuda:0", parallel.BACKEND)])
def test_ranks_open_a_group_and_rank_0_returns_the_metrics(
    tmp_path: Path, trained: list[Any], groups: list[str], device: str, backend: str
) -> None:
    assert [run(tmp_path, rank, 2, device) for rank in (0, 1)] == [{"loss": 1.0}, None]
    assert groups == [backend] * 2
    assert [variables["RANK"] for _, _, variables in trained] == ["0", "1"]


@pytest.mark.parametrize(("visible", "expected"), [(None, "3"), ("7,6,5,4", "4")])
def test_single_rank_sees_only_its_gpu(tmp_path: Path, visible: str | None, expected: str) -> None:
    os.environ.pop("CUDA_VISIBLE_DEVICES", None)
    if visible:
        os.environ["CUDA_VISIBLE_DEVICES"] = visible
    run(tmp_path, device="cuda:3")
    assert os.environ["CUDA_VISIBLE_DEVICES"] == expected


def test_exported_model_generates_on_rank_0(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inference, "generate", lambda *arguments: list(map(str, arguments)))
    metrics = run(tmp_path, generate=5)
    assert json.loads(json.dumps(metrics)) == {"loss": 1.0, "generated": [f"{tmp_path}/final", "cpu", "5"]}
    assert run(tmp_path, 1, 2, generate=5) is None
