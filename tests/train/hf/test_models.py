"""Unusable weights raise UsageError, whatever a library raises."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from seatrial.model import UsageError
from seatrial.train.hf import models
from tests.train.hf import runs

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("weights")
    models.build(runs.config("lora-mistral-7b-ddp", "stack=hf"), CPU).save_pretrained(folder)
    return folder


def build(folder: Path) -> None:
    models.build(runs.config("lora-mistral-7b-ddp", "stack=hf", f"model.weights={folder}"), CPU)


def test_truncated_weights_are_rejected(weights: Path, tmp_path: Path) -> None:
    build(weights)
    (tmp_path / "config.json").write_bytes((weights / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UsageError, match=f"cannot load {tmp_path}: cannot read the weights: .*not fully covered"):
        build(tmp_path)


def test_weights_of_other_shapes_are_rejected(weights: Path, tmp_path: Path) -> None:
    config = json.loads((weights / "config.json").read_text())
    config["intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "model.safetensors").symlink_to(weights / "model.safetensors")
    with pytest.raises(UsageError, match=f"cannot load {tmp_path}: the shapes of the weights differ"):
        build(tmp_path)


def test_local_weights_name_the_model_and_other_models_are_refused(weights: Path, tmp_path: Path) -> None:
    """Figures such as FLOPs per token are those of the weights, whatever model the config names."""
    other = runs.config("function-calling-qwen2-7b", f"model.weights={weights}", "seq_len=256")
    assert other.model.name == str(weights)
    assert other.architecture().parameters == models.load(weights, other).num_parameters()
    foreign = json.loads((weights / "config.json").read_text()) | {"rope_parameters": {"rope_type": "llama3"}}
    foreign["num_hidden_layers"] += 1
    with pytest.raises(UsageError, match=r"has num_hidden_layers \d, but model.name tiny-text has \d: set model.name"):
        models._require_named_model(SimpleNamespace(**foreign), runs.config("function-calling-qwen2-7b"))
    (tmp_path / "config.json").write_text(json.dumps(foreign))
    assert runs.config("function-calling-qwen2-7b", f"model.weights={tmp_path}").model.name == "tiny-text"


def test_out_of_memory_is_not_a_usage_error(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def out_of_memory(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(models.AUTO_MODEL, "from_pretrained", out_of_memory)
    with pytest.raises(torch.OutOfMemoryError):
        build(weights)
