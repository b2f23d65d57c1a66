"""The computation of one rank takes longer in every step, as on a throttled GPU or a slow CPU."""

from __future__ import annotations

import time
from typing import Any

MODULE = "seatrial.train.step_timer"
SECONDS = 0.3  # in each forward pass: a multiple of the step time of the tiny model


def change(step_timer: Any) -> None:
    """Delay the end of each forward pass of the rank by SECONDS."""
    end_forward = step_timer.StepTimer.end_forward

    def end_slow_forward(self: Any) -> None:
        time.sleep(SECONDS)
        end_forward(self)

    step_timer.StepTimer.end_forward = end_slow_forward
