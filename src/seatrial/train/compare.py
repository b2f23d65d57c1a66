"""Two runs of one training, step by step: how far they are apart, and where. Without torch."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from seatrial.model import SeatrialError

StepRecord = dict[str, Any]  # a line of steps.jsonl
# What a step computes. Times are not among it.
_COMPUTED = ("loss", "grad_norm", "trained_tokens", "learning_rate")


@dataclass(frozen=True)
class Difference:
    """The largest |a - b| / |b| of all steps, and the ``step`` in which it was."""

    value: float
    step: int


def read_steps(out: Path, after: int, last: int) -> list[StepRecord]:
    """What ``out``/steps.jsonl says of the steps from ``after`` + 1 to ``last``. Raises SeatrialError unless of all."""
    path = out / "steps.jsonl"
    try:
        found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    except (OSError, ValueError) as error:
        raise SeatrialError(f"cannot read {path}: {error}") from error
    wanted = [record for record in found if after < record["step"] <= last]
    if [record["step"] for record in wanted] != list(range(after + 1, last + 1)):
        raise SeatrialError(f"{path} holds {len(wanted)} of the steps {after + 1} to {last}")
    return wanted


def max_relative_difference(run: Sequence[StepRecord], reference: Sequence[StepRecord], figure: str) -> Difference:
    """How far ``run`` strays from ``reference`` in a ``figure`` that is never 0: loss, or grad_norm."""
    return max(
        (
            Difference(abs(a[figure] - b[figure]) / abs(b[figure]), a["step"])
            for a, b in zip(run, reference, strict=True)
        ),
        key=lambda found: found.value,
    )


def differing_steps(run: Sequence[StepRecord], reference: Sequence[StepRecord], *figures: str) -> list[int]:
    """The steps in which any of ``figures`` (by default all that is computed) is not the same, to the last bit."""
    return [
        a["step"]
        for a, b in zip(run, reference, strict=True)
        if any(a[figure] != b[figure] for figure in figures or _COMPUTED)
    ]
