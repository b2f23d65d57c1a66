"""A training config as TrainingArguments, on a machine without a GPU and without torchrun."""

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


def installed(monkeypatch: pytest.MonkeyPatch, deepspeed: bool) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if deepspeed else None)


def made(tmp_path: Path, *overrides: str) -> Any:
    return arguments.training_arguments(runs.config("sft-smollm-135m", *overrides), tmp_path)


def test_a_config_becomes_arguments(tmp_path: Path) -> None:
    overrides = ("optimizer.beta2=0.9", "optimizer.weight_decay=0.3", "learning_rate.warmup_steps=4", "seed=9")
    given = made(tmp_path, *overrides, "checkpoint.keep=2")
    assert given.output_dir == str(tmp_path / "checkpoints")
    assert (given.max_steps, given.per_device_train_batch_size, given.gradient_accumulation_steps) == (12, 4, 4)
    assert (given.learning_rate, given.lr_scheduler_type, given.warmup_steps) == (3e-3, "cosine", 4)
    assert (given.adam_beta2, given.weight_decay, given.seed, given.bf16) == (0.9, 0.3, 9, False)
    assert (given.save_strategy, given.save_steps, given.save_total_limit) == ("steps", 6, 2)
    assert (given.use_cpu, given.optim, given.dataloader_pin_memory) == (True, "adamw_torch", False)
    assert not given.logging_nan_inf_filter
    assert not given.gradient_checkpointing
    assert given.report_to == []


def test_no_checkpoints_and_a_floor_of_the_rate(tmp_path: Path) -> None:
    given = made(tmp_path, "checkpoint.every=0", "learning_rate.floor=0.1")
    assert given.save_strategy == "no"
    assert (given.lr_scheduler_type, given.lr_scheduler_kwargs) == ("cosine_with_min_lr", {"min_lr_rate": 0.1})


def test_tensorboard_writes_into_the_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TENSORBOARD_LOGGING_DIR", "elsewhere")
    assert made(tmp_path, "tensorboard=true").report_to == ["tensorboard"]
    assert os.environ["TENSORBOARD_LOGGING_DIR"] == str(tmp_path / "tensorboard")


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.strategy=fsdp2"], "fsdp2 shards over ranks, and this process is alone: torchrun"),
        (["checkpoint.asynchronous=true"], "saves synchronously; use stack native"),
        (["learning_rate.shape=linear", "learning_rate.floor=0.1"], "goes down to 0"),
    ],
)
def test_what_transformers_cannot_do_is_refused(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        made(tmp_path, *overrides)


def test_zero3_runs_only_with_deepspeed(monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = runs.config("sft-smollm-135m", *ZERO3)
    installed(monkeypatch, deepspeed=True)
    assert arguments.effective_strategy(wanted) == "zero3"
    installed(monkeypatch, deepspeed=False)
    assert arguments.effective_strategy(wanted) == arguments.NO_DEEPSPEED
    assert arguments.effective_strategy(runs.config("sft-smollm-135m")) == "ddp"


@pytest.mark.parametrize(
    ("overrides", "reentrant"),
    [
        (["parallel.strategy=ddp"], False),
        (["parallel.strategy=ddp", "use_lora=true"], False),
        ([*ZERO3], False),
        ([*ZERO3, "use_lora=true"], True),
        (["parallel.strategy=fsdp2", "use_lora=true"], False),
        (["parallel.strategy=fsdp2"], None),  # FSDP2 recomputes itself
    ],
)
def test_activations_are_recomputed_once(
    monkeypatch: pytest.MonkeyPatch, overrides: list[str], reentrant: bool | None
) -> None:
    installed(monkeypatch, deepspeed=True)
    wanted = runs.config("sft-smollm-135m", "gradient_checkpointing=true", *overrides)
    kwargs = {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}
    assert arguments._recompute(wanted) == ({} if reentrant is None else kwargs)
    assert arguments._fsdp_recomputes(wanted) == (reentrant is None)
    plain = wanted.model_copy(update={"gradient_checkpointing": False})
    assert arguments._recompute(plain) == {}
    assert not arguments._fsdp_recomputes(plain)


def test_sharding_is_fsdp2_or_deepspeeds_file_or_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed(monkeypatch, deepspeed=True)
    assert arguments._sharding(runs.config("sft-smollm-135m")) == {}
    fsdp = ("parallel.strategy=fsdp2", "parallel.cpu_offload=true", "gradient_checkpointing=true")
    sharding = arguments._sharding(runs.config("sft-smollm-135m", *fsdp))
    assert sharding["fsdp"] is True
    assert (sharding["fsdp_config"]["version"], sharding["fsdp_config"]["cpu_offload"]) == (2, True)
    assert sharding["fsdp_config"]["activation_checkpointing"] is True
    path = tmp_path / "ds.json"
    path.write_text(json.dumps({"zero_optimization": {"stage": 3}}))
    zero3 = ("parallel.strategy=zero3", f"parallel.deepspeed={path}")
    assert arguments._sharding(runs.config("sft-smollm-135m", *zero3)) == {
        "deepspeed": {"zero_optimization": {"stage": 3}}
    }


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "cannot read parallel.deepspeed "),
        ("{", "cannot read parallel.deepspeed "),
        ("[]", "expected DeepSpeed's config with zero_optimization.stage 3"),
        ('{"zero_optimization": {"stage": 2}}', "expected DeepSpeed's config with zero_optimization.stage 3"),
        ("{}", "expected DeepSpeed's config with zero_optimization.stage 3"),
    ],
)
def test_a_deepspeed_file_that_does_not_serve_is_refused(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "ds.json"
    if content is not None:
        path.write_text(content)
    with pytest.raises(UsageError, match=message):
        arguments._deepspeed(str(path))
