"""Evaluates function calling on one rank, for a check: ``python -m seatrial.train.function_calling.child TASK``.

The check starts a separate process because DeepSpeed ZeRO-3, once initialised, shards every model that transformers
builds, and because the trained model still occupies the memory of the training process.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.bench import child_result
from seatrial.train import disk, hf, train_config


def run(task: Mapping[str, Any]) -> Any:
    """Evaluate the training run with the task's ``config``, ``overrides`` and ``out``: see hf.evaluate."""
    out = Path(task["out"])
    with disk.convert_disk_full(out):
        return hf.evaluate(train_config.load(task["config"], task["overrides"]), out)


if __name__ == "__main__":
    child_result.child_main(run)
