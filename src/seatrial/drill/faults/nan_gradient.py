"""One gradient of one rank is NaN."""

from __future__ import annotations

import math
from typing import Any

MODULE = "seatrial.train.loop"
STEP = 3  # after steps with finite gradients


def change(loop: Any) -> None:
    """Make the gradient at the output of the first block NaN, once."""
    step = loop.Trainer.step

    def step_with_fault(self: Any, number: int, batches: Any) -> Any:
        hook = self.built.model.gradient_hook

        def nan_hook(gradient: Any) -> Any:
            damaged = gradient * math.nan
            if hook:
                hook(damaged)
            return damaged

        if number != STEP:
            return step(self, number, batches)
        self.built.model.gradient_hook = nan_hook
        try:
            return step(self, number, batches)
        finally:
            self.built.model.gradient_hook = hook

    loop.Trainer.step = step_with_fault
