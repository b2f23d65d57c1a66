"""Training on one to four ranks: the same numbers whichever way the work is spread, and a stop where they are none."""

from __future__ import annotations

import json
import math
import shutil
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch.distributed.tensor import DTensor

from seatrial.model import SeatrialError, UsageError
from seatrial.train import checkpoint, loop, parallel, weights
from seatrial.train.train_config import Schedule, TrainConfig
from tests.train import ranks
from tests.train.ranks import Failed, config


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """In this process, too: threads that wait for each other on a busy machine are slower than one."""
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
def test_one_process_ddp_and_fsdp2_compute_the_same(tmp_path: Path, kind: str) -> None:
    """From one seed, at one global batch of 8 sequences: one process, two ranks of 4, and two micro-batches of 2."""
    wanted = TrainConfig.model_validate(config("qwen2-tiny", **TRAINS[kind]).model_dump())
    fsdp = wanted.model_copy(update={"parallel": wanted.parallel.model_copy(update=FSDP)})
    loop.train(wanted.model_copy(update={"bsz": 8}), tmp_path / "one")
    outs = {"ddp": wanted, "fsdp2": fsdp, "accumulated": fsdp.model_copy(update={"bsz": 2, "grad_accum": 2})}
    for name, settings in outs.items():
        found = ranks.run(2, ranks.train, settings, tmp_path / name)
        assert not any(isinstance(one, Failed) for one in found), found
    alone = losses(tmp_path / "one")
    assert alone[-1] < alone[0] < math.log(257) + 0.2
    for name in outs:
        assert losses(tmp_path / name) == pytest.approx(alone, rel=1e-5), name


@pytest.mark.training
def test_what_saves_time_or_memory_changes_no_result(tmp_path: Path) -> None:
    variants: dict[str, dict[str, Any]] = {
        "plain": {},
        "not prefetched": {"parallel": {"prefetch": 0}},
        "kept gathered": {"parallel": {"prefetch": 2, "reshard_after_forward": False}},
        "offloaded": {"parallel": {"cpu_offload": True}},
        "recomputed": {"gradient_checkpointing": True},
        "one chunk": {"loss_chunks": 1},
        "coarse": {"bf16": True, "parallel": {"reduce_dtype": "bf16"}},
    }
    for name, changes in variants.items():
        settings = config(max_steps=3, **{**changes, "parallel": {**FSDP, **changes.get("parallel", {})}})
        found = ranks.run(2, ranks.train, settings, tmp_path / name)
        assert not any(isinstance(one, Failed) for one in found), (name, found)
        assert losses(tmp_path / name) == pytest.approx(
            losses(tmp_path / "plain"), rel=0.01 if name == "coarse" else 1e-5
        )
    assert losses(tmp_path / "coarse") != losses(tmp_path / "plain")


@pytest.mark.training
def test_two_replicas_of_two_shards_compute_what_four_shards_do(tmp_path: Path) -> None:
    """Also with clipping, whose norm is over both dimensions of the mesh; four shards go on from their checkpoint."""
    changes: dict[str, Any] = {
        "bsz": 2,
        "optimizer": {"max_grad_norm": 0.1},
        "checkpoint": {"every": 2, "resume": True},
    }
    four, two = (config(**changes, parallel=FSDP | {"replicas": replicas}) for replicas in (1, 2))
    held, told = [], []
    for settings, out in ((four, tmp_path / "four"), (two, tmp_path / "two"), (four, tmp_path / "two")):
        found = ranks.run(4, ranks.train, settings, out)
        assert not any(isinstance(one, Failed) for one in found), found
        assert losses(out) == pytest.approx(losses(tmp_path / "four"), rel=1e-5)
        held.append(found[0]["params_and_optimizer_expected_gib"])
        told.append((found[0]["strategy"], found[0]["replicas"]))
        shutil.rmtree(checkpoint.step_folder(out, 4))
    assert held == [held[0], 2 * held[0], held[0]]
    assert told == [("fsdp2", 1), ("fsdp2", 2), ("fsdp2", 1)]
    assert ranks.run(4, _spread, two) == [(0, 128)] * 4
    (failed,) = ranks.run(1, ranks.train, two, tmp_path / "odd")
    assert failed.said == "parallel.replicas 2 must divide 1 ranks, and leave each two or more"


def _spread(settings: TrainConfig) -> tuple[int, int]:
    """Faults of two replicas; rows of the embedding held here."""
    with parallel.process_group(60) as world:
        model = parallel.build(settings, world).model
        every = len(list(model.parameters()))
        assert len(parallel.sharding_errors(model, 4)) == len(parallel.sharding_errors(model, 4, 4)) == every
        return len(parallel.sharding_errors(model, 4, 2)), len(cast(DTensor, model.embed_tokens.weight).to_local())


@pytest.mark.training
def test_what_is_not_sharded_is_named(tmp_path: Path) -> None:
    model = weights.build_on_meta(config().architecture(), torch.float, torch.float)
    faults = parallel.sharding_errors(model, 2)
    assert faults[0] == "embed_tokens.weight is whole"
    assert len(faults) == len(list(model.parameters()))
    settings = config(parallel=FSDP)
    assert ranks.run(2, _shares, settings) == [(0, 128), (0, 128)]


def _shares(settings: TrainConfig) -> tuple[int, int]:
    """Faults with the true number of ranks; rows of the embedding held here."""
    with parallel.process_group(60) as world:
        model = parallel.build(settings, world).model
        assert len(parallel.sharding_errors(model, 4)) == len(list(model.parameters()))
        return len(parallel.sharding_errors(model, 2)), len(cast(DTensor, model.embed_tokens.weight).to_local())


def test_metrics_have_the_names_that_scripts_print(tmp_path: Path) -> None:
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


def test_a_folder_with_a_run_in_it_is_not_overwritten(tmp_path: Path) -> None:
    loop.train(config(), tmp_path)
    with pytest.raises(UsageError, match="holds a run"):
        ranks_alone(config(), tmp_path)


def ranks_alone(settings: TrainConfig, out: Path) -> Any:
    (found,) = ranks.run(1, ranks.train, settings, out)
    if isinstance(found, Failed):
        raise UsageError(found.said)
    return found


@pytest.mark.training
def test_the_loss_falls_towards_the_floor(tmp_path: Path) -> None:
    """The chain's 64 states are told from the 256 words first, and its transitions next."""
    report = loop.train(config(max_steps=60, bsz=8, data={"samples": 512}), tmp_path)
    assert report["loss_first"] == pytest.approx(math.log(256), abs=0.1)
    assert report["loss_entropy_bound"] < report["loss_last"] < math.log(64) - 0.5


def _damaged(settings: TrainConfig, out: Path, victim: int, what: str) -> dict[str, Any]:
    """The victim's third step goes wrong."""
    real = loop.Trainer.step

    def step(self: loop.Trainer, number: int, batches: Any) -> Any:
        if number == 3 and self.world.rank == victim and what == "loss":
            real_forward = self.built.model.output.forward
            nan = torch.tensor(math.nan)
            self.built.model.output.forward = lambda *a: real_forward(*a) * nan  # type: ignore[method-assign]
        if number == 3 and self.world.rank == victim and what == "gradient":
            real_look = self.built.model.gradient_hook
            assert real_look is not None
            self.built.model.gradient_hook = lambda gradient: real_look(gradient.mul_(math.inf)) or gradient
        if number == 3:
            self.before = [p.detach().clone() for p in map(parallel.unshard, self.built.trained_parameters)]  # type: ignore
        return real(self, number, batches)

    read = loop.Trainer._read

    def reading(self: loop.Trainer, taken: loop.PendingStep) -> Any:
        try:
            return read(self, taken)
        except loop.NonFiniteError as error:
            now = list(map(parallel.unshard, self.built.trained_parameters))
            same = all(torch.equal(a, b) for a, b in zip(self.before, now, strict=True))  # type: ignore
            raise SeatrialError(f"{error} | unchanged {same}") from error

    loop.Trainer.step, loop.Trainer._read = step, reading  # type: ignore[method-assign]
    return loop.train(settings, out)


@pytest.mark.training
@pytest.mark.parametrize(
    ("strategy", "what", "complaint"),
    [
        ("ddp", "loss", "rank 1 (vm): its loss is no number"),
        ("fsdp2", "loss", "rank 1 (vm): its loss is no number"),
        ("fsdp2", "gradient", "rank 1 (vm): its gradient is no number"),
    ],
)
def test_what_is_no_number_stops_all_ranks_names_one_and_changes_nothing(
    tmp_path: Path, strategy: str, what: str, complaint: str
) -> None:
    import socket

    settings = config(parallel={"strategy": strategy}, max_steps=6)
    found = ranks.run(2, _damaged, settings, tmp_path, 1, what)
    assert all(isinstance(one, Failed) for one in found), found
    told = [one.said for one in found if "which says why" not in one.said]
    assert told, found
    for said in told:
        assert said.startswith("step 3: loss ")
        assert complaint.replace("vm", socket.gethostname()) in said
        assert "rank 0" not in said
        assert said.endswith("unchanged True")
    assert len(losses(tmp_path)) == 2


@pytest.mark.training
def test_the_loss_is_a_mean_over_all_counted_tokens_of_all_ranks(tmp_path: Path) -> None:
    """A mean of the ranks' means would weigh a token of a rank with few more than one of a rank with many."""
    wanted = config(max_steps=3, data={"samples": 64, "variable_length": True})
    for name, count, settings in (("one", 1, wanted.model_copy(update={"bsz": 8})), ("two", 2, wanted)):
        found = ranks.run(count, ranks.train, settings, tmp_path / name)
        assert not any(isinstance(one, Failed) for one in found), found
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)


def test_the_learning_rate_ends_where_it_should() -> None:
    linear = Schedule(peak=1.0, schedule="linear", warmup_steps=2)
    assert [loop.scheduled_learning_rate(linear, step, 6) for step in range(1, 7)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25]
    cosine = Schedule(peak=1.0, schedule="cosine", min_ratio=0.1)
    assert loop.scheduled_learning_rate(cosine, 1, 10) == 1.0
    assert loop.scheduled_learning_rate(cosine, 6, 10) == pytest.approx(0.55)
    assert loop.scheduled_learning_rate(Schedule(peak=2.0, schedule="constant"), 9, 10) == 2.0
