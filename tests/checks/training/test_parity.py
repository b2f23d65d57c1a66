"""train.parity with injected faults. tests/pipeline/test_training_trial.py has the passing run."""

from __future__ import annotations

import json
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from seatrial.checks.declare import Value
from seatrial.checks.training.parity import CHECK, STRATEGIES, VARIANTS, compare_runs, memory_use, training_configs
from seatrial.train import compare, train_config
from seatrial.train.compare import StepRecord
from seatrial.train.train_config import TrainConfig
from tests.checks.training.check_helpers import failed_metrics
from tests.train import ranks
from tests.train.ranks import Failed
from tests.train.test_compare import record

FAULTY_RANK = 1
COMPARED = (*STRATEGIES, *VARIANTS)
CONFIG = train_config.load("tiny/parity", ["max_steps=4"])


def _without_all_reduce() -> AbstractContextManager[Any]:
    """The faulty rank uses its local gradients."""
    from seatrial.train import parallel

    real = parallel.replicate

    def replicate(model: Any, settings: TrainConfig, world: Any) -> Any:
        def average(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            averaged = bucket.buffer() / world.size
            dist.all_reduce(averaged)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() if world.rank == FAULTY_RANK else averaged)
            return future

        replica: Any = real(model, settings, world)
        replica.register_comm_hook(None, lambda state, bucket: average(bucket))  # torch inspects annotations
        return replica

    return patch.object(parallel, "replicate", replicate)


def _mean_of_means() -> AbstractContextManager[Any]:
    """Each rank divides by its own number of tokens."""
    from seatrial.train import parallel

    real = parallel.World.all_reduce_sum

    def total(self: Any, value: torch.Tensor) -> torch.Tensor:
        return real(self, value) if value.is_floating_point() else value * self.size

    return patch.object(parallel.World, "all_reduce_sum", total)


def _duplicate_sample() -> AbstractContextManager[Any]:
    """All ranks read the samples of rank 0."""
    from seatrial.train import data

    real = data.block_order
    return patch.object(data, "block_order", lambda blocks, rank, *more, **skip: real(blocks, 0, *more, **skip))


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "without_all_reduce": _without_all_reduce,
    "mean_of_means": _mean_of_means,
    "duplicate_sample": _duplicate_sample,
}


def _train(configs: dict[str, TrainConfig], folder: Path) -> None:
    from seatrial.train import loop

    dist.init_process_group("gloo")
    for name, config in configs.items():
        with FAULTS.get(name, nullcontext)():
            loop.train(config, folder / name)


@pytest.mark.training
def test_each_injected_fault_fails_its_metrics(tmp_path: Path) -> None:
    configs = training_configs(CONFIG, 2, tmp_path / "data")
    on_two_ranks = {name: configs[name] for name in (*STRATEGIES, *VARIANTS)} | dict.fromkeys(FAULTS, configs["ddp"])
    for count, selected in ((1, {"single_process": configs["single_process"]}), (2, on_two_ranks)):
        results = ranks.run(count, _train, selected, tmp_path)
        assert not any(isinstance(result, Failed) for result in results), results
    names = ("single_process", *on_two_ranks)
    steps = {name: compare.read_steps(tmp_path / name, 0, CONFIG.max_steps) for name in names}

    def failed(ddp: str) -> set[str]:
        repeated = {f"{name}-repeated": steps[ddp if name == "ddp" else name] for name in STRATEGIES}
        return failed_metrics(CHECK, compare_runs(steps | repeated | {"ddp": steps[ddp]}))

    assert failed("ddp") == set()
    reports = {name: json.loads((tmp_path / name / "metrics.json").read_text()) for name in COMPARED}
    memory = {item.name: item.value for item in memory_use(reports) if isinstance(item, Value)}
    assert all(0 <= memory[f"state_excess.{name}"] < 1 for name in COMPARED[1:])  # 257 rows on two ranks
    groups = {name: reports[name]["fsdp_groups"] for name in COMPARED}
    assert groups == {"ddp": 0, "fsdp2": 4, "fsdp2_by_size": 6, "fsdp2_unwrapped": 1, "fsdp2_cpu_offload": 4}
    largest = {name: reports[name]["fsdp_largest_group_gib"] for name in COMPARED[1:]}
    assert largest["fsdp2_by_size"] < largest["fsdp2"] < largest["fsdp2_unwrapped"]
    # every weight is gathered at once: as many bytes as DDP holds
    assert largest["fsdp2_unwrapped"] == reports["ddp"]["ranks"][0]["parameters_gib"]
    loss_and_norm = {"loss_difference.ddp", "grad_norm_difference.ddp"}
    assert failed("without_all_reduce") == loss_and_norm
    assert failed("mean_of_means") == {*loss_and_norm, "steps_with_different_tokens.ddp"}
    assert failed("duplicate_sample") == {*loss_and_norm, "steps_with_different_tokens.ddp"}


def test_unsharded_tensor_exceeds_the_share_of_a_rank(tmp_path: Path) -> None:
    def report(gib: float) -> dict[str, Any]:
        rank = {"parameters_gib": gib, "gradients_gib": gib, "optimizer_gib": 2 * gib, "state_device": "cpu"}
        return {
            "ranks": [rank] * 4,
            "world_size": 4,
            "fsdp_groups": 1,
            "fsdp_largest_group_gib": 1,
            "memory_peak_gib": None,
        }

    runs = {name: falling_loss() for name in training_configs(CONFIG, 4, tmp_path)}
    reports = {name: report(1.0 if name == "ddp" else 0.25) for name in COMPARED} | {"fsdp2_by_size": report(0.3)}
    observations = [*compare_runs(runs), *memory_use(reports)]
    assert failed_metrics(CHECK, observations) == {"state_excess.fsdp2_by_size"}


def falling_loss(**changes: Any) -> list[StepRecord]:
    return [record(1, **changes), record(2, loss=4.0)]


@pytest.mark.parametrize(
    ("changed", "metrics"),
    [
        ({}, set()),
        ({"ddp-repeated": falling_loss(loss=5.000000000000001)}, {"repeated_steps_differing.ddp"}),
        ({"fsdp2-repeated": falling_loss(grad_norm=2.0000000000000004)}, {"repeated_steps_differing.fsdp2"}),
        ({"single_process": [record(1), record(2)]}, {"loss_drop", *(f"loss_difference.{name}" for name in COMPARED)}),
        ({"single_process": falling_loss(grad_norm=2.001)}, {f"grad_norm_difference.{name}" for name in COMPARED}),
        ({"fsdp2_cpu_offload": falling_loss(loss=5.001)}, {"loss_difference.fsdp2_cpu_offload"}),
    ],
)
def test_each_rule_can_fail(tmp_path: Path, changed: dict[str, list[StepRecord]], metrics: set[str]) -> None:
    runs = {name: falling_loss() for name in training_configs(CONFIG, 2, tmp_path)} | changed
    assert failed_metrics(CHECK, compare_runs(runs)) == metrics


def test_all_runs_have_the_same_global_batch(tmp_path: Path) -> None:
    configs = training_configs(CONFIG, 6, tmp_path)
    global_batches = {
        name: config.bsz * config.grad_accum * (1 if name == "single_process" else 6)
        for name, config in configs.items()
    }
    names = ("single_process", "ddp", "ddp-repeated", "fsdp2", "fsdp2-repeated", *VARIANTS)
    assert global_batches == dict.fromkeys(names, 12)
    assert {config.data.samples for config in configs.values()} == {4 * 12}
