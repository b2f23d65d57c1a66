"""A rank uses the GPU of local rank 0, as with a wrong binding by the scheduler."""

from __future__ import annotations

import os

from seatrial.drill.faults import is_faulty_rank


def install() -> None:
    """Give the rank the local rank 0 before it selects its GPU."""
    if is_faulty_rank():
        os.environ["LOCAL_RANK"] = "0"
