"""Runs the check train.ddp as the worker does, once for each scenario with an injected fault."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import chain, islice
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import GradBucket
from torch.nn.parallel import DistributedDataParallel

from seatrial.bench.group import close_group, open_group
from seatrial.checks import catalog
from seatrial.checks.check import Context
from seatrial.checks.training.ddp import CHECK
from seatrial.train import data, ddp, loop, parallel
from seatrial.train.loop import Trainer
from seatrial.train.progress import Step
from seatrial.worker import measure

Fault = Callable[[int], AbstractContextManager[Any]]
FAULTY_RANK = 1


def _flip_one_bit(rank: int) -> AbstractContextManager[Any]:
    """Flips one bit of a weight on the faulty rank after training."""
    original = Trainer.run_steps

    def run_steps(self: Trainer, steps: int) -> list[Step]:
        steps_run = original(self, steps)
        next(self.built.model.parameters()).data.view(torch.int32)[0, 0] ^= 1
        return steps_run

    return patch.object(Trainer, "run_steps", run_steps) if rank == FAULTY_RANK else nullcontext()


def _drop_a_sample(rank: int) -> AbstractContextManager[Any]:
    """The faulty rank reads its second sample twice and its first never."""
    original = data.block_order

    def block_order(blocks: int, rank: int, ranks: int, seed: int, skip: int = 0) -> Iterator[int]:
        _, second, *others = islice(samples := original(blocks, rank, ranks, seed, skip), 3)
        return chain([second, second, *others], samples)

    return patch.object(data, "block_order", block_order) if rank == FAULTY_RANK else nullcontext()


def _frozen_order(rank: int) -> AbstractContextManager[Any]:
    """Every epoch has the order of the first."""
    del rank
    original = data.block_order

    def block_order(blocks: int, rank: int, ranks: int, seed: int, skip: int = 0) -> Iterator[int]:
        return original(blocks, rank, ranks, seed, skip % (blocks // ranks))

    return patch.object(data, "block_order", block_order)


def _gradients_by(hook: Callable[[GradBucket], torch.futures.Future[torch.Tensor]]) -> Fault:
    """All ranks replace DDP's gradient average by ``hook``."""

    class Replica(DistributedDataParallel):
        def __init__(self, *arguments: Any, **options: Any) -> None:
            super().__init__(*arguments, **options)
            self.register_comm_hook(None, lambda state, bucket: hook(bucket))

    return lambda rank: patch.object(parallel, "DistributedDataParallel", Replica)


def _not_reduced(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    future: torch.futures.Future[torch.Tensor] = torch.futures.Future()
    future.set_result(bucket.buffer())
    return future


def _summed(bucket: GradBucket) -> torch.futures.Future[torch.Tensor]:
    buffer = bucket.buffer()
    dist.all_reduce(buffer)
    return _not_reduced(bucket)


def _explode(rank: int) -> AbstractContextManager[Any]:
    del rank
    return patch.object(loop, "scheduled_learning_rate", lambda *_: 1e30)


def _wrong_local_rank(rank: int) -> AbstractContextManager[Any]:
    return patch.dict(os.environ, {"LOCAL_RANK": "0"}) if rank == FAULTY_RANK else nullcontext()


def _slow_without_ddp(rank: int) -> AbstractContextManager[Any]:
    """Independent training is slower by 10 s per step; DDP training is not."""
    del rank
    original = Trainer.run_steps

    def run_steps(self: Trainer, steps: int) -> list[Step]:
        steps_run = original(self, steps)
        return steps_run if self.world.size > 1 else [replace(step, seconds=10 + step.seconds) for step in steps_run]

    return patch.object(Trainer, "run_steps", run_steps)


FAULTS: dict[str, Fault] = {
    "flipped_bit": _flip_one_bit,
    "dropped_sample": _drop_a_sample,
    "frozen_order": _frozen_order,
    "not_reduced": _gradients_by(_not_reduced),
    "sum_not_mean": _gradients_by(_summed),
    "exploding": _explode,
    "wrong_local_rank": _wrong_local_rank,
    "slow_without_ddp": _slow_without_ddp,
}


def main(scenarios: dict[str, Any], out: Path) -> str:
    """Runs all scenarios on one rank; returns its measurements by scenario as JSON.

    A scenario has ``options`` and ``fault``, a name in FAULTS or None; its artifacts go to ``out``/SCENARIO.
    """
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    rank, local_rank, world_size = (int(os.environ[name]) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE"))
    ddp.BATCH_OVERRIDES = (*ddp.BATCH_OVERRIDES, *ddp.TINY_OVERRIDES)  # faster, and detects the same faults
    open_group("cpu", timeout_s=60)
    records = {}
    for name, scenario in scenarios.items():
        folder = out / name
        folder.mkdir(exist_ok=True)
        context = Context(
            node="node0",
            rank=rank,
            world_size=world_size,
            local_rank=local_rank,
            device="cpu",
            expected_gpus=None,
            artifacts_dir=folder,
            run_dir=out,
        )
        fault = FAULTS[scenario["fault"]](rank) if scenario["fault"] else nullcontext()
        with fault:
            records[name] = measure(catalog()[CHECK.name], context, scenario["options"]).model_dump(mode="json")
    close_group()
    return json.dumps(records, allow_nan=False)
