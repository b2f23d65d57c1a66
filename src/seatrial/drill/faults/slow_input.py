"""The data of one rank arrives late in every step, as from a slow filesystem."""

from __future__ import annotations

import time
from typing import Any

from seatrial.drill.faults import call_after_import, is_faulty_rank

SECONDS = 0.3  # a multiple of the step time of the tiny model


def install() -> None:
    """Delay each batch of the rank by SECONDS."""
    if is_faulty_rank():
        call_after_import("seatrial.train.data", _change)


def _change(data: Any) -> None:
    batch = data.Blocks.batch

    def late_batch(self: Any, indices: list[int]) -> Any:
        time.sleep(SECONDS)
        return batch(self, indices)

    data.Blocks.batch = late_batch
