"""The commands ``seatrial train run``, on one rank, and ``seatrial train preprocess``, which does not import torch."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil

from seatrial.model import SeatrialError, UsageError
from seatrial.train import data_cache, disk, hf, restarts, train_config
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
        with disk.convert_disk_full(out or Path()):
            if config.stack == "native":
                return loop.train(config, out, started)
            # No time in the folder's name: the ranks cannot communicate yet and would get different names
            folder = out or Path("seatrial-runs", config.run_name)
            with contextlib.redirect_stdout(sys.stderr):  # accelerate and DeepSpeed log to stdout
                return hf.train(config, folder, started)
    except OSError as error:
        raise SeatrialError(f"training stopped: {error}") from error


def preprocess(config: TrainConfig) -> dict[str, Any] | None:
    """Write the tokens of ``config`` to data.cache or SEATRIAL_DATA_CACHE, unless that folder has them.

    Returns ``folder`` with the tokens, ``existed``: whether the folder was there already, and ``seconds``. None if the
    config trains on Markov sequences, which each training run generates from the seed. Raises UsageError if no cache is
    set or the cache is not writable, if a package is missing, for invalid rows, and for a damaged folder; SeatrialError
    if the tokens cannot be written.
    """
    if config.trains_on_markov_chain:
        return None
    cache_name = config.data.cache or os.environ.get(data_cache.CACHE_VARIABLE)
    if not cache_name:
        raise UsageError(
            f"no directory for the tokens: --set data.cache=DIR, or export {data_cache.CACHE_VARIABLE}=DIR"
        )
    cache, started = Path(cache_name).absolute(), time.monotonic()
    disk.require_writable(cache, "data.cache" if config.data.cache else data_cache.CACHE_VARIABLE)
    try:
        if config.stack == "hf":
            prepared = hf.preprocess(config, cache)
        else:
            from seatrial.train import blocks

            prepared = blocks.prepare(config, cache)
        if prepared.hit:
            data_cache.require_intact(prepared.folder)
    except ModuleNotFoundError as error:
        raise UsageError(f"preprocess needs {error.name}, which is not installed: pip install {error.name}") from error
    except (OSError, MemoryError) as error:
        raise disk.write_error(error, cache, f"cannot write the prepared data to {cache}") from error
    return {"folder": str(prepared.folder), "existed": prepared.hit, "seconds": round(time.monotonic() - started, 1)}
