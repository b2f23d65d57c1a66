"""Real trainings with stack hf, in this process and on two ranks."""

from __future__ import annotations

import importlib.util
import json
import math
import os
import shutil
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file

from seatrial.model import SeatrialError, UsageError
from seatrial.train.train_config import TrainConfig
from tests.paths import CONFIGS
from tests.train import ranks
from tests.train.hf import runs
from tests.train.test_safe_loading import Command

pytestmark = pytest.mark.training

# fields that common training scripts write
FIELDS = {
    *("train_runtime_s", "train_loss", "train_samples_per_second", "train_steps_per_second", "approx_tokens"),
    *("approx_tokens_per_second", "wall_time_s", "approx_tokens_per_rank", "approx_tokens_per_s_per_rank"),
    *("world_size", "gpu0", "torch", "model", "dataset", "use_lora", "bf16", "gradient_checkpointing"),
}
DEEPSPEED = f"parallel.deepspeed={CONFIGS / 'deepspeed' / 'zero3.json'}"


def _unneeded_modules() -> list[str]:
    return sorted({"sklearn", "scipy", "torch._inductor.compile_fx"} & set(sys.modules))


def test_rank_imports_no_unneeded_modules() -> None:
    """With both stacks (tests.train.ranks); importing each of these takes as long as importing torch."""
    assert ranks.run(1, _unneeded_modules) == [[]]


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("sft") / "run"
    return out, runs.train(runs.config("sft-smollm-135m"), out)


def test_fine_tune_learns_and_reports_metrics(sft: tuple[Path, dict[str, Any]]) -> None:
    out, metrics = sft
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert set(metrics) >= FIELDS
    assert (metrics["weights"], metrics["data"]["source"]) == ("random", "generated: no_robots")
    assert (metrics["strategy"], metrics["compile_s"], metrics["slowest_rank"]) == ("single", 0, None)
    assert metrics["precision"] == "fp32 compute, fp32 trained weights, fp32 Adam"
    assert metrics["approx_tokens"] == 12 * 4 * 4 * 96
    assert 0 < metrics["trained_tokens"] < metrics["approx_tokens"] / 4  # only answers, no padding
    steps = runs.steps(out)
    assert [step["step"] for step in steps] == list(range(1, 13))
    assert steps[0]["loss"] == pytest.approx(math.log(1001), rel=0.05)  # loss of random weights
    assert steps[-1]["loss"] < steps[0]["loss"] - 0.5
    assert all(step["grad_norm"] > 0 and step["seconds"] > 0 for step in steps)
    assert (steps[0]["loss"], steps[-1]["loss"]) == (metrics["loss_first"], metrics["loss_last"])
    assert metrics["final"] == "loaded; equal bit by bit"
    assert [save["step"] for save in metrics["checkpoints"]] == [6, 12]
    assert set(metrics["phases_s"]) == {"imports", "init", "data", "build", "first_step", "time_to_first_step"}
    assert metrics["tokens_per_second_per_gpu"] == pytest.approx(
        10 * 4 * 4 * 96 / sum(step["seconds"] for step in steps[2:])  # untimed_steps: 2
    )


def test_both_stacks_write_the_same_metrics(sft: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (native,) = ranks.run(1, ranks.train, ranks.config(max_steps=2), tmp_path)
    assert set(native) == set(sft[1])
    for name in ("phases_s", "data"):
        assert set(native[name]) == set(sft[1][name]), name
    assert set(native["ranks"][0]) == set(sft[1]["ranks"][0])
    assert set(runs.steps(tmp_path)[0]) == set(runs.steps(sft[0])[0])


def test_resumed_training_equals_an_uninterrupted_one(sft: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    out, _ = sft
    shutil.copytree(out / "checkpoints" / "checkpoint-6", tmp_path / "checkpoints" / "checkpoint-6")
    (tmp_path / "checkpoints" / "checkpoint-9").mkdir()  # as after a kill during a save
    shutil.copytree(out / "data", tmp_path / "data")
    runs.train(runs.config("sft-smollm-135m", "checkpoint.resume=true"), tmp_path)
    assert [step["loss"] for step in runs.steps(tmp_path)] == [step["loss"] for step in runs.steps(out)][6:]
    weights = [(folder / "final" / "model.safetensors").read_bytes() for folder in (out, tmp_path)]
    assert weights[0] == weights[1]


def test_checkpoint_of_another_model_is_rejected(sft: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(sft[0] / "checkpoints", tmp_path / "checkpoints")
    shutil.copytree(sft[0] / "data", tmp_path / "data")
    with pytest.raises(UsageError, match=r"checkpoint-12 .*another model: shape of base_model\S+lora_A\S+ is missing"):
        runs.train(runs.config("sft-smollm-135m", "checkpoint.resume=true", "use_lora=true"), tmp_path)


@pytest.mark.parametrize("name", ["optimizer.pt", "scheduler.pt", "rng_state.pth"])
def test_pickle_of_a_stranger_is_refused_on_resume(sft: tuple[Path, dict[str, Any]], tmp_path: Path, name: str) -> None:
    newest = shutil.copytree(sft[0] / "checkpoints" / "checkpoint-12", tmp_path / "checkpoints" / "checkpoint-12")
    shutil.copytree(sft[0] / "data", tmp_path / "data")
    torch.save(Command(tmp_path / "marker"), newest / name)
    with pytest.raises(SeatrialError, match=f"refused to load {newest}"):
        runs.train(runs.config("sft-smollm-135m", "checkpoint.resume=true", "max_steps=13"), tmp_path)
    assert not (tmp_path / "marker").exists()


def test_complete_run_is_not_resumed(sft: tuple[Path, dict[str, Any]]) -> None:
    before = (sft[0] / "steps.jsonl").read_bytes()
    with pytest.raises(SeatrialError, match="has 12 steps, max_steps is 12"):
        runs.train(runs.config("sft-smollm-135m", "checkpoint.resume=true"), sft[0])
    assert (sft[0] / "steps.jsonl").read_bytes() == before


def test_existing_run_is_not_overwritten(sft: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="--out"):
        runs.train(runs.config("sft-smollm-135m"), sft[0])


def test_rejected_run_folder_raises_on_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(_work: object, folder: Path) -> None:
        raise UsageError(f"{folder}: error of rank 0")

    monkeypatch.setattr("seatrial.train.ranks.run_on_rank0", fail)
    with pytest.raises(UsageError, match="error of rank 0"):
        runs.train(runs.config("sft-smollm-135m"), tmp_path)
    assert not list(tmp_path.iterdir())  # nothing is written before all ranks joined


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_non_finite_loss_ends_the_run_and_names_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    from seatrial.train.hf.step_recorder import CountingTrainer

    original = CountingTrainer.compute_loss

    def compute_loss(self: CountingTrainer, *arguments: Any, **options: Any) -> Any:
        loss: Any = original(self, *arguments, **options)
        return loss * (bad if self.state.global_step == 5 else 1)

    monkeypatch.setattr(CountingTrainer, "compute_loss", compute_loss)
    with pytest.raises(SeatrialError, match=r"step 6: loss is (nan|inf).*not finite on rank 0 on ") as caught:
        runs.train(runs.config("sft-smollm-135m"), tmp_path)
    assert "No checkpoint of step 6 was written" in str(caught.value)
    assert runs.steps(tmp_path)[-1]["step"] == 5
    assert not list((tmp_path / "checkpoints").glob("*"))
    assert not (tmp_path / "final").exists()


def test_export_that_differs_from_the_model_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seatrial.train.hf.step_recorder import CountingTrainer

    original = CountingTrainer.save_model

    def save_model(self: CountingTrainer, output_dir: str | None = None, **options: Any) -> None:
        original(self, output_dir, **options)
        path = Path(str(output_dir)) / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"].view(torch.int16)[0] ^= 1
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(CountingTrainer, "save_model", save_model)
    settings = runs.config("sft-mistral-7b-1gpu", "max_steps=2", "untimed_steps=0")
    with pytest.raises(SeatrialError, match=r"1 of \d+ tensors differ .*model\.norm\.weight"):
        runs.train(settings, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.strategy=fsdp2"], "parallel.strategy=fsdp2.*torchrun"),
        (["data.samples=3"], "3 sequences .* batch of 4"),
        (["checkpoint.asynchronous=true"], "checkpoint.asynchronous"),
        (["learning_rate.schedule=linear", "learning_rate.min_ratio=0.1"], "learning_rate.min_ratio"),
        (["seq_len=4096"], "seq_len 4096"),
        (["data.path=/nowhere/rows.jsonl"], r"cannot read the data /nowhere"),
        (["model.weights=/nowhere/weights"], "cannot load /nowhere/weights"),
        (["model.name=smollm-tiny", "seq_len=96"], "vocab_size 256: expected at least 259"),
    ],
)
def test_unsupported_settings_are_rejected(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runs.train(runs.config("sft-smollm-135m", *overrides), tmp_path / "run")


def train_on_two_ranks(name: str, out: Path, *overrides: str, train: Callable[..., Any] = runs.train) -> dict[str, Any]:
    results = ranks.run(2, train, runs.config(name, *overrides), out, seconds=240)
    failed = [result.message for result in results if isinstance(result, ranks.Failed)]
    assert not failed, failed[0]
    return results[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """LoRA with activation checkpointing and DDP on two ranks."""
    out = tmp_path_factory.mktemp("ranks") / "ddp"
    return out, train_on_two_ranks(
        "function-calling-qwen2-7b", out, "parallel.strategy=ddp", "parallel.deepspeed=null", *short_run(out)
    )


def short_run(out: Path) -> list[str]:
    return ["max_steps=3", "untimed_steps=0", f"data.cache={out.parent}", "lora_dropout=0", "checkpoint.every=3"]


def _without_warnings(settings: TrainConfig, out: Path) -> Any:
    """Train and check that no FutureWarning is shown."""
    shown: list[str] = []
    warnings.showwarning = lambda message, category, *_: shown.append(f"{category.__name__}: {message}")
    result = runs.train(settings, out)
    assert not [warning for warning in shown if warning.startswith("FutureWarning")], shown
    return result


def _without_deepspeed(settings: TrainConfig, out: Path) -> Any:
    original = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "deepspeed" else original(name, *more)
    return runs.train(settings, out)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("zero3", [DEEPSPEED]), ("fsdp2 instead of zero3: deepspeed is not installed", [DEEPSPEED])],
)
def test_sharded_training_equals_ddp_and_exports_adapters(
    ddp: tuple[Path, dict[str, Any]], strategy: str, settings: list[str]
) -> None:
    if strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("deepspeed is not installed: see tools/setup.sh")
    ddp_out, ddp_metrics = ddp
    out = ddp_out.parent / strategy[:5]
    train = _without_warnings if strategy == "zero3" else _without_deepspeed
    sharded = train_on_two_ranks("function-calling-qwen2-7b", out, *settings, *short_run(ddp_out), train=train)
    assert (ddp_metrics["strategy"], sharded["strategy"]) == ("ddp", strategy)
    assert ddp_metrics["precision"] == "fp32 compute, fp32 frozen weights, fp32 trained weights, fp32 Adam"
    assert sharded["precision"] == ddp_metrics["precision"]
    assert ddp_metrics["world_size"] == sharded["world_size"] == 2
    assert ddp_metrics["trained_parameters"] == sharded["trained_parameters"] < ddp_metrics["parameters"] / 10
    assert ddp_metrics["approx_tokens"] == sharded["approx_tokens"] == 2 * ddp_metrics["approx_tokens_per_rank"]
    for ddp_step, step in zip(runs.steps(ddp_out), runs.steps(out), strict=True):
        assert ddp_step["loss"] == pytest.approx(step["loss"], rel=1e-5)
        assert ddp_step["grad_norm"] == pytest.approx(step["grad_norm"], rel=1e-2)
    ddp_adapters = load_file(ddp_out / "final" / "adapter_model.safetensors")
    assert not (out / "final" / "model.safetensors").exists()
    for folder in (out / "final", out / "checkpoints" / "checkpoint-3"):
        adapters = load_file(folder / "adapter_model.safetensors")
        assert {name: tensor.shape for name, tensor in adapters.items()} == {
            name: tensor.shape for name, tensor in ddp_adapters.items()
        }
    assert list((out / "tensorboard").rglob("events.*"))


def _find_unused(settings: TrainConfig, out: Path) -> Any:
    """Train with transformers' former defaults for a PeftModel: reentrant checkpointing, unused-parameter search."""
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "ddp_find_unused_parameters": True,
    }
    with patch(
        "seatrial.train.hf.arguments.TrainingArguments", lambda **options: TrainingArguments(**options | defaults)
    ):
        return runs.train(settings, out)


def test_former_defaults_still_fail(tmp_path: Path) -> None:
    """Otherwise the fixture ``ddp`` would not test the arguments that avoid the failure."""
    overrides = ("parallel.strategy=ddp", "parallel.deepspeed=null", *short_run(tmp_path / "x"))
    results = ranks.run(
        2, _find_unused, runs.config("function-calling-qwen2-7b", *overrides), tmp_path / "x", seconds=240
    )
    assert any("ready only once" in getattr(result, "message", "") for result in results), results


def test_loss_is_the_mean_over_tokens_of_all_ranks(tmp_path: Path) -> None:
    """Answers have different lengths: the mean of the ranks' means would differ."""
    common = ("grad_accum=1", "max_steps=4", "untimed_steps=0", "checkpoint.every=0", f"data.cache={tmp_path}")
    runs.train(runs.config("sft-smollm-135m", *common, "bsz=8"), tmp_path / "one")
    train_on_two_ranks("sft-smollm-135m", tmp_path / "two", *common, "bsz=4")
    for one_rank, two_ranks in zip(runs.steps(tmp_path / "one"), runs.steps(tmp_path / "two"), strict=True):
        assert two_ranks["loss"] == pytest.approx(one_rank["loss"], rel=1e-5)
        assert two_ranks["grad_norm"] == pytest.approx(one_rank["grad_norm"], rel=1e-4)
