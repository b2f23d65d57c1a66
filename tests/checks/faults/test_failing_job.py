"""The intentional fault of one rank; test_train_failure_on_rig.py has it on real ranks."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest

from seatrial.checks.check import Context
from seatrial.checks.faults import failing_job
from seatrial.checks.faults.failing_job import ERROR_MESSAGE, RECORD_FILE, FailingJobOptions, Fault, FaultRecord
from seatrial.model import SeatrialError
from seatrial.train import ddp


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The steps that were trained; training ends after three."""
    done: list[int] = []

    def training(device: str) -> Iterator[float]:
        assert device == "cpu"
        for number in (1, 2, 3):
            done.append(number)
            yield 1.0

    monkeypatch.setattr(ddp, "endless_training", training)
    monkeypatch.setattr(failing_job, "_TRAINING_S", 0.0)
    return done


def measure(folder: Path, rank: int, fault: Fault, failing_rank: int | None = None) -> None:
    context = Context(
        node="n1",
        rank=rank,
        world_size=2,
        local_rank=rank,
        device="cpu",
        expected_gpus=0,
        artifacts_dir=folder,
        run_dir=folder,
    )
    list(failing_job.measure(context, FailingJobOptions(fault=fault, rank=failing_rank)))


def test_last_rank_fails_after_its_record(tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(RuntimeError, match=ERROR_MESSAGE):
        measure(tmp_path, 1, "error")
    record = FaultRecord.model_validate_json((tmp_path / RECORD_FILE).read_text())
    assert (record.fault, record.rank, record.subject, record.pid) == ("error", 1, "n1/rank1", os.getpid())
    assert steps == [1]


def test_other_ranks_train_on(tmp_path: Path, steps: list[int]) -> None:
    measure(tmp_path, 0, "error")
    measure(tmp_path, 1, "error", failing_rank=0)
    assert not (tmp_path / RECORD_FILE).exists()
    assert steps == [1, 2, 3] * 2


@pytest.mark.parametrize(("fault", "number"), [("kill", signal.SIGKILL), ("stop", signal.SIGSTOP)])
def test_signal_is_sent_to_this_process_and_must_end_it(
    tmp_path: Path, steps: list[int], monkeypatch: pytest.MonkeyPatch, fault: Fault, number: signal.Signals
) -> None:
    sent = []
    monkeypatch.setattr(os, "kill", lambda pid, signal_: sent.append((pid, signal_)))
    with pytest.raises(RuntimeError, match=f"still running after {number.name}"):
        measure(tmp_path, 1, fault)
    assert sent == [(os.getpid(), number)]


def test_rank_outside_the_world_is_an_error(tmp_path: Path, steps: list[int]) -> None:
    with pytest.raises(SeatrialError, match="option rank is 2, expected less than the world size 2"):
        measure(tmp_path, 0, "kill", failing_rank=2)
    assert not steps
