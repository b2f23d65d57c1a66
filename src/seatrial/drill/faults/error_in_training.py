"""A rank raises an error in the middle of its training."""

from __future__ import annotations

from typing import Any

from seatrial.drill.faults import call_after_import, is_faulty_rank

MESSAGE = "intentional error of a drill"


def install() -> None:
    """Raise RuntimeError when the rank begins to measure its speed; its peers are then in a collective."""
    if is_faulty_rank():
        call_after_import("seatrial.train.ddp", _change)


def _change(ddp: Any) -> None:
    def fail(*_arguments: object) -> None:
        raise RuntimeError(MESSAGE)

    ddp.measure_speed = fail
