"""The command ``seatrial train run`` on one rank."""

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
from seatrial.train import disk, hf, restarts, train_config
from seatrial.train.train_config import TrainConfig
from seatrial.util.gc_pause import gc_paused


def train(config: Path, overrides: Sequence[str], out: Path | None, as_json: bool) -> None:
    """Trains, and prints on rank 0 the path of metrics.json, or its content with ``as_json``."""
    metrics = run(train_config.load(config, overrides), out)
    if os.environ.get("RANK", "0") == "0":
        print(json.dumps(metrics, indent=2) if as_json else f"Results: {metrics['out']}/metrics.json")


def run(config: TrainConfig, out: Path | None, started: float | None = None) -> dict[str, Any]:
    """Trains with the configured stack; returns the content of metrics.json. Raises SeatrialError.

    With checkpoint.requeue, a training that an earlier start of this Slurm job has completed is not repeated.
    ``started``: Unix time at which the first startup phase began, by default the start of this process.
    """
    started = started or psutil.Process().create_time()
    config = restarts.config_with_resume(config, out)
    if metrics := restarts.earlier_metrics(config, out):
        return metrics
    try:
        with gc_paused():
            from seatrial.train import loop
    except ModuleNotFoundError as error:
        raise UsageError(
            f"training needs {error.name}, which is not installed: pip install '.[torch]' in a clone of seatrial"
        ) from error
    try:
        if config.stack == "hf":
            # No time in the folder's name: the ranks cannot communicate yet and would get different names
            folder = out or Path("seatrial-runs", config.run_name)
            with contextlib.redirect_stdout(sys.stderr):  # accelerate and DeepSpeed log to stdout
                return hf.train(config, folder, started)
        return loop.train(config, out, started)
    except SeatrialError:
        raise
    except Exception as error:
        if disk_full := disk.disk_full_error(error, out or Path()):
            raise disk_full from error
        if isinstance(error, OSError):
            raise SeatrialError(f"training stopped: {error}") from error
        raise
