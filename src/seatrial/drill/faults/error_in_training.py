"""A rank raises an error in the middle of its training."""

from __future__ import annotations

from typing import Any

MODULE = "seatrial.train.ddp"
MESSAGE = "intentional error of a drill"


def change(ddp: Any) -> None:
    """Raise RuntimeError when the rank begins to measure its speed; its peers are then in a collective."""

    def fail(*_arguments: object) -> None:
        raise RuntimeError(MESSAGE)

    ddp.measure_speed = fail
