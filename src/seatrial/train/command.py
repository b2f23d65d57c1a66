"""``seatrial train``: what the command line does for one rank."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from seatrial.model import SeatrialError, UsageError
from seatrial.train import disk, hf, train_config
from seatrial.train.train_config import TrainConfig
from seatrial.util.gc_pause import gc_paused


def train(config: Path, overrides: Sequence[str], out: Path | None, as_json: bool) -> None:
    """Train, and say on the first rank's standard output where the results are."""
    found = run(train_config.load(config, overrides), out)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(found, indent=2) if as_json else f"Results: {found['out']}/metrics.json")


def run(wanted: TrainConfig, out: Path | None) -> dict[str, Any]:
    """Train with the stack that is wanted; what metrics.json holds. Raises SeatrialError."""
    started = psutil.Process().create_time()
    try:
        with gc_paused():
            from seatrial.train import loop
    except ModuleNotFoundError as error:
        raise UsageError(
            f"training needs {error.name}, which is not installed: pip install '.[torch]' in a clone of seatrial"
        ) from error
    try:
        if wanted.stack == "hf":
            # one name on all ranks, which have not met yet
            with contextlib.redirect_stdout(sys.stderr):  # where accelerate and DeepSpeed write their log
                return hf.train(wanted, out or Path("seatrial-runs", wanted.run_name), started)
        return loop.train(wanted, out, started)
    except SeatrialError:
        raise
    except Exception as error:
        if full := disk.disk_full_error(error, out or Path()):
            raise full from error
        if isinstance(error, OSError):
            raise SeatrialError(f"training stopped: {error}") from error
        raise
