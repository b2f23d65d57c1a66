"""Reads steps.jsonl of a training: all steps, or the speed from the last ones. Does not import torch."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

from seatrial.model import SeatrialError
from seatrial.model.job_status import TrainingSpeed
from seatrial.util.input_files import read_json, tail_lines

STEPS_FILE, CONFIG_FILE, METRICS_FILE = "steps.jsonl", "config.json", "metrics.json"
INTERRUPTED = "seatrial: interrupted"  # start of the last line that a training prints when Ctrl-C or SIGTERM ends it
_MAX_STEPS = 20  # the speed is an average over at most this many steps
_TAIL_BYTES = 64 * 1024  # contains more than _MAX_STEPS lines, which have about 300 bytes each


def read_steps(folder: Path) -> list[dict[str, Any]]:
    """The complete lines of ``folder``/steps.jsonl; empty without the file. Raises SeatrialError if one is no step."""
    path = folder / STEPS_FILE
    try:
        lines = path.read_text(encoding="utf-8").splitlines(keepends=True) if path.is_file() else []
        steps = [json.loads(line) for line in lines if line.endswith("\n")]  # the last line may be incomplete
    except (OSError, ValueError) as error:
        raise SeatrialError(f"cannot read {path}: {error}") from error
    if invalid := [step for step in steps if not isinstance(step, dict) or not isinstance(step.get("step"), int)]:
        raise SeatrialError(f"{path}: line {str(invalid[0])[:80]!r} has no integer 'step'")
    return steps


def training_speed(folder: Path) -> TrainingSpeed | None:
    """Return the speed over the last _MAX_STEPS steps in ``folder``/steps.jsonl; None before the end of the first step.

    Step 1 does not count if there are other steps, since it includes compilation. Raises OSError if the file cannot be
    read, ValueError if it has several lines and none of the last ones is a step.
    """
    path = folder / STEPS_FILE
    try:
        lines = tail_lines(path, _MAX_STEPS + 1, _TAIL_BYTES)
        age_s = max(0.0, time.time() - path.stat().st_mtime)
    except FileNotFoundError:
        return None
    steps = [step for line in lines if (step := _parse_step(line))]
    if not steps and len(lines) > 1:  # one line may be incomplete
        raise ValueError(f"{path}: none of its last {len(lines)} lines is a step: {lines[-1][:80]!r}")
    if not steps:
        return None
    timed = [step for step in steps if step["step"] > 1][-_MAX_STEPS:] or steps
    seconds = sum(step["seconds"] for step in timed)
    counts = [_number(step.get("tokens")) for step in timed]
    tokens = [count for count in counts if count is not None]
    return TrainingSpeed(
        folder=str(folder),
        step=steps[-1]["step"],
        max_steps=_max_steps(folder / CONFIG_FILE),
        loss=_number(steps[-1].get("loss")),
        steps=len(timed),
        steps_per_second=len(timed) / seconds,
        tokens_per_second=sum(tokens) / seconds if len(tokens) == len(timed) else None,
        age_s=age_s,
    )


def _parse_step(line: str) -> dict[str, Any] | None:
    """The step in ``line``; None if the line is incomplete or damaged."""
    try:
        step = json.loads(line)
    except (ValueError, RecursionError):
        return None
    if not isinstance(step, dict) or type(step.get("step")) is not int:
        return None
    seconds = _number(step.get("seconds"))
    return step if seconds is not None and math.isfinite(seconds) and seconds > 0 else None


def _number(value: object) -> float | None:
    """``value`` as a float; None if it is not a number, or an integer that no float can hold."""
    try:
        return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
    except OverflowError:
        return None


def _max_steps(config: Path) -> int | None:
    try:
        settings = read_json(config)
    except (OSError, ValueError):
        return None
    steps = settings.get("max_steps") if isinstance(settings, dict) else None
    return steps if type(steps) is int else None
