"""The computation of one rank takes longer in every step, as on a throttled GPU or a slow CPU."""

from __future__ import annotations

import time
from typing import Any

from seatrial.drill.faults import call_after_import, is_faulty_rank

SECONDS = 0.3  # in each forward pass: a multiple of the step time of the tiny model


def install() -> None:
    """Delay the end of each forward pass of the rank by SECONDS."""
    if is_faulty_rank():
        call_after_import("seatrial.train.step_timer", _change)


def _change(step_timer: Any) -> None:
    end_forward = step_timer.StepTimer.end_forward

    def end_slow_forward(self: Any) -> None:
        time.sleep(SECONDS)
        end_forward(self)

    step_timer.StepTimer.end_forward = end_slow_forward
