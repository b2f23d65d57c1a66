"""One rank of a training run that a check starts: ``python -m seatrial.train.child TASK`` (see bench/child_ranks.py).

The rank trains as ``seatrial train run`` does. A single rank trains as if it was started without torchrun (one visible
GPU, RANK not set), unless its config needs a process group.

The evaluation of function calling has a process of its own, since DeepSpeed ZeRO-3, once initialised, shards every
model that transformers builds, and the trained model still occupies the memory of the training process.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.bench import child_result
from seatrial.bench.child_result import VISIBLE_DEVICES, visible_device
from seatrial.model import UsageError
from seatrial.train import command, disk, hf, train_config
from seatrial.train.train_config import TrainConfig

_RANK_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def run(task: Mapping[str, Any]) -> dict[str, Any] | None:
    """Trains with the task's ``config`` and ``overrides``; results go to the task's ``out``.

    If the task's ``generate`` is not 0, rank 0 then generates at most that many tokens with the exported model. Returns
    the content of metrics.json on rank 0 of the group, None on other ranks. With the task's ``evaluate``, evaluates the
    training run in ``out`` instead, see hf.evaluate. Raises SeatrialError.
    """
    config, out = train_config.load(task["config"], task["overrides"]), Path(task["out"])
    with disk.convert_disk_full(out):
        if task.get("evaluate"):
            return hf.evaluate(config, out)
        is_rank_0 = os.environ["RANK"] == "0"
        _open_group(task, config)
        metrics = command.run(config, out, task["started"])
        if is_rank_0 and task["generate"]:
            from seatrial.train.hf import inference

            metrics["generated"] = inference.generate(out / "final", task["device"], task["generate"])
    return metrics if is_rank_0 else None


def _open_group(task: Mapping[str, Any], config: TrainConfig) -> None:
    """Opens the process group; for a single rank that does not need one, unsets torchrun's variables instead."""
    device = task["device"]
    if os.environ["WORLD_SIZE"] == "1" and not config.needs_group:
        for name in _RANK_VARIABLES:
            del os.environ[name]
        if device != "cpu":  # must be set before CUDA is initialized
            os.environ[VISIBLE_DEVICES] = visible_device(device)
        return
    try:
        from seatrial.bench import child_ranks
        from seatrial.train import parallel
    except ModuleNotFoundError as error:
        raise UsageError(f"training needs {error.name}: pip install '.[torch]' in a clone of seatrial") from error
    child_ranks.open_child_group(task, "gloo" if device == "cpu" else parallel.BACKEND)


if __name__ == "__main__":
    child_result.child_main(run)
