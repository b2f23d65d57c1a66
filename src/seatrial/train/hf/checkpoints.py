"""What transformers' checkpoints lack: words for a disk that is full, and a note of what they are checkpoints of."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from torch import nn

from seatrial.model import SeatrialError, UsageError
from seatrial.train import disk
from seatrial.train.hf import ranks
from seatrial.util.files import write_json

METADATA_FILE = "seatrial.json"
LAST_WRITTEN_FILE = "trainer_state.json"  # what transformers writes last


def newest_complete(out: Path) -> Path | None:
    """The newest checkpoint of ``out`` that is whole."""
    whole = [
        path.parent
        for path in (out / "checkpoints").glob(f"checkpoint-*/{LAST_WRITTEN_FILE}")
        if _read(path) is not None
    ]
    return max(whole, key=saved_step, default=None)


def saved_step(checkpoint: Path) -> int:
    """After which step ``checkpoint`` was saved, by its name."""
    return int(checkpoint.name.rpartition("-")[2])


@contextmanager
def write_errors_handled(place: Path, model: nn.Module, strategy: str) -> Iterator[None]:
    """Within, transformers writes the checkpoint ``place``; all ranks call this. Raises SeatrialError where the disk
    does not take it: what was written is removed then, since it may be what fills the disk.
    """
    try:
        yield
        ranks.gather(None)
        if ranks.rank() == 0:
            write_json(place / METADATA_FILE, _note(model, strategy))
    except Exception as error:
        if not (reason := _of_the_disk(error, place)):
            raise
        what = (
            f"cannot write the checkpoint {place}: {reason}. Earlier ones were not touched: --set "
            f"checkpoint.resume=true goes on from them"
        )
        full = disk.disk_full_reason(error, place)
        problem = (
            disk.DiskFullError(f"{what}. {disk.filesystem_usage(place)}. {disk.REMEDY}")
            if full
            else SeatrialError(what)
        )
        shutil.rmtree(place, ignore_errors=True)
        raise problem from error


def check_compatible(place: Path, model: nn.Module, strategy: str) -> None:
    """Raises UsageError where ``place`` cannot be gone on from: transformers leaves out what it does not find."""
    saved = _read(place / METADATA_FILE)
    if saved is None:  # not made by seatrial, or killed just before its note was written
        return
    own = _note(model, strategy)
    shapes: Mapping[str, Any] = saved["shapes"]
    for name in sorted({*shapes, *own["shapes"]}):
        was, now = shapes.get(name, "not there"), own["shapes"].get(name, "not there")
        if was != now:
            raise UsageError(f"the checkpoint {place} is of another model: {name} is {was}, this run's is {now}")
    if saved["strategy"] != strategy:
        raise UsageError(
            f"the checkpoint {place} is of strategy {saved['strategy']}, this run's is {strategy}, which would "
            f"not find Adam's state in it"
        )
    if strategy == "zero3" and saved["world_size"] != own["world_size"]:
        raise UsageError(
            f"the checkpoint {place} is of {saved['world_size']} ranks, and these are {own['world_size']}: ZeRO-3 goes "
            f"on with as many only"
        )


def _note(model: nn.Module, strategy: str) -> dict[str, Any]:
    """Shapes are of whole weights, also where a rank holds a share (ds_shape is what ZeRO-3 keeps of them)."""
    trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
    shapes = {name: list(getattr(p, "ds_shape", p.shape)) for name, p in trained.items()}
    return {"shapes": shapes, "strategy": strategy, "world_size": ranks.world_size()}


def _of_the_disk(error: BaseException, place: Path) -> str | None:
    """What the disk said, if ``error`` is of writing: safetensors and torch.save have exceptions of their own."""
    chain: BaseException | None = error
    while chain is not None:
        if isinstance(chain, (OSError, SafetensorError)) or disk.is_short_write(chain):
            return disk.first_line(chain)
        chain = chain.__cause__ or chain.__context__
    return disk.disk_full_reason(error, place)


def _read(path: Path) -> dict[str, Any] | None:
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return found if isinstance(found, dict) else None
