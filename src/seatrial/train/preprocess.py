"""The command ``seatrial train preprocess``: converts rows to tokens before training; needs neither a GPU nor torch."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from seatrial.model import UsageError
from seatrial.train import data_cache, disk, hf
from seatrial.train.data_cache import Prepared
from seatrial.train.train_config import TrainConfig


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
        prepared = _prepare(config, cache)
        if prepared.hit:
            data_cache.require_intact(prepared.folder)
    except (OSError, MemoryError) as error:
        raise disk.write_error(error, cache, f"cannot write the prepared data to {cache}") from error
    return {"folder": str(prepared.folder), "existed": prepared.hit, "seconds": round(time.monotonic() - started, 1)}


def _prepare(config: TrainConfig, cache: Path) -> Prepared:
    try:
        if config.stack == "hf":
            return hf.preprocess(config, cache)
        from seatrial.train import blocks

        return blocks.prepare(config, cache)
    except ModuleNotFoundError as error:
        raise UsageError(f"preprocess needs {error.name}, which is not installed: pip install {error.name}") from error
