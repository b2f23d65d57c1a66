"""The computation of one rank takes longer in every step, as on a throttled GPU or a slow CPU."""

from __future__ import annotations

import time
from typing import Any

MODULE = "seatrial.train.step_timer"
SECONDS = 0.3  # in each step: a multiple of the step time of the tiny model


def change(step_timer: Any) -> None:
    """Delay the computation of each step of the rank by SECONDS."""
    begin = step_timer.StepTimer.begin

    def begin_slow_step(self: Any) -> None:
        begin(self)
        time.sleep(SECONDS)

    step_timer.StepTimer.begin = begin_slow_step
