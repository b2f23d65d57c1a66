"""One rank of a training that a check has started: ``python -m seatrial.train.child TASK`` (see fresh_ranks.ask_anew).

What it trains is what ``seatrial train`` does. A process that is a group by itself is alone, as one without torchrun
is: it sees one GPU, and no ranks.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from seatrial.bench import child_result
from seatrial.model import UsageError
from seatrial.train import command, disk, train_config
from seatrial.train.train_config import TrainConfig

_RANKS = ("RANK", "WORLD_SIZE", "LOCAL_RANK")


def run(task: Mapping[str, Any]) -> dict[str, Any] | None:
    """``task``: ``config``, ``overrides``, ``out``, and how many tokens to ``generate`` with what was exported.

    What metrics.json holds, on the first rank of the group; None on the others. Raises SeatrialError.
    """
    wanted, first = train_config.load(task["config"], task["overrides"]), os.environ["RANK"] == "0"
    _open(task, wanted)
    out = Path(task["out"])
    with disk.convert_disk_full(out):
        found = command.run(wanted, out)
        if first and task["generate"]:
            from seatrial.train.hf import inference

            found["generated"] = inference.generate(out / "final", task["device"], task["generate"])
    return found if first else None


def _open(task: Mapping[str, Any], wanted: TrainConfig) -> None:
    """The group of all that train together; none for a process that is alone and wants to share with nobody."""
    device = task["device"]
    if os.environ["WORLD_SIZE"] == "1" and (wanted.stack == "native" or wanted.parallel.strategy == "ddp"):
        for name in _RANKS:
            del os.environ[name]
        if device != "cpu":  # before anything asks for a GPU
            index, visible = int(device.partition(":")[2]), os.environ.get("CUDA_VISIBLE_DEVICES")
            os.environ["CUDA_VISIBLE_DEVICES"] = visible.split(",")[index] if visible else str(index)
        return
    try:
        from seatrial.bench import child_ranks
        from seatrial.train import parallel
    except ModuleNotFoundError as error:
        raise UsageError(f"training needs {error.name}: pip install '.[torch]' in a clone of seatrial") from error
    child_ranks.open_child_group(task, "gloo" if device == "cpu" else parallel.BACKEND)


if __name__ == "__main__":
    child_result.child_main(run)
