"""Steps and strategies of the Trainer; test_run.py has whole trainings."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from seatrial.model import SeatrialError
from seatrial.train import parallel
from seatrial.train.hf.step_recorder import StepRecorder, applied_strategy
from seatrial.train.parallel import World
from seatrial.train.progress import StartupPhases, StepLog
from tests.train.hf import runs


class TwoRanks(World):
    """Rank 0 of two ranks; rank 1 reports ``peer_is_finite``."""

    peer_is_finite = True

    def gather(self, value: Any) -> list[Any]:
        return [value, (1, "n1", self.peer_is_finite)]


@pytest.fixture
def recorder(tmp_path: Path) -> Iterator[StepRecorder]:
    world = TwoRanks(0, 2, torch.device("cpu"), "n0")
    config, phases = runs.config("sft-smollm-135m"), StartupPhases(0.0, "import")
    trainer: Any = SimpleNamespace(tokens=0, local_loss=torch.tensor(1.0), model_wrapped=nn.Linear(1, 1))
    with closing(StepLog(config, world, tmp_path, 0)) as step_log:
        yield StepRecorder(trainer, config, "ddp", world, step_log, phases)


def log(recorder: StepRecorder, step: int, **logs: float) -> None:
    state: Any = SimpleNamespace(global_step=step, epoch=0.5)
    recorder.on_log(None, state, None, logs)  # type: ignore[arg-type]


def begin(recorder: StepRecorder) -> None:
    recorder.on_train_begin(None, SimpleNamespace(global_step=0), None)  # type: ignore[arg-type]


def test_step_counts_the_tokens_of_all_ranks_since_the_last_one(recorder: StepRecorder) -> None:
    begin(recorder)
    for step, tokens in ((1, 10), (2, 25)):
        recorder._trainer.tokens = tokens
        log(recorder, step, loss=2.0, grad_norm=1.0, learning_rate=1e-3)
    log(recorder, 2, train_runtime=3.0)  # the summary after the last step
    assert [(step.step, step.tokens, step.loss) for step in recorder.steps] == [(1, 20, 2.0), (2, 30, 2.0)]
    assert all(step.seconds > 0 for step in recorder.steps)


@pytest.mark.parametrize("name", ["loss", "grad_norm"])
@pytest.mark.parametrize(
    ("peer", "source"),
    [
        (False, "the loss is not finite on rank 1 on n1"),
        (
            True,
            "the last micro-batch's loss is finite on all ranks: "
            "the cause is in an earlier micro-batch or the gradients",
        ),
    ],
)
def test_non_finite_step_names_the_rank(recorder: StepRecorder, name: str, peer: bool, source: str) -> None:
    begin(recorder)
    recorder._world.peer_is_finite = peer  # type: ignore[attr-defined]
    with pytest.raises(SeatrialError, match=f"step 3: {name} is nan; {source}. No checkpoint of step 3 was written"):
        log(recorder, 3, **{"loss": 1.0, name: math.nan})
    assert recorder.steps == []


def test_other_strategy_than_configured_is_an_error(recorder: StepRecorder) -> None:
    recorder._strategy = "fsdp2"
    with pytest.raises(SeatrialError, match="runs with strategy ddp, expected fsdp2"):
        begin(recorder)


def test_strategy_is_read_from_the_parameters() -> None:
    model = nn.Linear(2, 2)
    assert applied_strategy(model) == "ddp"
    model.weight.__dict__["ds_id"] = 0  # set by DeepSpeed ZeRO-3
    assert applied_strategy(model) == "zero3"
    with parallel.process_group(60):
        sharded = nn.Linear(2, 2)
        fully_shard(sharded, mesh=init_device_mesh("cpu", (1,)))
        assert applied_strategy(sharded) == "fsdp2"
