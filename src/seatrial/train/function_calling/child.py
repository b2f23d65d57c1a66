"""The evaluation, as a check starts it on one rank: ``python -m seatrial.train.function_calling.child TASK``.

In a process of its own: ZeRO-3, once set up, shards whatever transformers builds, and the trained model is still there.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.bench import child_result
from seatrial.train import disk, hf, train_config


def run(task: Mapping[str, Any]) -> Any:
    """``task``: ``config``, ``overrides`` and ``out`` of the training."""
    out = Path(task["out"])
    with disk.convert_disk_full(out):
        return hf.evaluate(train_config.load(task["config"], task["overrides"]), out)


if __name__ == "__main__":
    child_result.child_main(run)
