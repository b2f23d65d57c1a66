"""Real trainings, in this process and on two ranks."""

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

pytestmark = pytest.mark.training

# what training scripts write, by the same names
FIELDS = {
    *("train_runtime_s", "train_loss", "train_samples_per_second", "train_steps_per_second", "approx_tokens"),
    *("approx_tokens_per_second", "wall_time_s", "approx_tokens_per_rank", "approx_tokens_per_s_per_rank"),
    *("world_size", "gpu0", "torch", "model", "dataset", "use_lora", "bf16", "gradient_checkpointing"),
}
DEEPSPEED = f"parallel.deepspeed={CONFIGS / 'deepspeed' / 'zero3.json'}"


def _needless() -> list[str]:
    return sorted({"sklearn", "scipy", "torch._inductor.compile_fx"} & set(sys.modules))


def test_what_a_rank_imports_is_what_it_needs() -> None:
    """Of both stacks (tests.train.ranks): each of these takes as long as torch itself."""
    assert ranks.run(1, _needless) == [[]]


@pytest.fixture(scope="module")
def sft(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    out = tmp_path_factory.mktemp("sft") / "run"
    return out, runs.train(runs.config("sft-smollm-135m"), out)


def test_a_fine_tune_learns_and_says_what_it_was(sft: tuple[Path, dict[str, Any]]) -> None:
    out, metrics = sft
    assert json.loads((out / "metrics.json").read_text()) == metrics
    assert set(metrics) >= FIELDS
    assert (metrics["weights"], metrics["data"]["source"]) == ("random", "generated: no_robots")
    assert (metrics["strategy"], metrics["compile_s"], metrics["slowest_rank"]) == ("single", 0, None)
    assert metrics["precision"] == "fp32 compute, fp32 trained weights, fp32 Adam"
    assert metrics["approx_tokens"] == 12 * 4 * 4 * 96
    assert 0 < metrics["trained_tokens"] < metrics["approx_tokens"] / 4  # the answers alone, no padding
    taken = runs.steps(out)
    assert [step["step"] for step in taken] == list(range(1, 13))
    assert taken[0]["loss"] == pytest.approx(math.log(1001), rel=0.05)  # random weights know nothing
    assert taken[-1]["loss"] < taken[0]["loss"] - 0.5
    assert all(step["grad_norm"] > 0 and step["seconds"] > 0 for step in taken)
    assert (taken[0]["loss"], taken[-1]["loss"]) == (metrics["loss_first"], metrics["loss_last"])
    assert metrics["final"] == "loaded; equal bit by bit"
    assert [save["step"] for save in metrics["checkpoints"]] == [6, 12]
    assert set(metrics["phases_s"]) == {"imports", "init", "data", "build", "first_step", "time_to_first_step"}
    assert metrics["tokens_per_second_per_gpu"] == pytest.approx(
        10 * 4 * 4 * 96 / sum(step["seconds"] for step in taken[2:])  # untimed_steps: 2
    )


def test_both_stacks_write_the_same_keys(sft: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (native,) = ranks.run(1, ranks.train, ranks.config(max_steps=2), tmp_path)
    assert set(native) == set(sft[1])
    for name in ("phases_s", "data"):
        assert set(native[name]) == set(sft[1][name]), name
    assert set(native["ranks"][0]) == set(sft[1]["ranks"][0])
    assert set(runs.steps(tmp_path)[0]) == set(runs.steps(sft[0])[0])


def test_a_training_goes_on_from_its_checkpoint_as_if_never_stopped(
    sft: tuple[Path, dict[str, Any]], tmp_path: Path
) -> None:
    out, _ = sft
    shutil.copytree(out / "checkpoints" / "checkpoint-6", tmp_path / "checkpoints" / "checkpoint-6")
    (tmp_path / "checkpoints" / "checkpoint-9").mkdir()  # as a kill in the middle of a save leaves it
    shutil.copytree(out / "data", tmp_path / "data")
    runs.train(runs.config("sft-smollm-135m", "checkpoint.resume=true"), tmp_path)
    assert [step["loss"] for step in runs.steps(tmp_path)] == [step["loss"] for step in runs.steps(out)][6:]
    names = [(folder / "final" / "model.safetensors").read_bytes() for folder in (out, tmp_path)]
    assert names[0] == names[1]


def test_a_checkpoint_of_another_model_is_refused(sft: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    shutil.copytree(sft[0] / "checkpoints", tmp_path / "checkpoints")
    shutil.copytree(sft[0] / "data", tmp_path / "data")
    with pytest.raises(UsageError, match=r"checkpoint-12 is of another model: base_model\S+lora_A\S+ is not there"):
        runs.train(runs.config("sft-smollm-135m", "checkpoint.resume=true", "use_lora=true"), tmp_path)


def test_a_run_that_is_done_takes_no_further_step(sft: tuple[Path, dict[str, Any]]) -> None:
    before = (sft[0] / "steps.jsonl").read_bytes()
    with pytest.raises(SeatrialError, match="has taken all of its 12 steps: nothing is left to resume"):
        runs.train(runs.config("sft-smollm-135m", "checkpoint.resume=true"), sft[0])
    assert (sft[0] / "steps.jsonl").read_bytes() == before


def test_a_run_is_not_written_over(sft: tuple[Path, dict[str, Any]]) -> None:
    with pytest.raises(UsageError, match="holds a run"):
        runs.train(runs.config("sft-smollm-135m"), sft[0])


def test_a_folder_that_is_refused_is_refused_for_all_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def told(_work: object, place: Path) -> None:
        raise UsageError(f"{place}: what the first rank said")

    monkeypatch.setattr("seatrial.train.hf.ranks.run_on_rank_0", told)
    with pytest.raises(UsageError, match="what the first rank said"):
        runs.train(runs.config("sft-smollm-135m"), tmp_path)
    assert not list(tmp_path.iterdir())  # nor is anything written before the ranks have met


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_a_loss_that_is_no_number_ends_the_run_and_names_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bad: float
) -> None:
    from seatrial.train.hf.step_recorder import CountingTrainer

    real = CountingTrainer.compute_loss

    def compute_loss(self: CountingTrainer, *arguments: Any, **options: Any) -> Any:
        loss: Any = real(self, *arguments, **options)
        return loss * (bad if self.state.global_step == 5 else 1)

    monkeypatch.setattr(CountingTrainer, "compute_loss", compute_loss)
    with pytest.raises(SeatrialError, match=r"step 6: loss is (nan|inf).*not finite in rank 0 on ") as caught:
        runs.train(runs.config("sft-smollm-135m"), tmp_path)
    assert "Nothing was saved after step 5" in str(caught.value)
    assert runs.steps(tmp_path)[-1]["step"] == 5
    assert not list((tmp_path / "checkpoints").glob("*"))
    assert not (tmp_path / "final").exists()


def test_an_export_that_is_not_what_was_trained_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from seatrial.train.hf.step_recorder import CountingTrainer

    real = CountingTrainer.save_model

    def save_model(self: CountingTrainer, output_dir: str | None = None, **options: Any) -> None:
        real(self, output_dir, **options)
        path = Path(str(output_dir)) / "model.safetensors"
        tensors = load_file(path)
        tensors["model.norm.weight"].view(torch.int16)[0] ^= 1
        save_file(tensors, path, metadata={"format": "pt"})

    monkeypatch.setattr(CountingTrainer, "save_model", save_model)
    wanted = runs.config("sft-mistral-7b-1gpu", "max_steps=2", "untimed_steps=0")
    with pytest.raises(SeatrialError, match=r"1 of \d+ tensors are not as trained, such as model\.norm\.weight"):
        runs.train(wanted, tmp_path)


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        (["parallel.strategy=fsdp2"], "fsdp2 shards over ranks, and this process is alone: torchrun"),
        (["data.samples=3"], "3 sequences make no batch of 4: more rows, or a smaller bsz"),
        (["checkpoint.asynchronous=true"], "saves synchronously"),
        (["learning_rate.shape=linear", "learning_rate.floor=0.1"], "goes down to 0"),
        (["seq_len=4096"], "longer than the model's"),
        (["data.path=/nowhere/rows.jsonl"], r"cannot read data\.path /nowhere"),
        (["model.weights=/nowhere/weights"], "cannot load /nowhere/weights"),
        (["model.name=smollm-tiny", "seq_len=96"], "vocabulary of 256 cannot hold text"),
    ],
)
def test_what_this_stack_cannot_do_is_said(tmp_path: Path, overrides: list[str], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        runs.train(runs.config("sft-smollm-135m", *overrides), tmp_path / "run")


def on_two(name: str, out: Path, *overrides: str, train: Callable[..., Any] = runs.train) -> dict[str, Any]:
    found = ranks.run(2, train, runs.config(name, *overrides), out, seconds=240)
    failed = [one.said for one in found if isinstance(one, ranks.Failed)]
    assert not failed, failed[0]
    return found[0]  # type: ignore[no-any-return]


@pytest.fixture(scope="module")
def ddp(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """LoRA with activation checkpointing on two ranks: here a parameter used to be ready twice."""
    out = tmp_path_factory.mktemp("ranks") / "ddp"
    return out, on_two(
        "function-calling-qwen2-7b", out, "parallel.strategy=ddp", "parallel.deepspeed=null", *fewer(out)
    )


def fewer(out: Path) -> list[str]:
    return ["max_steps=3", "untimed_steps=0", f"data.cache={out.parent}", "lora_dropout=0", "checkpoint.every=3"]


def _in_silence(settings: TrainConfig, out: Path) -> Any:
    """As a user sees it: nothing of a library's use of another, at each of its calls."""
    told: list[str] = []
    warnings.showwarning = lambda message, category, *_: told.append(f"{category.__name__}: {message}")
    found = runs.train(settings, out)
    assert not [one for one in told if one.startswith("FutureWarning")], told
    return found


def _without_deepspeed(settings: TrainConfig, out: Path) -> Any:
    real = importlib.util.find_spec
    importlib.util.find_spec = lambda name, *more: None if name == "deepspeed" else real(name, *more)
    return runs.train(settings, out)


@pytest.mark.parametrize(
    ("strategy", "settings"),
    [("zero3", [DEEPSPEED]), ("fsdp2 instead of zero3: deepspeed is not installed", [DEEPSPEED])],
)
def test_sharded_ranks_take_the_very_steps_of_ddp_and_export_the_adapters(
    ddp: tuple[Path, dict[str, Any]], strategy: str, settings: list[str]
) -> None:
    if strategy == "zero3" and importlib.util.find_spec("deepspeed") is None:
        (pytest.fail if os.environ.get("CI") else pytest.skip)("deepspeed is not installed: see tools/setup.sh")
    shared_out, shared = ddp
    out = shared_out.parent / strategy[:5]
    train = _in_silence if strategy == "zero3" else _without_deepspeed
    sharded = on_two("function-calling-qwen2-7b", out, *settings, *fewer(shared_out), train=train)
    assert (shared["strategy"], sharded["strategy"]) == ("ddp", strategy)
    assert shared["precision"] == "fp32 compute, fp32 frozen weights, fp32 trained weights, fp32 Adam"
    assert sharded["precision"] == shared["precision"]
    assert shared["world_size"] == sharded["world_size"] == 2
    assert shared["trained_parameters"] == sharded["trained_parameters"] < shared["parameters"] / 10
    assert shared["approx_tokens"] == sharded["approx_tokens"] == 2 * shared["approx_tokens_per_rank"]
    for one, other in zip(runs.steps(shared_out), runs.steps(out), strict=True):
        assert one["loss"] == pytest.approx(other["loss"], rel=1e-5)
        assert one["grad_norm"] == pytest.approx(other["grad_norm"], rel=1e-2)
    whole = load_file(shared_out / "final" / "adapter_model.safetensors")
    assert not (out / "final" / "model.safetensors").exists()
    for folder in (out / "final", out / "checkpoints" / "checkpoint-3"):
        adapters = load_file(folder / "adapter_model.safetensors")
        assert {name: tensor.shape for name, tensor in adapters.items()} == {
            name: tensor.shape for name, tensor in whole.items()
        }
    assert list((out / "tensorboard").rglob("events.*"))


def _find_unused(settings: TrainConfig, out: Path) -> Any:
    """As transformers has it by default for a PeftModel, with reentrant checkpointing, its default for long."""
    from transformers import TrainingArguments

    defaults: dict[str, Any] = {
        "gradient_checkpointing_kwargs": {"use_reentrant": True},
        "ddp_find_unused_parameters": True,
    }
    with patch("seatrial.train.hf.arguments.TrainingArguments", lambda **told: TrainingArguments(**told | defaults)):
        return runs.train(settings, out)


def test_what_the_ready_twice_failure_came_from_still_fails(tmp_path: Path) -> None:
    """Or `ddp`, above, would prove nothing of the arguments that keep it away."""
    overrides = ("parallel.strategy=ddp", "parallel.deepspeed=null", *fewer(tmp_path / "x"))
    found = ranks.run(
        2, _find_unused, runs.config("function-calling-qwen2-7b", *overrides), tmp_path / "x", seconds=240
    )
    assert any("ready only once" in getattr(one, "said", "") for one in found), found


def test_the_loss_is_a_mean_over_the_counted_tokens_of_all_ranks(tmp_path: Path) -> None:
    """Answers have unequal lengths: a mean of the ranks' means would not be one process's."""
    shared = ("grad_accum=1", "max_steps=4", "untimed_steps=0", "checkpoint.every=0", f"data.cache={tmp_path}")
    runs.train(runs.config("sft-smollm-135m", *shared, "bsz=8"), tmp_path / "one")
    on_two("sft-smollm-135m", tmp_path / "two", *shared, "bsz=4")
    for alone, together in zip(runs.steps(tmp_path / "one"), runs.steps(tmp_path / "two"), strict=True):
        assert together["loss"] == pytest.approx(alone["loss"], rel=1e-5)
        assert together["grad_norm"] == pytest.approx(alone["grad_norm"], rel=1e-4)
