"""Forward passes of FSDP2 groups: a slow rank has long ones, a rank that waits for its weights has not."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

from seatrial.train.rank_times import RankTimes, slowdowns
from seatrial.train.step_timer import ForwardTimer
from seatrial.train.train_config import TrainConfig
from tests.train import ranks
from tests.train.hf import runs

SLOW_RANK = 1
EXTRA_S = 0.3  # of each forward pass of a block on the slow rank; noise of a loaded machine is less


def test_forward_passes_of_one_module_are_summed() -> None:
    model = nn.Linear(2, 2)
    timer = ForwardTimer(model, torch.device("cpu"))
    for _ in range(2):
        model(torch.zeros(1, 2))
    forwards = timer.take()
    assert len(forwards) == 2
    assert timer.take() == []
    assert (timer.seconds(forwards) or 0) >= 0
    assert timer.seconds([]) == 0


def _train(config: TrainConfig, out: Path, slow_module: str) -> dict[str, Any]:
    import os

    from seatrial.train import hf, loop

    module, _, name = slow_module.rpartition(".")
    owner = getattr(__import__(module, fromlist=[name]), name)
    forward = owner.forward

    def slow_forward(self: nn.Module, *arguments: Any, **options: Any) -> Any:
        time.sleep(EXTRA_S)
        return forward(self, *arguments, **options)

    with patch.object(owner, "forward", slow_forward if os.environ["RANK"] == str(SLOW_RANK) else forward):
        return hf.train(config, out) if config.stack == "hf" else loop.train(config, out)


@pytest.mark.training
@pytest.mark.parametrize(
    ("stack", "strategy", "slow_module"),
    [
        ("native", "fsdp2", "seatrial.train.decoder.Block"),
        ("hf", "fsdp2", "transformers.models.mistral.modeling_mistral.MistralDecoderLayer"),
        ("hf", "ddp", "transformers.models.mistral.modeling_mistral.MistralDecoderLayer"),
    ],
)
def test_slow_rank_is_told_apart_from_the_rank_that_waits_for_it(
    tmp_path: Path, stack: str, strategy: str, slow_module: str
) -> None:
    overrides = (f"stack={stack}", f"parallel.strategy={strategy}", "max_steps=9", "untimed_steps=2")
    config = runs.config("fsdp-mistral-7b", *overrides, "checkpoint.every=0", "export=false", "data.samples=64")
    results = ranks.require_success(ranks.run(2, _train, config, tmp_path / "out", slow_module))
    times = [RankTimes.from_metrics(rank) for rank in results[0]["ranks"]]
    by_rank = slowdowns(times)
    assert by_rank[SLOW_RANK].low > 1.5
    assert by_rank[1 - SLOW_RANK].high < 0.7
    # both ranks have long steps: step times do not show which one is slow
    assert min(min(rank.seconds) for rank in times) > EXTRA_S
    assert results[0]["slowest_rank"]["rank"] == SLOW_RANK
