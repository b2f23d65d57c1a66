"""Disks that are full, and checkpoints of something else."""

from __future__ import annotations

import json
import re
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from seatrial.model import SeatrialError, UsageError
from seatrial.train import disk, failure
from seatrial.train.hf import checkpoints
from seatrial.train.train_config import TrainConfig
from tests.checks.host import mounts
from tests.train import ranks
from tests.train.hf import runs

SHORT = ("max_steps=3", "untimed_steps=0", "checkpoint.every=1", "checkpoint.keep=9", "grad_accum=1", "data.samples=32")


def _no_room(settings: TrainConfig, out: Path) -> Any:
    """From the second checkpoint on, no file takes more than 64 KiB."""
    from seatrial.train.hf.step_recorder import CountingTrainer

    failure.GRACE_S = 0.2
    real = CountingTrainer._save_checkpoint

    def save(self: CountingTrainer, *arguments: Any) -> None:
        if self.state.global_step == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        real(self, *arguments)

    CountingTrainer._save_checkpoint = save  # type: ignore[method-assign,assignment]
    return runs.train(settings, out)


@pytest.mark.training
def test_where_there_is_no_room_the_one_before_is_kept_and_gone_on_from(tmp_path: Path) -> None:
    wanted = runs.config("sft-smollm-135m", *SHORT)
    told, other = ranks.run(2, _no_room, wanted, tmp_path)
    assert re.match(r"cannot write the checkpoint \S+/checkpoint-2: .*File too large", told.said)
    assert "Earlier ones were not touched" in told.said
    assert re.search("exits because rank 0|a peer disconnected", other.said)
    assert checkpoints.newest_complete(tmp_path) == tmp_path / "checkpoints" / "checkpoint-1"
    assert not list((tmp_path / "checkpoints").glob("checkpoint-2/*.safetensors"))  # half a file would fill the disk
    found = ranks.run(2, runs.train, runs.config("sft-smollm-135m", *SHORT, "checkpoint.resume=true"), tmp_path)
    assert not any(isinstance(one, ranks.Failed) for one in found), found
    assert runs.steps(tmp_path)[-1]["step"] == 3
    note = json.loads((tmp_path / "checkpoints" / "checkpoint-3" / checkpoints.METADATA_FILE).read_text())
    assert (note["strategy"], note["world_size"]) == ("ddp", 2)


def test_a_checkpoint_of_something_else_is_refused(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    with checkpoints.write_errors_handled(tmp_path, model, "zero3"):
        pass
    checkpoints.check_compatible(tmp_path, model, "zero3")
    wrong: tuple[tuple[nn.Module, str, str], ...] = (
        (nn.Linear(2, 4), "zero3", r"of another model: bias is \[3\], this run's is \[4\]"),
        (nn.Linear(2, 3, bias=False), "zero3", r"of another model: bias is \[3\], this run's is not there"),
        (model, "ddp", "of strategy zero3, this run's is ddp"),
    )
    for other, strategy, complaint in wrong:
        with pytest.raises(UsageError, match=complaint):
            checkpoints.check_compatible(tmp_path, other, strategy)
    note = json.loads((tmp_path / checkpoints.METADATA_FILE).read_text())
    (tmp_path / checkpoints.METADATA_FILE).write_text(json.dumps(note | {"world_size": 4}))
    with pytest.raises(UsageError, match="of 4 ranks, and these are 1: ZeRO-3"):
        checkpoints.check_compatible(tmp_path, model, "zero3")


def test_what_is_cut_short_is_not_gone_on_from(tmp_path: Path) -> None:
    for step, text in ((9, "{}"), (10, '{"cut'), (11, None)):
        place = tmp_path / "checkpoints" / f"checkpoint-{step}"
        place.mkdir(parents=True)
        if text is not None:
            (place / checkpoints.LAST_WRITTEN_FILE).write_text(text)
    assert checkpoints.newest_complete(tmp_path) == tmp_path / "checkpoints" / "checkpoint-9"
    assert checkpoints.newest_complete(tmp_path / "none") is None


def test_what_is_not_the_disks_is_left_alone(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="peer"),
        checkpoints.write_errors_handled(tmp_path / "new", nn.Linear(1, 1), "ddp"),
    ):
        raise RuntimeError("peer")


def short() -> RuntimeError:
    return RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter: file write failed")


@mounts.needs_mount
def test_a_full_disk_is_told_from_a_broken_one(tmp_path: Path) -> None:
    words = "cannot write the checkpoint .*file write failed. Earlier"
    with (
        mounts.tmpfs(tmp_path / "small", "size=64k") as small,
        pytest.raises(disk.DiskFullError, match=words),
        checkpoints.write_errors_handled(small / "new", nn.Linear(1, 1), "ddp"),
    ):
        raise short()
    with (
        pytest.raises(SeatrialError, match=words) as broken,
        checkpoints.write_errors_handled(tmp_path / "new", nn.Linear(1, 1), "ddp"),
    ):
        raise short()
    assert not isinstance(broken.value, disk.DiskFullError)
