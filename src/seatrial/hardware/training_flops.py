"""What a training has to compute for a token, as its check recorded it or the trial's options foretell it."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import JsonValue

MFU, SPEED = "mfu", "tokens_per_second_per_gpu"
BOUNDED_METRICS = (
    MFU,
    SPEED,
)  # the figures that arithmetic bounds: NAME, or NAME.RUN where a check trains several times
_METRIC = re.compile(rf"(?:(?P<share>{MFU})|{SPEED})(?P<end>(?:\.\w+)?)")
# Which line of a SKU's spec is the most that such products reach. torch may round fp32 to TF32, where it is told to
_LINES = {"bf16": "bf16", "fp16": "fp16", "fp8": "fp8", "fp32": "tf32"}
_MOST_FLOPS = 1e18  # of a token, by no model that there is


@dataclass(frozen=True)
class TrainingWork:
    """``flops``: of a token, None where nobody told; ``line``: of a SKU's spec. ``share``: it is of an MFU, in %."""

    flops_per_token: float | None
    spec_line: str
    is_mfu: bool


def training_work(metric: str, facts: Mapping[str, JsonValue]) -> TrainingWork | None:
    """By the fact ``run`` of the training that ``metric`` is of, or ``training``. None for what is no training, and where
    the facts do not say in which type it multiplies.
    """
    match = _METRIC.fullmatch(metric)
    load = facts.get(f"run{match['end']}") or facts.get("training") if match else None
    if not match or not isinstance(load, Mapping):
        return None
    line = _LINES.get(str(load.get("precision")).partition(" ")[0])
    return TrainingWork(_count(load.get("flops_per_token")), line, bool(match["share"])) if line else None


def _count(value: JsonValue) -> float | None:
    """Floating-point operations; None for what a record may hold in their place, of which nothing follows."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    return float(value) if 1 <= value < _MOST_FLOPS else None
