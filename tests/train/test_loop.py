"""Training on one to four ranks: equal results for all strategies, and a stop at non-finite steps."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor, Replicate, Shard

from seatrial.model import SeatrialError, UsageError
from seatrial.train import checkpoint, loop, parallel
from seatrial.train.train_config import Schedule, TrainConfig
from tests.train import ranks
from tests.train.ranks import Failed, config


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """Limits this process to one thread, like the ranks."""
    monkeypatch.setenv("LOCAL_WORLD_SIZE", str(ranks.CORES))


def losses(out: Path) -> list[float]:
    return [json.loads(line)["loss"] for line in (out / "steps.jsonl").read_text().splitlines()]


FSDP = {"strategy": "fsdp2"}
TRAINS: dict[str, dict[str, Any]] = {
    "plain": {},
    "lora": {"use_lora": True, "lora_dropout": 0.0},
    "tied": {"model": {"name": "smollm-tiny"}},
}


@pytest.mark.training
@pytest.mark.parametrize("kind", TRAINS)
def test_single_process_ddp_and_fsdp2_have_equal_losses(tmp_path: Path, kind: str) -> None:
    """Same seed and global batch of 8: one process, two ranks of 4, and two ranks with two micro-batches of 2."""
    base = TrainConfig.model_validate(config("qwen2-tiny", **TRAINS[kind]).model_dump())
    fsdp = base.model_copy(update={"parallel": base.parallel.model_copy(update=FSDP)})
    loop.train(base.model_copy(update={"bsz": 8}), tmp_path / "single")
    configs = {"ddp": base, "fsdp2": fsdp, "accumulated": fsdp.model_copy(update={"bsz": 2, "grad_accum": 2})}
    for name, settings in configs.items():
        results = ranks.run(2, ranks.train, settings, tmp_path / name)
        assert not any(isinstance(result, Failed) for result in results), results
    single = losses(tmp_path / "single")
    assert single[-1] < single[0] < math.log(257) + 0.2
    for name in configs:
        assert losses(tmp_path / name) == pytest.approx(single, rel=1e-5), name


@pytest.mark.training
def test_optimizations_do_not_change_the_losses(tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "not prefetched": {"parallel": {"prefetch": 0}},
        "kept gathered": {"parallel": {"prefetch": 2, "reshard_after_forward": False}},
        "offloaded": {"parallel": {"cpu_offload": True}},
        "recomputed": {"gradient_checkpointing": True},
        "one chunk": {"loss_chunks": 1},
        "bf16": {"bf16": True, "parallel": {"reduce_dtype": "bf16"}},
    }
    for name, changes in variants.items():
        settings = config(max_steps=3, **{**changes, "parallel": {**FSDP, **changes.get("parallel", {})}})
        results = ranks.run(2, ranks.train, settings, tmp_path / name)
        assert not any(isinstance(result, Failed) for result in results), (name, results)
        assert losses(tmp_path / name) == pytest.approx(
            losses(tmp_path / "plain"), rel=0.01 if name == "bf16" else 1e-5
        )
    assert losses(tmp_path / "bf16") != losses(tmp_path / "plain")


@pytest.mark.training
def test_hsdp_and_fsdp2_have_equal_losses(tmp_path: Path) -> None:
    """With gradient clipping over both mesh dimensions; FSDP2 also resumes from the checkpoint of HSDP."""
    changes: dict[str, Any] = {
        "bsz": 2,
        "optimizer": {"max_grad_norm": 0.1},
        "checkpoint": {"every": 2, "resume": True},
    }
    fsdp, hsdp = (config(**changes, parallel=FSDP | {"replicas": replicas}) for replicas in (1, 2))
    expected_gib, parallelism = [], []
    for settings, out in ((fsdp, tmp_path / "fsdp"), (hsdp, tmp_path / "hsdp"), (fsdp, tmp_path / "hsdp")):
        results = ranks.run(4, ranks.train, settings, out)
        assert not any(isinstance(result, Failed) for result in results), results
        assert losses(out) == pytest.approx(losses(tmp_path / "fsdp"), rel=1e-5)
        expected_gib.append(results[0]["params_and_optimizer_expected_gib"])
        parallelism.append((results[0]["strategy"], results[0]["replicas"]))
        shutil.rmtree(checkpoint.step_folder(out, 4))
    assert expected_gib == [expected_gib[0], 2 * expected_gib[0], expected_gib[0]]
    assert parallelism == [("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 1)]
    replicated = (Replicate(), Shard(0))
    assert ranks.run(4, _placements_and_rows, hsdp) == [({(replicated, (2, 2))}, 128)] * 4
    (failed,) = ranks.run(1, ranks.train, hsdp, tmp_path / "one-rank")
    assert "parallel.replicas 2: expected a divisor of 1 (ranks)," in failed.message


def _placements_and_rows(settings: TrainConfig) -> tuple[set[Any], int]:
    """The distinct placements and mesh shapes of all parameters, and this rank's rows of the embedding."""
    with parallel.process_group(60) as world:
        model = parallel.build(settings, world).model
        parameters = [cast(DTensor, parameter) for parameter in model.parameters()]
        placements = {(tuple(each.placements), tuple(each.device_mesh.shape)) for each in parameters}
        return placements, len(cast(DTensor, model.embed_tokens.weight).to_local())


@pytest.mark.training
def test_sharding_over_all_ranks(tmp_path: Path) -> None:
    assert ranks.run(2, _placements_and_rows, config(parallel=FSDP)) == [({((Shard(0),), (2,))}, 128)] * 2


def test_metrics_have_the_names_of_training_scripts(tmp_path: Path) -> None:
    report = loop.train(config(grad_accum=2), tmp_path)
    assert json.loads((tmp_path / "metrics.json").read_text()) == report
    assert report["approx_tokens"] == report["approx_tokens_per_rank"] == 4 * 4 * 2 * 16
    assert {"train_runtime_s", "train_loss", "train_samples_per_second", "train_steps_per_second"} < report.keys()
    assert {"wall_time_s", "approx_tokens_per_s_per_rank", "gpu0", "torch", "dataset", "use_lora"} < report.keys()
    assert (report["mfu_percent"], report["peak_tflops"]) == (None, None)
    assert report["flops_per_token"] == config().architecture().flops_per_token(16)
    assert report["steps_measured"] == 3
    assert report["strategy"] == "single"
    assert report["precision"] == "fp32 compute, fp32 trained weights, fp32 Adam"
    assert f"stack native, single, {report['precision']}" in (tmp_path / "summary.txt").read_text()
    assert report["train_loss"] == pytest.approx(sum(losses(tmp_path)) / 4)
    assert json.loads((tmp_path / "config.json").read_text())["grad_accum"] == 2


def test_an_existing_run_is_not_overwritten(tmp_path: Path) -> None:
    loop.train(config(), tmp_path)
    with pytest.raises(UsageError, match=f"{tmp_path} contains a run"):
        train_on_one_rank(config(), tmp_path)


def train_on_one_rank(settings: TrainConfig, out: Path) -> Any:
    (result,) = ranks.run(1, ranks.train, settings, out)
    if isinstance(result, Failed):
        raise UsageError(result.message)
    return result


@pytest.mark.training
def test_the_loss_approaches_the_entropy_bound(tmp_path: Path) -> None:
    """The model first learns the 64 states among 256 tokens, then the transitions."""
    report = loop.train(config(max_steps=60, bsz=8, data={"samples": 512}), tmp_path)
    assert report["loss_first"] == pytest.approx(math.log(256), abs=0.1)
    assert report["loss_entropy_bound"] < report["loss_last"] < math.log(64) - 0.5


def _train_with_nonfinite_step(settings: TrainConfig, out: Path, faulty_rank: int, fault: str) -> dict[str, Any]:
    """The loss or gradient of the third step on ``faulty_rank`` is not finite."""
    original = loop.Trainer.step

    def step(self: loop.Trainer, number: int, batches: Any) -> Any:
        if number == 3 and self.world.rank == faulty_rank and fault == "loss":
            original_forward = self.built.model.output.forward
            nan = torch.tensor(math.nan)
            self.built.model.output.forward = lambda *a: original_forward(*a) * nan  # type: ignore[method-assign]
        if number == 3 and self.world.rank == faulty_rank and fault == "gradient":
            original_hook = self.built.model.gradient_hook
            assert original_hook is not None
            self.built.model.gradient_hook = lambda gradient: original_hook(gradient.mul_(math.inf)) or gradient
        if number == 3:
            self.before = [p.detach().clone() for p in map(parallel.unshard, self.built.trained_parameters)]  # type: ignore
        return original(self, number, batches)

    read_finite = loop.Trainer._read_finite_step

    def read_and_compare_weights(self: loop.Trainer, pending: loop.PendingStep) -> Any:
        try:
            return read_finite(self, pending)
        except loop.NonFiniteError as error:
            now = list(map(parallel.unshard, self.built.trained_parameters))
            same = all(torch.equal(a, b) for a, b in zip(self.before, now, strict=True))  # type: ignore
            raise SeatrialError(f"{error} | unchanged {same}") from error

    loop.Trainer.step = step  # type: ignore[method-assign]
    loop.Trainer._read_finite_step = read_and_compare_weights  # type: ignore[method-assign]
    return loop.train(settings, out)


@pytest.mark.training
@pytest.mark.parametrize(
    ("strategy", "fault", "message"),
    [
        ("ddp", "loss", "rank 1 (HOST): its loss is not finite"),
        ("fsdp2", "loss", "rank 1 (HOST): its loss is not finite"),
        ("fsdp2", "gradient", "rank 1 (HOST): its gradient is not finite"),
    ],
)
def test_a_nonfinite_step_stops_all_ranks_and_leaves_the_weights_unchanged(
    tmp_path: Path, strategy: str, fault: str, message: str
) -> None:
    import socket

    settings = config(parallel={"strategy": strategy}, max_steps=6)
    results = ranks.run(2, _train_with_nonfinite_step, settings, tmp_path, 1, fault)
    assert all(isinstance(result, Failed) for result in results), results
    root_causes = [result.message for result in results if result.is_root_cause]
    assert root_causes, results
    for root_cause in root_causes:
        assert root_cause.startswith("step 3: loss ")
        assert message.replace("HOST", socket.gethostname()) in root_cause
        assert "rank 0" not in root_cause
        assert root_cause.endswith("unchanged True")
    assert len(losses(tmp_path)) == 2


@pytest.mark.training
def test_the_loss_is_averaged_over_the_tokens_of_all_ranks(tmp_path: Path) -> None:
    """The mean of the ranks' means would differ, since ranks have different numbers of tokens."""
    base = config(max_steps=3, data={"samples": 64, "variable_length": True})
    for name, count, settings in (("single", 1, base.model_copy(update={"bsz": 8})), ("two", 2, base)):
        results = ranks.run(count, ranks.train, settings, tmp_path / name)
        assert not any(isinstance(result, Failed) for result in results), results
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "single"), rel=1e-5)


def test_scheduled_learning_rate() -> None:
    linear = Schedule(peak=1.0, schedule="linear", warmup_steps=2)
    assert [loop.scheduled_learning_rate(linear, step, 6) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = Schedule(peak=1.0, schedule="cosine", min_ratio=0.1)
    assert loop.scheduled_learning_rate(cosine, 1, 10) == 1.0
    assert loop.scheduled_learning_rate(cosine, 6, 10) == pytest.approx(0.55)
    assert loop.scheduled_learning_rate(Schedule(peak=2.0, schedule="constant"), 9, 10) == 2.0
