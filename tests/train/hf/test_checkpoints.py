"""Full disks and incompatible checkpoints."""

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

SHORT_RUN = (
    "max_steps=3",
    "untimed_steps=0",
    "checkpoint.every=1",
    "checkpoint.keep=9",
    "grad_accum=1",
    "data.samples=32",
)


def _train_on_full_disk(settings: TrainConfig, out: Path) -> Any:
    """Train with files limited to 64 KiB from the second checkpoint on."""
    from seatrial.train.hf.step_recorder import CountingTrainer

    failure.GRACE_S = 0.2
    original = CountingTrainer._save_checkpoint

    def save(self: CountingTrainer, *arguments: Any) -> None:
        if self.state.global_step == 2:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            resource.setrlimit(resource.RLIMIT_FSIZE, (2**16, 2**16))
        original(self, *arguments)

    CountingTrainer._save_checkpoint = save  # type: ignore[method-assign,assignment]
    return runs.train(settings, out)


@pytest.mark.training
def test_training_resumes_from_the_checkpoint_before_a_full_disk(tmp_path: Path) -> None:
    settings = runs.config("sft-smollm-135m", *SHORT_RUN)
    rank_0, other = ranks.run(2, _train_on_full_disk, settings, tmp_path)
    assert re.match(r"cannot write the checkpoint \S+/checkpoint-2: .*File too large", rank_0.message)
    assert "checkpoint.resume=true" in rank_0.message
    assert re.search("exits because rank 0|a peer disconnected", other.message)
    assert checkpoints.newest_complete(tmp_path) == tmp_path / "checkpoints" / "checkpoint-1"
    # A partial checkpoint would fill the disk
    assert not list((tmp_path / "checkpoints").glob("checkpoint-2/*.safetensors"))
    results = ranks.run(2, runs.train, runs.config("sft-smollm-135m", *SHORT_RUN, "checkpoint.resume=true"), tmp_path)
    assert not any(isinstance(result, ranks.Failed) for result in results), results
    assert runs.steps(tmp_path)[-1]["step"] == 3
    metadata = json.loads((tmp_path / "checkpoints" / "checkpoint-3" / checkpoints.METADATA_FILE).read_text())
    assert (metadata["strategy"], metadata["world_size"]) == ("ddp", 2)


def test_incompatible_checkpoint_is_rejected(tmp_path: Path) -> None:
    model = nn.Linear(2, 3)
    with checkpoints.convert_write_errors(tmp_path, model, "zero3"):
        pass
    checkpoints.check_compatible(tmp_path, model, "zero3")
    incompatible: tuple[tuple[nn.Module, str, str], ...] = (
        (nn.Linear(2, 4), "zero3", r"another model: shape of bias is \[3\] .* \[4\]"),
        (nn.Linear(2, 3, bias=False), "zero3", r"another model: shape of bias is \[3\] .* missing"),
        (model, "ddp", "strategy zero3; this run uses ddp"),
    )
    for other, strategy, message in incompatible:
        with pytest.raises(UsageError, match=message):
            checkpoints.check_compatible(tmp_path, other, strategy)
    metadata = json.loads((tmp_path / checkpoints.METADATA_FILE).read_text())
    (tmp_path / checkpoints.METADATA_FILE).write_text(json.dumps(metadata | {"world_size": 4}))
    with pytest.raises(UsageError, match="by 4 ranks; this run has 1"):
        checkpoints.check_compatible(tmp_path, model, "zero3")


def test_truncated_checkpoint_is_not_complete(tmp_path: Path) -> None:
    for step, text in ((9, "{}"), (10, '{"cut'), (11, None)):
        folder = tmp_path / "checkpoints" / f"checkpoint-{step}"
        folder.mkdir(parents=True)
        if text is not None:
            (folder / checkpoints.LAST_WRITTEN_FILE).write_text(text)
    assert checkpoints.newest_complete(tmp_path) == tmp_path / "checkpoints" / "checkpoint-9"
    assert checkpoints.newest_complete(tmp_path / "none") is None


def test_other_errors_are_not_converted(tmp_path: Path) -> None:
    with (
        pytest.raises(RuntimeError, match="peer"),
        checkpoints.convert_write_errors(tmp_path / "new", nn.Linear(1, 1), "ddp"),
    ):
        raise RuntimeError("peer")


def short_write_error() -> RuntimeError:
    return RuntimeError("[enforce fail at inline_container.cc:858] . PytorchStreamWriter: file write failed")


@mounts.needs_mount
def test_full_disk_is_distinguished_from_a_write_error(tmp_path: Path) -> None:
    message = "cannot write the checkpoint .*file write failed"
    with (
        mounts.tmpfs(tmp_path / "small", "size=64k") as small,
        pytest.raises(disk.DiskFullError, match=message),
        checkpoints.convert_write_errors(small / "new", nn.Linear(1, 1), "ddp"),
    ):
        raise short_write_error()
    with (
        pytest.raises(SeatrialError, match=message) as broken,
        checkpoints.convert_write_errors(tmp_path / "new", nn.Linear(1, 1), "ddp"),
    ):
        raise short_write_error()
    assert not isinstance(broken.value, disk.DiskFullError)
