"""Reads steps and losses from trainer_state.json, which the Trainer of transformers writes.

The file is written by TrainerState.save_to_json in transformers/trainer_callback.py. Its log_history has an entry for
each logged step and, after the last step, a summary with train_runtime (transformers/trainer.py). Numbers may be NaN.
"""

from __future__ import annotations

import math
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.model import SeatrialError, first_validation_error
from seatrial.util.input_files import read_bytes

FILE_NAME = "trainer_state.json"
MAX_BYTES = 64 * 2**20  # enough for 300,000 steps of about 200 B
_EXPECTED = "expected a file written by the Trainer of transformers"


class _StrictModel(BaseModel):
    """Base class: ignores unknown keys, and does not convert values to the type of a known key."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class LoggedStep(_StrictModel):
    step: int = Field(ge=0)
    loss: float
    grad_norm: float | None = None
    learning_rate: float | None = None
    epoch: float | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm or 0.0)


class Summary(_StrictModel):
    """The summary at the end of training."""

    step: int = Field(ge=0)
    train_runtime: float = Field(gt=0, allow_inf_nan=False)  # seconds
    train_loss: float
    train_samples_per_second: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class TrainerState(_StrictModel):
    """The content of trainer_state.json. ``summary``: None if the training did not finish."""

    global_step: int = Field(ge=0)
    max_steps: int
    steps: tuple[LoggedStep, ...] = ()
    summary: Summary | None = None

    @property
    def first_last_third_loss(self) -> tuple[float, float] | None:
        """The median losses of the first and last third of the steps with finite loss; None with < 3 such steps."""
        losses = [step.loss for step in self.steps if math.isfinite(step.loss)]
        third = len(losses) // 3
        return (median(losses[:third]), median(losses[-third:])) if third else None


class _File(_StrictModel):
    global_step: int = Field(ge=0)
    max_steps: int
    log_history: list[dict[str, Any]]


def read(path: Path) -> TrainerState:
    """The content of the file at ``path``. Raises SeatrialError if it is missing or invalid."""
    try:
        file = _File.model_validate_json(read_bytes(path, MAX_BYTES))
        fields = {
            "global_step": file.global_step,
            "max_steps": file.max_steps,
            "steps": tuple(entry for entry in file.log_history if "loss" in entry),
            "summary": next((entry for entry in reversed(file.log_history) if "train_runtime" in entry), None),
        }
        state = TrainerState.model_validate(fields)
    except OSError as error:
        raise SeatrialError(f"cannot read {path}: {error.strerror or error}; {_EXPECTED}") from error
    except ValidationError as error:
        raise SeatrialError(f"{path}: {first_validation_error(error)}; {_EXPECTED}") from error
    step_numbers = [step.step for step in state.steps]
    if step_numbers != sorted(set(step_numbers)) or (step_numbers and step_numbers[-1] > state.global_step):
        raise SeatrialError(f"{path}: the steps of log_history are not ascending up to global_step; {_EXPECTED}")
    return state
