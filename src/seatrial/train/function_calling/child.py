"""Child process of a check for the evaluation on one rank: ``python -m seatrial.train.function_calling.child TASK``.

It is a separate process because DeepSpeed ZeRO-3, once initialised, shards every model that transformers builds, and
because the trained model still occupies memory.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.bench import child_result
from seatrial.train import disk, hf, train_config


def run(task: Mapping[str, Any]) -> Any:
    """Evaluate the training run with the ``config``, ``overrides`` and ``out`` of ``task``."""
    out = Path(task["out"])
    with disk.convert_disk_full(out):
        return hf.evaluate(train_config.load(task["config"], task["overrides"]), out)


if __name__ == "__main__":
    child_result.child_main(run)
