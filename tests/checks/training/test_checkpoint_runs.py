"""The plan of the runs of train.checkpoint."""

from __future__ import annotations

from pathlib import Path

import pytest

from seatrial.checks.training._checkpoint_runs import CheckpointPlan, checkpoint_plan
from seatrial.model import UsageError
from seatrial.train import train_config


def make_plan(folder: Path, ranks: int = 2) -> CheckpointPlan:
    config, rate_config = (train_config.load(f"tiny/{name}") for name in ("checkpoint", "checkpoint-rate"))
    return checkpoint_plan(config, rate_config, folder, ranks)


def test_fewer_ranks_divide_the_global_batch(tmp_path: Path) -> None:
    assert [make_plan(tmp_path, ranks).fewer_ranks for ranks in (1, 2, 3, 4, 6, 7)] == [0, 1, 1, 2, 3, 1]
    for ranks in (2, 3, 6):
        plan = make_plan(tmp_path, ranks)
        assert plan.run_config(4, 4, ranks=plan.fewer_ranks).grad_accum * plan.fewer_ranks == ranks


def test_config_must_save_at_half_of_its_steps(tmp_path: Path) -> None:
    config, rate_config = (train_config.load(f"tiny/{name}") for name in ("checkpoint", "checkpoint-rate"))
    with pytest.raises(UsageError, match=r"max_steps 7, checkpoint\.every 3"):
        checkpoint_plan(train_config.load("tiny/checkpoint", ["max_steps=7"]), rate_config, tmp_path, 2)
    with pytest.raises(UsageError, match=r"rate_config: .*max_steps 6, checkpoint\.every 3"):
        checkpoint_plan(config, config, tmp_path, 2)


def test_small_state_is_compared_and_a_large_state_is_timed(tmp_path: Path) -> None:
    config, rate_config = (train_config.load(name) for name in ("checkpoint", "checkpoint-rate"))
    fp32_with_adam = 12  # bytes per parameter
    assert config.architecture().parameters * fp32_with_adam < 0.6e9
    assert rate_config.architecture().parameters * fp32_with_adam > 2e9
    assert config.architecture().vocab_size % 2 == rate_config.architecture().vocab_size % 2 == 1
