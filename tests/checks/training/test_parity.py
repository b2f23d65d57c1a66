"""One process, DDP and FSDP2: runs in which something is wrong. Nothing is in tests/test_training_trial.py."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket

from seatrial.checks.training.parity import CHECK, STRATEGIES, compare_runs, training_configs
from seatrial.train import compare
from seatrial.train import train_config as settings
from seatrial.train.compare import StepRecord
from seatrial.train.train_config import TrainConfig
from tests.checks.training.check_helpers import failed_metrics
from tests.train import ranks
from tests.train.ranks import Failed
from tests.train.test_compare import record

VICTIM = 1
WANTED = settings.load("tiny/parity", ["max_steps=4"])


def _not_exchanged() -> AbstractContextManager[Any]:
    """The victim goes on with the gradients that it computed itself."""
    from seatrial.train import parallel

    real = parallel.replicate

    def replicate(model: Any, settings: TrainConfig, world: Any) -> Any:
        def average(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
            whole = bucket.buffer() / world.size
            dist.all_reduce(whole)
            future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
            future.set_result(bucket.buffer() if world.rank == VICTIM else whole)
            return future

        replica: Any = real(model, settings, world)
        replica.register_comm_hook(None, lambda state, bucket: average(bucket))  # torch reads annotations as they are
        return replica

    return patch.object(parallel, "replicate", replicate)


def _mean_of_means() -> AbstractContextManager[Any]:
    """Each rank divides by the number of its own tokens."""
    from seatrial.train import parallel

    real = parallel.World.all_reduce_sum

    def total(self: Any, value: torch.Tensor) -> torch.Tensor:
        return real(self, value) if value.is_floating_point() else value * self.size

    return patch.object(parallel.World, "all_reduce_sum", total)


def _repeats_a_sample() -> AbstractContextManager[Any]:
    """The victim reads what the first rank reads."""
    from seatrial.train import data

    real = data.block_order
    return patch.object(data, "block_order", lambda blocks, rank, *more, **skip: real(blocks, 0, *more, **skip))


FAULTS: dict[str, Callable[[], AbstractContextManager[Any]]] = {
    "not_exchanged": _not_exchanged,
    "mean_of_means": _mean_of_means,
    "repeats_a_sample": _repeats_a_sample,
}


def _train(runs: dict[str, TrainConfig], folder: Path) -> None:
    from seatrial.train import loop

    dist.init_process_group("gloo")
    for name, run in runs.items():
        with FAULTS.get(name, nullcontext)():
            loop.train(run, folder / name)


@pytest.mark.training
def test_a_fault_in_how_ranks_share_the_work_fails_and_is_told_apart(tmp_path: Path) -> None:
    runs = training_configs(WANTED, 2, tmp_path / "data")
    shared = {name: runs[name] for name in STRATEGIES} | dict.fromkeys(FAULTS, runs["ddp"])
    for count, some in ((1, {"alone": runs["alone"]}), (2, shared)):
        found = ranks.run(count, _train, some, tmp_path)
        assert not any(isinstance(one, Failed) for one in found), found
    read = {name: compare.read_steps(tmp_path / name, 0, WANTED.max_steps) for name in ("alone", *shared)}

    def judged(ddp: str) -> set[str]:
        twice = {f"{layout}-again": read[ddp if layout == "ddp" else layout] for layout in STRATEGIES}
        return failed_metrics(CHECK, compare_runs(read | twice | {"ddp": read[ddp]}), tmp_path)

    assert judged("ddp") == set()
    both = {"loss_difference.ddp", "grad_norm_difference.ddp"}
    assert judged("not_exchanged") == both
    assert judged("mean_of_means") == {*both, "steps_with_different_tokens.ddp"}
    assert judged("repeats_a_sample") == {*both, "steps_with_different_tokens.ddp"}


def falling(**changes: Any) -> list[StepRecord]:
    return [record(1, **changes), record(2, loss=4.0)]


@pytest.mark.parametrize(
    ("changed", "metrics"),
    [
        ({}, set()),
        ({"ddp-again": falling(loss=5.000000000000001)}, {"repeated_steps_differing.ddp"}),
        ({"fsdp2-again": falling(grad_norm=2.0000000000000004)}, {"repeated_steps_differing.fsdp2"}),
        ({"alone": [record(1), record(2)]}, {"loss_drop", "loss_difference.ddp", "loss_difference.fsdp2"}),
        ({"alone": falling(grad_norm=2.001)}, {f"grad_norm_difference.{layout}" for layout in STRATEGIES}),
    ],
)
def test_each_rule_can_fail(tmp_path: Path, changed: dict[str, list[StepRecord]], metrics: set[str]) -> None:
    runs = {name: falling() for name in training_configs(WANTED, 2, tmp_path)} | changed
    assert failed_metrics(CHECK, compare_runs(runs), tmp_path) == metrics


def test_one_process_takes_the_batches_of_all(tmp_path: Path) -> None:
    runs = training_configs(WANTED, 6, tmp_path)
    assert {
        name: run.bsz * run.grad_accum * (1 if name == "alone" else 6) for name, run in runs.items()
    } == dict.fromkeys(("alone", "ddp", "ddp-again", "fsdp2", "fsdp2-again"), 12)
    assert {run.data.samples for run in runs.values()} == {4 * 12}
