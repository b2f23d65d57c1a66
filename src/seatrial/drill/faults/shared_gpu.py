"""A rank uses the GPU of local rank 0, as with a wrong binding by the scheduler."""

from __future__ import annotations

import os

MODULE = "seatrial.model"  # imported before the rank selects its GPU


def change(_model: object) -> None:
    """Give the rank the local rank 0 before it selects its GPU."""
    os.environ["LOCAL_RANK"] = "0"
