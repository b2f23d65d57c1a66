"""Failure of one of two ranks: both exit soon, and one reports the cause."""

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


def failures(results: list[Any]) -> tuple[Failed, Failed]:
    assert all(isinstance(result, Failed) for result in results), results
    first, second = results
    return first, second


def _poll_often(stuck_s: float = 60) -> None:
    """Shortens the polling interval; on a busy machine a rank may take long to notice a failure."""
    failure.POLL_INTERVAL_S, failure.STUCK_S = 0.2, stuck_s


def _out_of_memory(settings: TrainConfig, out: Path) -> Any:
    """The second micro-batch does not fit on rank 1; rank 0 waits for its gradients."""
    from seatrial.train import hf
    from seatrial.train.hf.step_recorder import CountingTrainer

    _poll_often()

    def out_of_memory(*_: Any, **__: Any) -> Any:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB.\nmore")

    if os.environ["RANK"] == "1":
        CountingTrainer.compute_loss = out_of_memory  # type: ignore[method-assign]
        parallel.gradient_sync = out_of_memory
    return (hf.train if settings.stack == "hf" else loop.train)(settings, out)


@pytest.mark.training
@pytest.mark.parametrize("stack", ["native", "hf"])
def test_out_of_memory_on_one_rank_ends_all_ranks_with_one_report(tmp_path: Path, stack: str) -> None:
    settings = config() if stack == "native" else runs.config("sft-smollm-135m", "data.samples=32")
    other, failed = failures(ranks.run(2, _out_of_memory, settings, tmp_path, seconds=120))
    assert other.error_type == "PeerFailed"
    assert re.search(r"rank 0 on .* rank 1 on ", other.message)
    assert re.match(
        r"the CPU of \S+ is out of memory: CUDA out of memory. Tried to allocate 2.00 GiB.\n", failed.message
    )
    assert [line[:5] for line in failed.message.splitlines()[2:]] == ["  1. ", "  2. ", "  3. "]
    assert not (tmp_path / "metrics.json").exists()


def _one_rank_ends(how: str) -> None:
    """Rank 1 ends; rank 0 is in a collective, or blocked as NCCL is when a peer is lost."""
    _poll_often(stuck_s=0.4 if how == "stuck" else 60)
    with failure.propagate_failure(), parallel.process_group(60) as world:
        if world.rank == 1 and how == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        if world.rank == 1:
            raise UsageError("no such weights")
        if how == "stuck":
            time.sleep(1000)
        dist.all_reduce(torch.ones(1))


@pytest.mark.training
def test_a_blocked_rank_exits_after_a_failure_of_its_peer() -> None:
    blocked, failed = ranks.run(2, _one_rank_ends, "stuck", seconds=240)
    assert blocked is None  # its process exited
    assert failed == Failed("no such weights", "UsageError")


@pytest.mark.training
def test_a_killed_peer_is_reported_as_lost() -> None:
    other, killed = ranks.run(2, _one_rank_ends, "killed", seconds=240)
    assert killed is None
    assert other.error_type == "SeatrialError"
    assert re.match(r"rank 0 on \S+: a peer disconnected", other.message)


def _unreadable(settings: TrainConfig, out: Path) -> Any:
    from seatrial.train import hf

    _poll_often()
    try:
        return (hf.train if settings.stack == "hf" else loop.train)(settings, out)
    finally:
        finished = out.parent / "rank 1 finished"
        if os.environ["RANK"] == "1":
            finished.touch()
        until(finished.exists)  # rank 0 hosts the store here; with torchrun the agent does


@pytest.mark.training
@pytest.mark.parametrize("stack", ["native", "hf"])
def test_invalid_rows_on_rank_0_end_all_ranks_with_one_report(tmp_path: Path, stack: str) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text('{"prompt": "b"}\n')
    override = f"data.path={path}"
    settings = runs.config("sft-smollm-135m", override, f"stack={stack}")
    failed = failures(ranks.run(2, _unreadable, settings, tmp_path / "out", seconds=120))
    (root_cause,) = (failure for failure in failed if failure.is_root_cause)
    assert str(path) in root_cause.message
    assert not list(tmp_path.glob("out/data/*"))
