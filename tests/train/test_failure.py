"""One rank of two fails: both end, quickly, and one says why."""

from __future__ import annotations

import os
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from seatrial.model import UsageError
from seatrial.train import failure, loop, parallel
from seatrial.train.train_config import TrainConfig
from tests.processes import until
from tests.train import ranks
from tests.train.hf import runs
from tests.train.ranks import Failed, config


def failures(found: list[Any]) -> tuple[str, str]:
    assert all(isinstance(one, Failed) for one in found), found
    first, second = (one.said for one in found)
    return first, second


def _hurry(stuck_s: float = 60) -> None:
    """Only who is stuck leaves soon: on a busy machine others may take long to come to know of a failure."""
    failure.LOOK_EVERY_S, failure.STUCK_S = 0.2, stuck_s


def _full(settings: TrainConfig, out: Path) -> Any:
    """The second micro-batch does not fit on rank 1; rank 0 waits for its gradients."""
    from seatrial.train import hf
    from seatrial.train.hf.step_recorder import CountingTrainer

    _hurry()

    def full(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    if os.environ["RANK"] == "1":
        CountingTrainer.compute_loss = full  # type: ignore[method-assign]
        parallel.gradient_sync = full
    return (hf.train if settings.stack == "hf" else loop.train)(settings, out)


@pytest.mark.training
@pytest.mark.parametrize("stack", ["native", "hf"])
def test_a_batch_that_does_not_fit_on_one_rank_ends_all_and_is_explained_once(tmp_path: Path, stack: str) -> None:
    wanted = config() if stack == "native" else runs.config("sft-smollm-135m", "data.samples=32")
    other, told = failures(ranks.run(2, _full, wanted, tmp_path, seconds=120))
    assert re.fullmatch(r"rank 0 on \S+ ended with rank 1 on \S+, which says why", other)
    assert re.match(r"the CPU of \S+ is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n", told)
    assert [line[:5] for line in told.splitlines()[2:]] == ["  1. ", "  2. ", "  3. "]
    assert not (tmp_path / "metrics.json").exists()


def _unequal_ends(how: str) -> None:
    """Rank 1 ends; rank 0 is in an exchange, or stuck as NCCL is when a peer is gone."""
    _hurry(stuck_s=0.4 if how == "stuck" else 60)
    with failure.propagate_failure(), parallel.process_group(60) as world:
        if world.rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 1:
            raise UsageError("no such weights")
        if how == "stuck":
            time.sleep(100)
        dist.all_reduce(torch.ones(1))


@pytest.mark.training
def test_a_rank_that_is_stuck_ends_with_the_one_that_failed() -> None:
    before = time.monotonic()
    stuck, told = ranks.run(2, _unequal_ends, "stuck", seconds=90)
    assert stuck is None  # its process ended, which the main thread knew nothing of
    assert told == Failed("no such weights")
    assert time.monotonic() - before < 80


@pytest.mark.training
def test_a_peer_that_was_killed_is_told_from_one_that_failed() -> None:
    other, killed = ranks.run(2, _unequal_ends, "killed", seconds=90)
    assert killed is None
    assert re.match(r"rank 0 on \S+ lost a peer that said nothing: .*Such a rank was killed", other.said)


def _unreadable(settings: TrainConfig, out: Path) -> Any:
    from seatrial.train import hf

    _hurry()
    try:
        return (hf.train if settings.stack == "hf" else loop.train)(settings, out)
    finally:
        knows = out.parent / "rank 1 knows"
        if os.environ["RANK"] == "1":
            knows.touch()
        until(knows.exists)  # rank 0 holds the store here; torchrun's agent does otherwise


@pytest.mark.training
@pytest.mark.parametrize("stack", ["native", "hf"])
def test_rows_that_rank_0_cannot_use_end_all_ranks_and_are_told_once(tmp_path: Path, stack: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "b"}\n')
    override = f"data.path={path}"
    wanted = runs.config("sft-smollm-135m", override, f"stack={stack}")
    said = failures(ranks.run(2, _unreadable, wanted, tmp_path / "out", seconds=120))
    told = [one for one in said if "which says why" not in one]
    assert len(told) == 1
    assert str(path) in told[0]
    assert not list(tmp_path.glob("out/data/*"))
