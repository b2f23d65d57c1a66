"""The steps and losses of a training that another program ran: trainer_state.json, as transformers' Trainer writes it.

TrainerState.save_to_json of transformers/trainer_callback.py; its log_history has an entry for every logged step, and
after the last one a summary with train_runtime (transformers/trainer.py). Numbers may be NaN, as Python writes them.
"""

from __future__ import annotations

import json
import math
from pathlib import Path
from statistics import median
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from seatrial.model import SeatrialError, first_validation_error

FILE_NAME = "trainer_state.json"
MAX_BYTES = 64 * 2**20  # a step takes 200 B: this is 300,000 of them
_EXPECTED = "expected what transformers' Trainer writes there"


class _Entry(BaseModel):
    """A file of another program: other keys are ignored, the keys that are read must have the right type."""

    model_config = ConfigDict(frozen=True, strict=True, extra="ignore")


class Step(_Entry):
    step: int = Field(ge=0)
    loss: float
    grad_norm: float | None = None
    learning_rate: float | None = None
    epoch: float | None = None

    @property
    def finite(self) -> bool:
        return math.isfinite(self.loss) and math.isfinite(self.grad_norm or 0.0)


class Summary(_Entry):
    step: int = Field(ge=0)
    train_runtime: float = Field(gt=0, allow_inf_nan=False)
    train_loss: float
    train_samples_per_second: float | None = Field(default=None, ge=0, allow_inf_nan=False)


class TrainerState(_Entry):
    """``summary`` is None where the training did not end."""

    global_step: int = Field(ge=0)
    max_steps: int
    steps: tuple[Step, ...] = ()
    summary: Summary | None = None

    @property
    def first_last_third_loss(self) -> tuple[float, float] | None:
        """The median loss of the first and of the last third; None under three steps with a finite one."""
        losses = [step.loss for step in self.steps if math.isfinite(step.loss)]
        third = len(losses) // 3
        return (median(losses[:third]), median(losses[-third:])) if third else None


def read(path: Path) -> TrainerState:
    """Raises SeatrialError for a file that is missing, truncated or not of the Trainer's layout."""
    found = _object(path)
    history = found.get("log_history")
    if not isinstance(history, list) or not all(isinstance(entry, dict) for entry in history):
        raise SeatrialError(f"{path}: log_history is no list of objects; {_EXPECTED}")
    ends = [entry for entry in history if "train_runtime" in entry]
    fields = {name: found[name] for name in ("global_step", "max_steps") if name in found}
    steps = tuple(entry for entry in history if "loss" in entry)
    try:
        state = TrainerState.model_validate({**fields, "steps": steps, "summary": ends[-1] if ends else None})
    except ValidationError as error:
        raise SeatrialError(f"{path}: {first_validation_error(error)}; {_EXPECTED}") from error
    numbers = [step.step for step in state.steps]
    if numbers != sorted(set(numbers)) or (numbers and numbers[-1] > state.global_step):
        raise SeatrialError(f"{path}: the steps of log_history do not rise to global_step; {_EXPECTED}")
    return state


def _object(path: Path) -> dict[str, Any]:
    try:
        size = path.stat().st_size
        if size > MAX_BYTES:
            raise SeatrialError(f"{path} has {size} bytes, more than the {MAX_BYTES} that are read; {_EXPECTED}")
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise SeatrialError(f"cannot read {path}: {error.strerror or error}; {_EXPECTED}") from error
    except (ValueError, RecursionError) as error:
        raise SeatrialError(f"{path} is no JSON, or not all of it: {error}; {_EXPECTED}") from error
    if not isinstance(found, dict):
        raise SeatrialError(f"{path}: a {type(found).__name__} and no object; {_EXPECTED}")
    return found
