"""Text generation with an exported model."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from seatrial.model import UsageError
from seatrial.train.hf import external_trainer, inference
from seatrial.train.oumi import MODEL_FOLDER
from tests.train.hf import runs


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inference")
    external_trainer.write_inputs(runs.config("sft-smollm-135m"), folder)
    torch.manual_seed(0)
    model: Any = AutoModelForCausalLM  # untyped
    model.from_config(AutoConfig.from_pretrained(folder / MODEL_FOLDER)).save_pretrained(folder / MODEL_FOLDER)
    return folder / MODEL_FOLDER


def test_generates_at_most_count_tokens(model_folder: Path) -> None:
    generated = inference.generate(model_folder, "cpu", 4)
    assert 1 <= generated["tokens"] <= 4
    assert generated["finite"] is True
    assert isinstance(generated["text"], str)
    assert inference.generate(model_folder, "cpu", 4) == generated, "greedy"


def test_non_finite_logits_are_reported(model_folder: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(model_folder, tmp_path / "model")
    path = folder / "model.safetensors"
    tensors = load_file(path)
    save_file({name: tensor * torch.nan for name, tensor in tensors.items()}, path, metadata={"format": "pt"})
    assert inference.generate(folder, "cpu", 1)["finite"] is False


def test_folder_without_a_model_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=str(tmp_path)):
        inference.generate(tmp_path, "cpu", 1)
