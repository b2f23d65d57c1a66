"""The data of one rank arrives late in every step, as from a slow filesystem."""

from __future__ import annotations

import time
from typing import Any

MODULE = "seatrial.train.data"
SECONDS = 0.3  # a multiple of the step time of the tiny model


def change(data: Any) -> None:
    """Delay each batch of the rank by SECONDS."""
    batch = data.Blocks.batch

    def late_batch(self: Any, indices: list[int]) -> Any:
        time.sleep(SECONDS)
        return batch(self, indices)

    data.Blocks.batch = late_batch
