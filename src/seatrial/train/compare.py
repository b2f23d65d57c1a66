"""Comparison of two training runs step by step. Does not import torch."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.model import SeatrialError
from seatrial.train import step_speed

StepRecord = dict[str, Any]  # a line of steps.jsonl
# The fields of a step that a repetition of the run must reproduce bit by bit
_COMPUTED = ("loss", "grad_norm", "trained_tokens", "learning_rate")


@dataclass(frozen=True)
class Difference:
    """The largest relative difference |run - reference| / |reference| of all steps, and the ``step`` that has it."""

    value: float
    step: int


def read_steps(out: Path, after: int, last: int) -> list[StepRecord]:
    """The records of steps ``after`` + 1 to ``last`` in ``out``/steps.jsonl. Raises SeatrialError."""
    records = [record for record in step_speed.read_steps(out) if after < record["step"] <= last]
    if [record["step"] for record in records] != list(range(after + 1, last + 1)):
        path = out / step_speed.STEPS_FILE
        raise SeatrialError(f"{path}: expected one record per step from {after + 1} to {last}, found {len(records)}")
    return records


def max_relative_difference(run: Sequence[StepRecord], reference: Sequence[StepRecord], field: str) -> Difference:
    """The largest relative difference between ``run`` and ``reference`` in ``field``.

    ``field``: loss or grad_norm, which are never 0.
    """
    return max(
        (Difference(abs(a[field] - b[field]) / abs(b[field]), a["step"]) for a, b in zip(run, reference, strict=True)),
        key=lambda difference: difference.value,
    )


def differing_steps(run: Sequence[StepRecord], reference: Sequence[StepRecord], *fields: str) -> list[int]:
    """The steps in which any of ``fields`` (default: ``_COMPUTED``) is not bitwise equal."""
    return [
        a["step"]
        for a, b in zip(run, reference, strict=True)
        if any(a[field] != b[field] for field in fields or _COMPUTED)
    ]
