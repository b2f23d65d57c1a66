"""Weights and tokenizers of the user's own that cannot be used: an error of the config, whatever a library raises."""

from __future__ import annotations

import json
from pathlib import Path

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


def test_weights_that_are_cut_short_are_refused(weights: Path, tmp_path: Path) -> None:
    build(weights)
    (tmp_path / "config.json").write_bytes((weights / "config.json").read_bytes())
    (tmp_path / "model.safetensors").write_bytes((weights / "model.safetensors").read_bytes()[:5000])
    with pytest.raises(UsageError, match=f"cannot load {tmp_path}: its weights cannot be read: .*not fully covered"):
        build(tmp_path)


def test_weights_of_other_shapes_are_refused(weights: Path, tmp_path: Path) -> None:
    shape = json.loads((weights / "config.json").read_text())
    shape["intermediate_size"] *= 2
    (tmp_path / "config.json").write_text(json.dumps(shape))
    (tmp_path / "model.safetensors").symlink_to(weights / "model.safetensors")
    with pytest.raises(UsageError, match=f"cannot load {tmp_path}: its weights are not of the shapes"):
        build(tmp_path)


def test_memory_that_does_not_suffice_is_not_the_configs(weights: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(models._auto, "from_pretrained", full)
    with pytest.raises(torch.OutOfMemoryError):
        build(weights)
