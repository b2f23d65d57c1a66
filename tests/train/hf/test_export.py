from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file

from seatrial.model import SeatrialError
from seatrial.train.hf import export, models
from tests.train.hf import runs


class Trainer:
    """Fake of transformers' Trainer for one process."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.accelerator = SimpleNamespace(unwrap_model=lambda model: model)

    def save_model(self, folder: str) -> None:
        self.model.save_pretrained(folder)


def save(trainer: Any, final: Path, sharded: bool = False) -> str:
    return export.save(trainer, final, sharded)


@pytest.fixture
def model() -> Any:
    return models.build(runs.config("lora-mistral-7b-ddp", "stack=hf", "use_lora=false"), torch.device("cpu"))


@pytest.fixture
def adapted(model: Any) -> Any:
    return get_peft_model(model, LoraConfig(r=2, target_modules=["q_proj"]))


def test_exported_model_is_compared_bit_by_bit(model: Any, tmp_path: Path) -> None:
    assert save(Trainer(model), tmp_path) == "loaded; equal bit by bit"
    assert save(Trainer(model), tmp_path, sharded=True) == "loaded; compared by name and shape"


class Damaged(Trainer):
    """Trainer that changes one tensor of the file."""

    def __init__(self, model: Any, change: Any) -> None:
        super().__init__(model)
        self._change = change

    def save_model(self, folder: str) -> None:
        super().save_model(folder)
        (path,) = Path(folder).glob("*.safetensors")
        tensors = load_file(path)
        self._change(tensors)
        save_file(tensors, path, metadata={"format": "pt"})


def flip(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"].view(torch.int16)[0] ^= 1


def not_finite(tensors: dict[str, torch.Tensor]) -> None:
    tensors["model.norm.weight"][0] = torch.nan


def test_flipped_bit_is_an_error_without_sharding(model: Any, tmp_path: Path) -> None:
    with pytest.raises(SeatrialError, match=r"1 of \d+ tensors differ .*model\.norm\.weight"):
        save(Damaged(model, flip), tmp_path)
    save(Damaged(model, flip), tmp_path, sharded=True)  # a shard cannot be compared


def test_nan_is_an_error_with_sharding(model: Any, tmp_path: Path) -> None:
    with pytest.raises(SeatrialError, match=r"1 of \d+ tensors differ .*model\.norm\.weight"):
        save(Damaged(model, not_finite), tmp_path, sharded=True)


def test_lora_saves_and_compares_only_adapters(adapted: Any, tmp_path: Path) -> None:
    assert save(Trainer(adapted), tmp_path) == "loaded; equal bit by bit"
    assert all("lora_" in name for name in load_file(tmp_path / "adapter_model.safetensors"))


def test_missing_adapter_is_an_error(adapted: Any, tmp_path: Path) -> None:
    def drop(tensors: dict[str, torch.Tensor]) -> None:
        del tensors[min(tensors)]

    with pytest.raises(SeatrialError, match=r"tensor names differ .*base_model\S+lora_A"):
        save(Damaged(adapted, drop), tmp_path)


def test_base_model_in_the_export_is_an_error(adapted: Any, tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(b"\0" * (2**20 + 50_000))
    with pytest.raises(SeatrialError, match=r"\d+ bytes for \d+ adapter weights"):
        save(Trainer(adapted), tmp_path)


def test_parameter_names_match_files() -> None:
    block = torch.nn.Module()
    block.add_module("_checkpoint_wrapped_module", torch.nn.Linear(1, 1, bias=False))
    assert [name for name, _ in export._parameters(torch.nn.Sequential(block))] == ["0.weight"]


def test_shard_is_compared_by_its_unsharded_shape() -> None:
    shard = torch.nn.Parameter(torch.empty(0))
    shard.ds_shape = torch.Size([2, 3])  # type: ignore[attr-defined]
    assert export._is_equal(torch.zeros(2, 3), shard, sharded=True)
    assert not export._is_equal(torch.zeros(3, 2), shard, sharded=True)
