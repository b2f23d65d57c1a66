"""The evaluation, as a check starts it on one rank: ``python -m seatrial.train.function_calling.child TASK``.

In a process of its own: ZeRO-3, once set up, shards whatever transformers builds, and the trained model is still there.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from seatrial.train import child_answer, hf, train_config


def main(argument: str) -> None:
    """``argument``: JSON with ``config``, ``overrides`` and ``out`` of the training."""
    task = json.loads(argument)
    out = Path(task["out"])
    child_answer.give(lambda: hf.evaluate(train_config.load(task["config"], task["overrides"]), out), out)


if __name__ == "__main__":
    main(sys.argv[1])
