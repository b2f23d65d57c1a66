"""Additions to transformers' checkpoints: messages for write errors, and metadata to check if a run can resume."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from seatrial.model import SeatrialError, UsageError
from seatrial.train import disk, ranks
from seatrial.train.checkpoint import shape_difference, trained_shapes
from seatrial.util.files import write_json
from seatrial.util.input_files import read_bytes

METADATA_FILE = "seatrial.json"
LAST_WRITTEN_FILE = "trainer_state.json"  # transformers writes it last


def newest_complete(out: Path) -> Path | None:
    """The newest complete checkpoint in ``out``; None if there is none."""
    complete = [
        path.parent
        for path in (out / "checkpoints").glob(f"checkpoint-*/{LAST_WRITTEN_FILE}")
        if _read_json(path) is not None
    ]
    return max(complete, key=saved_step, default=None)


def saved_step(checkpoint: Path) -> int:
    """The step after which ``checkpoint`` was saved, from its folder name."""
    return int(checkpoint.name.rpartition("-")[2])


@contextmanager
def convert_write_errors(folder: Path, model: nn.Module, strategy: str) -> Iterator[None]:
    """Context manager around the write of the checkpoint ``folder`` by transformers; rank 0 then adds the metadata.

    All ranks enter this context. After an error of the filesystem, the partial checkpoint, which may fill the disk, is
    removed, and SeatrialError is raised.
    """
    try:
        yield
        ranks.gather(None)
        if ranks.rank() == 0:
            write_json(folder / METADATA_FILE, _metadata(model, strategy))
    except Exception as error:
        if not (reason := _write_error(error, folder)):
            raise
        message = (
            f"cannot write the checkpoint {folder}: {reason}. Earlier checkpoints are unchanged; to resume from the "
            "newest, --set checkpoint.resume=true"
        )
        checkpoint_error = SeatrialError(message)
        if disk.disk_full_reason(error, folder):
            checkpoint_error = disk.DiskFullError(f"{message}. {disk.filesystem_usage(folder)}. {disk.REMEDY}")
        shutil.rmtree(folder, ignore_errors=True)
        raise checkpoint_error from error


def check_compatible(folder: Path, model: nn.Module, strategy: str) -> None:
    """Raise UsageError if a run with ``model`` cannot resume from the checkpoint ``folder``.

    Without this check, transformers ignores missing tensors. A checkpoint without metadata is accepted.
    """
    saved = _read_json(folder / METADATA_FILE)
    if saved is None:  # not written by seatrial, or the run was killed before it wrote the metadata
        return
    current = _metadata(model, strategy)
    if difference := shape_difference(saved["shapes"], current["shapes"]):
        raise UsageError(f"the checkpoint {folder} belongs to another model: {difference}")
    if saved["strategy"] != strategy:
        raise UsageError(
            f"the checkpoint {folder} was saved with strategy {saved['strategy']}; this run uses {strategy}, which "
            "cannot read its optimizer state"
        )
    if strategy == "zero3" and saved["world_size"] != current["world_size"]:
        raise UsageError(
            f"the checkpoint {folder} was saved by {saved['world_size']} ranks; this run has {current['world_size']}: "
            "ZeRO-3 resumes only with the same number"
        )


def _metadata(model: nn.Module, strategy: str) -> dict[str, Any]:
    """Strategy, world size and unsharded shapes of the trained weights."""
    return {"shapes": trained_shapes(model), "strategy": strategy, "world_size": ranks.world_size()}


def _write_error(error: BaseException, folder: Path) -> str | None:
    """The message of the filesystem error in the chain of ``error`` and its causes; None if there is none."""
    for cause in disk.error_chain(error):
        if isinstance(cause, (OSError, SafetensorError)) or disk.is_short_write(cause):
            return disk.first_line(cause)
    return disk.disk_full_reason(error, folder)


def _read_json(path: Path) -> dict[str, Any] | None:
    try:
        document = json.loads(read_bytes(path))  # NaN is allowed: a loss in trainer_state.json may be NaN
    except (OSError, ValueError, RecursionError):
        return None
    return document if isinstance(document, dict) else None
