"""Conversion of training configs to TrainingArguments, without a GPU and without torchrun."""

from __future__ import annotations

import importlib.util
import json
import os
from pathlib import Path
from typing import Any

import pytest

from seatrial.model import UsageError
from seatrial.train.hf import arguments
from tests.train.hf import runs

ZERO3 = ("parallel.strategy=zero3", "parallel.deepspeed=ds.json")


@pytest.fixture(autouse=True)
def one_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)


def set_deepspeed(monkeypatch: pytest.MonkeyPatch, installed: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if installed else None)


def convert(tmp_path: Path, *overrides: str) -> Any:
    return arguments.training_arguments(runs.config("sft-smollm-135m", *overrides), tmp_path)


def test_config_is_converted(tmp_path: Path) -> None:
    overrides = ("optimizer.beta2=0.9", "optimizer.weight_decay=0.3", "learning_rate.warmup_steps=4", "seed=9")
    result = convert(tmp_path, *overrides, "checkpoint.keep=2")
    assert result.output_dir == str(tmp_path / "checkpoints")
    assert (result.max_steps, result.per_device_train_batch_size, result.gradient_accumulation_steps) == (12, 4, 4)
    assert (result.learning_rate, result.lr_scheduler_type, result.warmup_steps) == (3e-3, "cosine", 4)
    assert (result.adam_beta2, result.weight_decay, result.seed, result.bf16) == (0.9, 0.3, 9, False)
    assert (result.save_strategy, result.save_steps, result.save_total_limit) == ("steps", 6, 2)
    assert (result.use_cpu, result.optim, result.dataloader_pin_memory) == (True, "adamw_torch", False)
    assert not result.logging_nan_inf_filter
    assert not result.gradient_checkpointing
    assert result.report_to == []


def test_no_checkpoints_and_a_minimum_learning_rate(tmp_path: Path) -> None:
    result = convert(tmp_path, "checkpoint.every=0", "learning_rate.min_ratio=0.1")
    assert result.save_strategy == "no"
    assert (result.lr_scheduler_type, result.lr_scheduler_kwargs) == ("cosine_with_min_lr", {"min_lr_rate": 0.1})


def test_tensorboard_writes_to_the_run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "elsewhere")
    assert convert(tmp_path, "tensorboard=true").report_to == ["tensorboard"]
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.strategy=fsdp2"], "parallel.strategy=fsdp2.*torchrun"),
        (["checkpoint.asynchronous=true"], "checkpoint.asynchronous"),
        (["learning_rate.schedule=linear", "learning_rate.min_ratio=0.1"], "learning_rate.min_ratio"),
    ],
)
def test_unsupported_settings_are_rejected(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        convert(tmp_path, *overrides)


def test_zero3_needs_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = runs.config("sft-smollm-135m", *ZERO3)
    set_deepspeed(monkeypatch, installed=True)
    assert arguments.effective_strategy(settings) == "zero3"
    set_deepspeed(monkeypatch, installed=False)
    assert arguments.effective_strategy(settings) == arguments.NO_DEEPSPEED
    assert arguments.effective_strategy(runs.config("sft-smollm-135m")) == "ddp"


@pytest.mark.parametrize(
    ("overrides", "reentrant"),
    [
        (["parallel.strategy=ddp"], False),
        (["parallel.strategy=ddp", "use_lora=true"], False),
        ([*ZERO3], False),
        ([*ZERO3, "use_lora=true"], True),
        (["parallel.strategy=fsdp2", "use_lora=true"], False),
        (["parallel.strategy=fsdp2"], None),  # FSDP2 does it
    ],
)
def test_activation_checkpointing_is_enabled_once(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], reentrant: bool | None
) -> None:
    set_deepspeed(monkeypatch, installed=True)
    settings = runs.config("sft-smollm-135m", "gradient_checkpointing=true", *overrides)
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert arguments._checkpointing_arguments(settings) == ({} if reentrant is None else kwargs)
    assert arguments._fsdp_recomputes(settings) == (reentrant is None)
    plain = settings.model_copy(update={"gradient_checkpointing": False})
    assert arguments._checkpointing_arguments(plain) == {}
    assert not arguments._fsdp_recomputes(plain)


def test_sharding_arguments(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    set_deepspeed(monkeypatch, installed=True)
    assert arguments._sharding_arguments(runs.config("sft-smollm-135m")) == {}
    fsdp = ("parallel.strategy=fsdp2", "parallel.cpu_offload=true", "gradient_checkpointing=true")
    sharding = arguments._sharding_arguments(runs.config("sft-smollm-135m", *fsdp))
    assert sharding["fsdp"] is True
    assert (sharding["fsdp_config"]["version"], sharding["fsdp_config"]["cpu_offload"]) == (2, True)
    assert sharding["fsdp_config"]["activation_checkpointing"] is True
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    zero3 = ("parallel.strategy=zero3", f"parallel.deepspeed={path}")
    assert arguments._sharding_arguments(runs.config("sft-smollm-135m", *zero3)) == {
        "deepspeed": {"zero_optimization": {"stage": 3}}
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read parallel.deepspeed "),
        ("{", "cannot read parallel.deepspeed "),
        ("[]", "expected .*zero_optimization.stage 3"),
        ('{"zero_optimization": {"stage": 2}}', "expected .*zero_optimization.stage 3"),
        ("{}", "expected .*zero_optimization.stage 3"),
    ],
)
def test_invalid_deepspeed_config_is_rejected(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        arguments._deepspeed_config(str(path))
